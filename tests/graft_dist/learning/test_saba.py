"""Fitting budgets: what rounds show, gain, calibration and cost on cases whose answers are worked out by hand."""

from __future__ import annotations

from math import log, sqrt
from typing import Any

import numpy as np
import pytest

from graft_dist.budget import DraftState, PiecewiseCalibration, PowerGain, RawProbabilities, StateCalibration
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.errors import PolicyError
from graft_dist.learning.saba import (
    Observations,
    TimedRounds,
    fit_calibrations,
    fit_costs,
    fit_gain,
    fit_piecewise,
    fit_state,
    join_observations,
    node_chances,
    observe,
    reliability,
)
from graft_dist.replay import outcomes, walk_rounds
from tests.graft_dist.test_replay import random_rounds, rounds_of

STATE = DraftState(conf=0.0, degen=0.0, hist=0.0, context_length=0, max_budget=9, sequence_key=0, round_index=0)


def seen(scores: list[list[float]], accepted: list[list[int]], **changes: Any) -> Observations:
    """Observations of trees with these path scores; a state of zeros and far from the answer's end unless told."""
    number = len(scores)
    fields: dict[str, Any] = {
        "conf": np.zeros(number), "degen": np.zeros(number), "hist": np.zeros(number),
        "scores": np.array(scores, np.float64), "is_accepted": np.array(accepted, np.bool_),
        "num_left": np.full(number, 99), "num_left_out": 0,
    }  # fmt: skip
    return Observations(**{**fields, **{name: np.asarray(value) for name, value in changes.items()}})


# ---- observations


def test_a_replayed_round_shows_its_whole_gain_curve() -> None:
    # Nodes 1: 5, 2: 5 7, 3: 6, 4: 6 7, 5: 5 8, 6: 6 8.
    followed, left = [[6, 7], [5, 9], [9, 9], [6, -1]], [9, 9, 9, 1]
    rounds = rounds_of(followed, left, conf=np.array([0.5, 0.6, 0.7, 0.8], np.float32))
    found = observe(rounds, walk_rounds(rounds, MarginalScorer(), 8), 8)
    assert found.tokens.tolist() == [
        [1, 1, 1, 2, 3, 3, 3, 3, 3], [1, 2, 2, 2, 2, 2, 2, 2, 2], [1] * 9, [1] * 9,
    ]  # fmt: skip
    assert found.num_nodes.tolist() == [6] * 4
    np.testing.assert_allclose(found.scores[0, :3], [-0.5, -0.75, -1.0])
    assert np.isnan(found.scores[:, 6:]).all()
    assert found.conf.tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8])


def test_the_curve_is_what_replay_counts() -> None:
    rounds = random_rounds(80, seed=3)
    walk = walk_rounds(rounds, MarginalScorer(), 30)
    found = observe(rounds, walk, 30)
    has_tree = walk.trees.num_nodes > 0
    assert found.num_left_out == (~has_tree).sum() > 0
    for budget in (0, 1, 5, 30):
        expected = outcomes(rounds, walk, np.minimum(budget, walk.trees.num_nodes)).num_tokens
        assert found.tokens[:, budget].tolist() == expected[has_tree].tolist()


def test_states_that_are_no_numbers_are_left_out_and_counted() -> None:
    odd = np.array([np.nan, 0.5, np.inf, 0.5], np.float32)
    rounds = rounds_of([[6, 7]] * 4, [9] * 4, conf=odd, degen=np.array([0, np.nan, 0, 0], np.float32))
    part = observe(rounds, walk_rounds(rounds, MarginalScorer(), 6), 6)
    assert (len(part), part.num_left_out) == (1, 3)
    both = join_observations([part, part])
    assert (len(both), both.num_left_out, both.tokens.shape) == (2, 6, (2, 7))
    with pytest.raises(PolicyError, match="one budget"):
        join_observations([part, observe(rounds, walk_rounds(rounds, MarginalScorer(), 5), 5)])


# ---- gain


