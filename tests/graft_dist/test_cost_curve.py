from pathlib import Path

import numpy as np
import pytest

from graft_dist.cost_curve import (
    CostCurve,
    Timing,
    convex_fit,
    fit_cost_curve,
    line,
    line_fit,
    monotone_fit,
    read_cost_curve,
)
from graft_dist.errors import PolicyError


def test_between_and_beyond_the_points() -> None:
    curve = CostCurve((0, 2, 4, 6), (10.0, 20.0, 22.0, 30.0), "hand")
    assert curve.table(8).tolist() == [10, 20, 20, 21, 22, 26, 30, 34, 38]
    # Two last points that noise made equal do not give away what lies beyond.
    assert CostCurve((0, 2, 4, 6), (10.0, 20.0, 30.0, 30.0), "hand").table(8).tolist()[4:] == [30, 30, 30, 32.5, 35]
    assert CostCurve((0, 2), (10.0, 20.0), "hand").table(3).tolist() == [10, 20, 20, 25]
    assert curve.table(0).tolist() == [10]


def test_a_fit_pools_what_falls() -> None:
    values, weights = np.array([1.0, 5.0, 2.0, 6.0]), np.array([1.0, 1.0, 2.0, 1.0])
    assert monotone_fit(values, weights).tolist() == [1, 3, 3, 6]
    assert monotone_fit(np.array([3.0, 2.0, 1.0]), np.ones(3)).tolist() == [2, 2, 2]


def test_a_fit_of_timings() -> None:
    drafted = [Timing(8, 30.0, 20.0, 5), Timing(4, 24.0, 16.0, 10)]
    fitted = fit_cost_curve([*drafted, Timing(0, 15.0, 14.0, 3)], "box")
    assert fitted is not None
    assert (fitted.budgets, fitted.round_ms) == ((0, 4, 8), (15.0, 24.0, 30.0))
    assert "15 recorded rounds at 2 budgets, plain rounds from 3 (box)" in fitted.source
    without_plain = fit_cost_curve(drafted, "box")
    assert without_plain is not None and without_plain.round_ms[0] == 16.0
    assert fit_cost_curve(drafted[:1], "box") is None


def test_the_papers_line() -> None:
    curve = line(46.0, 50.0, 0.5, "hand")
    assert curve.table(200)[[0, 1, 100, 200]].tolist() == [46.0, 50.5, 100.0, 150.0]
    budgets = np.array([1.0, 8.0, 64.0])
    assert line_fit(budgets, 50 + 0.5 * budgets, np.ones(3)) == pytest.approx((50, 0.5))
    assert line_fit(budgets, np.array([60.0, 55.0, 50.0]), np.ones(3)) == pytest.approx((55, 0))


def test_a_price_for_context() -> None:
    curve = CostCurve((0, 2), (10.0, 20.0), "hand", token_ms=0.5)
    assert curve.table(2, 100).tolist() == [60, 70, 70] and curve.table(2).tolist() == [10, 20, 20]
    with pytest.raises(PolicyError, match="per token"):
        CostCurve((0, 2), (10.0, 20.0), "hand", token_ms=-1.0)


def test_a_convex_fit_by_hand() -> None:
    budgets = np.array([0.0, 1.0, 2.0, 3.0])
    convex = np.array([1.0, 1.5, 3.0, 7.0])
    np.testing.assert_allclose(convex_fit(budgets, convex, np.ones(4)), convex, atol=1e-9)
    # A bump in the middle becomes the line between; what falls becomes flat.
    np.testing.assert_allclose(convex_fit(budgets[:3], np.array([0.0, 3.0, 0.0]), np.ones(3)), [1, 1, 1], atol=1e-9)
    np.testing.assert_allclose(convex_fit(budgets[:3], np.array([3.0, 2.0, 1.0]), np.ones(3)), [2, 2, 2], atol=1e-9)


def test_a_convex_fit_is_the_nearest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        budgets = np.sort(rng.choice(200, 8, replace=False)).astype(np.float64)
        values, weights = 40 + rng.normal(0, 5, 8) + budgets * rng.uniform(0, 1), rng.uniform(0.5, 20, 8)
        fitted = convex_fit(budgets, values, weights)
        slopes = np.diff(fitted) / np.diff(budgets)
        assert (slopes >= -1e-9).all() and (np.diff(slopes) >= -1e-9).all()
        best = (weights * (fitted - values) ** 2).sum()
        for _ in range(200):
            hinges = np.maximum(budgets[:, None] - rng.choice(budgets, 2), 0) @ rng.normal(0, 0.05, 2)
            other = fitted + hinges + rng.normal(0, 0.5)
            steps = np.diff(other) / np.diff(budgets)
            if (steps >= 0).all() and (np.diff(steps) >= 0).all():
                assert (weights * (other - values) ** 2).sum() >= best - 1e-6


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1, 2]", "is no JSON object"),
        ('{"0": 46, "x": 1}', "is no JSON object"),
        ('{"0": 46}', "budget 0 and one more"),
        ('{"4": 46, "8": 50}', "budget 0 and one more"),
        ('{"0": 46, "8": 40}', "must not fall"),
        ('{"0": 0, "8": 40}', "above 0"),
        ('{"0": 46, "8": Infinity}', "above 0"),
        ('{"0": 46, "8": 50, "08": 51}', "must rise"),
    ],
)
def test_files_that_hold_no_curve(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(PolicyError, match=sentence):
        read_cost_curve(tmp_path / "cost.json")


def test_a_file_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"16": 54, "0": 46, "8": 50.5}')
    assert read_cost_curve(tmp_path / "cost.json").round_ms == (46.0, 50.5, 54.0)
    with pytest.raises(PolicyError, match="nowhere"):
        read_cost_curve(tmp_path / "nowhere.json")