def test_the_square_root_is_found() -> None:
    """Every round accepts its first node, and 414 of 1000 the second: 1 + B^.5."""
    accepted = [[1, int(at < 414)] for at in range(1000)]
    rounds = seen([[-0.1, -1.0]] * 1000, accepted)
    fit = fit_gain([rounds, rounds])
    a, beta = fit.gain.a_and_beta(STATE)
    assert (a, beta) == (pytest.approx(1.0, abs=1e-3), pytest.approx(0.5, abs=2e-3))
    assert [budget for budget, _, _ in fit.curve] == [1, 2]
    assert fit.curve[1][1:] == (pytest.approx(2.414), pytest.approx(2.414, abs=1e-3))
    assert fit.error == pytest.approx(sqrt(0.414 * 0.586 / 2), abs=1e-3)  # what no curve can know
    assert fit.error == pytest.approx(fit.constant_error)


def test_the_state_is_found_where_it_decides() -> None:
    """Confident rounds accept 8 of 10 first nodes, the others 2 of 10: a = .2 * 4^conf."""
    accepted = [[int(at < 2)] for at in range(10)] + [[int(at < 8)] for at in range(10)]
    rounds = seen([[-0.5]] * 20, accepted, conf=np.repeat([0.0, 1.0], 10), hist=np.tile([0.0, 3.0], 10))
    fit = fit_gain([rounds, rounds])
    assert fit.gain.a_weights[:2] == (pytest.approx(log(0.2), abs=0.01), pytest.approx(log(4), abs=0.01))
    assert fit.gain.a_weights[2] == 0.0, "a state that never changes has no weight"
    assert fit.gain.first_hist == 3.0
    assert fit.error < 0.9 * fit.constant_error


def test_budgets_beyond_a_tree_do_not_count() -> None:
    """Two short trees that end at node 1 must not tell the curve that budget 2 brings nothing."""
    rounds = seen([[-0.1, -0.2]] * 2 + [[-0.1, np.nan]] * 2, [[1, 1]] * 2 + [[1, 0]] * 2)
    a, beta = fit_gain([rounds, rounds]).gain.a_and_beta(STATE)
    assert a == pytest.approx(1.0, abs=0.01) and beta > 0.95


# ---- calibration


def test_a_piecewise_curve_by_hand() -> None:
    """Nodes that claim .5 are accepted 3 times in 4, those that claim .25 never fall below the rarer ones."""
    scores = [[log(0.5), log(0.25), log(0.125)]] * 8
    accepted = [[int(at < 6), int(at < 1), int(at < 2)] for at in range(8)]
    rounds = seen(scores, accepted)
    curve = fit_piecewise(rounds)
    # .125 was accepted more often than .25: the two are pooled.
    assert curve.probabilities(np.log([0.5, 0.25, 0.125]).astype(np.float32), STATE) == pytest.approx(
        [0.75, 3 / 16, 3 / 16], abs=1e-6
    )
    raw = fit_calibrations([rounds, rounds]).fits[0]
    assert raw.error == pytest.approx((abs(0.5 - 0.75) + abs(0.25 - 0.125) + abs(0.125 - 0.25)) / 3, abs=1e-6)
    by_hand = [6 * log(0.5) + 2 * log(0.5), log(0.25) + 7 * log(0.75), 2 * log(0.125) + 6 * log(0.875)]
    assert raw.log_loss == pytest.approx(-sum(by_hand) / 24, abs=1e-6)
    assert [one.num_nodes for one in raw.bins] == [16, 16, 16]


def test_reliability_bins() -> None:
    bins = reliability(np.array([0.01, 0.03, 0.5, 1.0]), np.array([0.0, 1.0, 1.0, 0.0]))
    assert [(one.predicted, one.observed, one.num_nodes) for one in bins] == [
        (pytest.approx(0.02), 0.5, 2), (0.5, 1.0, 1), (1.0, 0.0, 1),
    ]  # fmt: skip


def drawn(number: int, conf_weight: float, seed: int) -> Observations:
    """Trees of eight nodes whose chance is a logistic curve of the score, shifted by the confidence."""
    rng = np.random.default_rng(seed)
    scores = -np.sort(rng.exponential(1.5, (number, 8)))
    conf = rng.uniform(0, 1, number)
    logits = 1.5 * (scores + conf_weight * (conf - 0.5)[:, None]) + 1
    return seen(scores.tolist(), (rng.uniform(size=scores.shape) < 1 / (1 + np.exp(-logits))).tolist(), conf=conf)


def test_the_state_shifts_scores_where_it_matters() -> None:
    fits = fit_calibrations([drawn(5000, 2.0, 0), drawn(5000, 2.0, 1)])
    by_name = {fit.name: fit for fit in fits.fits}
    assert fits.best.name == "state" and isinstance(fits.best.calibration, StateCalibration)
    assert fits.best.calibration.weights[0] == pytest.approx(2.0, rel=0.1)
    assert by_name["state"].log_loss < by_name["piecewise"].log_loss < by_name["raw"].log_loss
    assert by_name["state"].error < 0.01 and by_name["piecewise"].error < 0.02
    assert sum(one.num_nodes for one in fits.best.bins) == 8 * 10000
    # Monotone: a higher score or more confidence never has the lower chance.
    scores = np.linspace(-9, 0, 50).astype(np.float32)
    low, high = (fits.best.calibration.probabilities(scores, DraftState(conf, 0, 0, 0, 0, 0, 0)) for conf in (0.2, 0.9))
    assert (np.diff(low) >= 0).all() and (low <= high).all()


def test_scores_that_say_nothing_are_not_divided_by() -> None:
    rng = np.random.default_rng(0)
    accepted = (rng.uniform(size=(500, 2)) < 0.5).tolist()
    rounds = seen([[-1.0, -2.0]] * 500, accepted, conf=rng.uniform(size=500))
    assert np.isfinite(fit_state(rounds).weights).all()
    flat = seen([[-1.0, -1.0]] * 4, [[1, 0], [0, 0], [1, 0], [0, 0]])
    assert fit_piecewise(flat) == PiecewiseCalibration((-1.0,), (0.25,))


def test_chances_beyond_a_tree_are_unknown() -> None:
    chances = node_chances(RawProbabilities(), seen([[log(0.5), np.nan]], [[1, 0]]))
    assert chances[0, 0] == pytest.approx(0.5) and np.isnan(chances[0, 1])


def test_each_part_is_judged_by_what_the_others_taught() -> None:
    """Two parts that contradict each other: what is fitted to both is right on average, and wrong about either."""
    sure, never = seen([[-1.0]] * 4, [[1]] * 4), seen([[-1.0]] * 4, [[0]] * 4)
    piecewise = fit_calibrations([sure, never]).fits[1]
    assert piecewise.calibration == PiecewiseCalibration((-1.0,), (0.5,))
    assert piecewise.crossed == (PiecewiseCalibration((-1.0,), (0.0,)), PiecewiseCalibration((-1.0,), (1.0,)))
    assert piecewise.error == 1.0 and piecewise.log_loss > 10
    gain = fit_gain([sure, never])
    assert gain.gain.a_and_beta(STATE)[0] == pytest.approx(0.5, abs=0.01)
    assert [each.a_and_beta(STATE)[0] for each in gain.crossed] == pytest.approx([0.0, 1.0], abs=0.01)
    assert gain.error == pytest.approx(1.0, abs=0.01) and gain.curve == ((1, 1.5, pytest.approx(1.5, abs=0.01)),)


def test_no_rounds_are_refused() -> None:
    one, none = seen([[-1.0]], [[1]]), seen(np.zeros((0, 1)).tolist(), np.zeros((0, 1)).tolist())
    none = Observations(**{**vars(none), "scores": np.zeros((0, 1)), "is_accepted": np.zeros((0, 1), np.bool_)})
    for fitted in (fit_gain, fit_calibrations):
        with pytest.raises(PolicyError, match="parts of 0, 1 rounds"):
            fitted([none, one])
        with pytest.raises(PolicyError, match="parts of 1 rounds"):
            fitted([one])


# ---- cost

BUDGETS = (0, 4, 8, 16, 32, 64)


def timed(law: Any, *, context_ms: float = 0.0, noise_ms: float = 0.0, number: int = 40) -> TimedRounds:
    """`number` rounds of each budget, of sequences that draw them in turn."""
    rng = np.random.default_rng(0)
    budgets = np.tile(BUDGETS, number)
    contexts = rng.integers(20, 900, len(budgets))
    ms = (
        np.array([law(budget) for budget in budgets]) + context_ms * contexts + noise_ms * rng.normal(size=len(budgets))
    )
    keys = np.repeat(np.arange(number, dtype=np.uint64), len(BUDGETS))
    return TimedRounds(budgets, ms, ms - 2.0, contexts, keys)


def test_a_line_is_found() -> None:
    fits = fit_costs(timed(lambda b: 40.0 if b == 0 else 50 + 0.5 * b), "box")
    assert fits is not None and [fit.name for fit in fits.fits] == [
        "line", "convex", "monotone", "line+context", "convex+context", "monotone+context",
    ]  # fmt: skip
    assert fits.best.name == "line" and fits.best.error_ms == pytest.approx(0, abs=1e-6)
    assert fits.best.curve.table(64)[[0, 1, 10, 64]] == pytest.approx([40, 50.5, 55, 82])
    assert (fits.hardware, fits.num_rounds, fits.num_left_out) == ("box", 240, 0)
    assert "line fit of 240 recorded rounds at 5 budgets (box)" in fits.best.curve.source


def test_flat_then_steep_is_convex_and_a_step_is_monotone() -> None:
    bent = fit_costs(timed(lambda b: 40.0 if b == 0 else 50 + max(0, b - 16) * 1.0), "box")
    assert bent is not None
    errors = {fit.name: fit.error_ms for fit in bent.fits}
    assert errors["convex"] == pytest.approx(0, abs=1e-6) and errors["line"] > 1
    stepped = fit_costs(timed(lambda b: 40.0 if b == 0 else 50 + 20.0 * (b >= 16)), "box")
    assert stepped is not None and stepped.best.name == "monotone"


def test_the_context_is_priced() -> None:
    fits = fit_costs(timed(lambda b: 40.0 if b == 0 else 50 + 0.5 * b, context_ms=0.02, noise_ms=0.2), "box")
    assert fits is not None and fits.best.name.endswith("+context")
    assert fits.best.curve.token_ms == pytest.approx(0.02, rel=0.05)
    assert fits.best.curve.table(8, 500)[8] == pytest.approx(64, abs=0.3)
    without = fit_costs(timed(lambda b: 40.0 if b == 0 else 50 + 0.5 * b, noise_ms=0.2), "box")
    assert without is not None and all(fit.curve.token_ms < 5e-4 for fit in without.fits)


def test_odd_rounds_and_rare_budgets_are_left_out() -> None:
    rounds = timed(lambda b: 40.0 if b == 0 else 50 + 0.5 * b)
    rounds.round_ms[:3] = (np.nan, -1.0, np.inf)
    rounds.budgets[5] = 77
    rounds.round_ms[9] = 5000.0  # something else ran: the median does not care
    fits = fit_costs(rounds, "box")
    assert fits is not None and fits.num_left_out == 4
    assert 77 not in fits.best.curve.budgets
    assert fits.fits[2].curve.table(64)[64] == pytest.approx(82)


def test_without_plain_rounds_one_costs_what_is_not_drafting() -> None:
    rounds = timed(lambda b: 50 + 0.5 * b)
    drafted = rounds.take(rounds.budgets > 0)
    fits = fit_costs(drafted, "box")
    assert fits is not None and fits.fits[2].curve.round_ms[0] == pytest.approx(50)


def test_one_budget_gives_no_curve() -> None:
    rounds = timed(lambda b: 50.0)
    assert fit_costs(rounds.take(rounds.budgets == 8), "box") is None
    assert fit_costs(rounds.take(rounds.budgets > 99), "box") is None


def test_the_power_gain_fits_what_it_promises() -> None:
    """Whatever the state, the fitted gain is what a budget policy reads: marginals that never rise."""
    rounds = drawn(400, 1.0, 4)
    fit = fit_gain([rounds, rounds])
    assert isinstance(fit.gain, PowerGain) and fit.num_rounds == 800
    assert all(np.isfinite(fit.gain.a_weights)) and all(np.isfinite(fit.gain.beta_weights))
