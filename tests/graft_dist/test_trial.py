"""Trials: sums by prompt, comparisons, and gain by difficulty, on rounds that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graft_dist.budget import FixedBudget
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.trial import Arm, gain_curves, run_trial
from tests.graft_dist.test_replay import rounds_of

COST = CostCurve((0, 1, 6), (10.0, 11.0, 16.0), "by hand")
ROUNDS = rounds_of(
    [[5, 7], [6, 7], [5, 9], [9, 9]],
    [9, 9, 9, 9],
    groups=[("decoded", "code"), ("decoded", "code"), ("decoded", "chat"), ("decoded", "chat")],
)
PROMPTS = {"s0": "a", "s1": "a", "s2": "b"}
ARMS = [Arm(f"fixed {budget}", "marginal", lambda budget=budget: FixedBudget(budget)) for budget in (0, 3, 6)]  # type: ignore[misc]


def test_rows_by_task() -> None:
    trial = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    # The tree is 1: 5, 2: 5 7, 3: 6, 4: 6 7, 5: 5 8, 6: 6 8; s3 is of no prompt.
    assert trial.tasks == ["all", "chat", "code"]
    row = trial.row("fixed 3")
    assert (row.num_rounds, row.mat, row.mean_budget) == (3, pytest.approx(7 / 3), 3.0)
    assert row.mismatch_rate == pytest.approx(1 / 3)  # s1 wants 7 after 6
    assert row.tokens_per_s == pytest.approx(7000 / 39) and row.speedup == pytest.approx(70 / 39)
    assert trial.row("fixed 0", "code").mat == 1.0 and trial.row("fixed 6", "code").mat == 3.0


def test_a_longer_context_makes_every_round_dearer() -> None:
    cost = CostCurve((0, 1, 6), (10.0, 11.0, 16.0), "by hand", token_ms=0.5)
    lengths = np.array([10, 20, 30, 40], np.int32)
    rounds = replace(ROUNDS, context_lengths=lengths)
    trial = run_trial([rounds], PROMPTS, {"marginal": MarginalScorer()}, ARMS, cost, 6)
    assert trial.row("fixed 3").tokens_per_s == pytest.approx(7000 / (3 * 13 + 30))
    assert trial.row("fixed 3").speedup == pytest.approx(7 / (3 * 13 + 30) * (3 * 10 + 30) / 3)
    assert trial.row("fixed 0").speedup == pytest.approx(1.0)


def test_comparisons_draw_prompts() -> None:
    trial = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    found = trial.compare("fixed 6", "fixed 3")
    of_a, of_b = (6 / 32) / (5 / 26), (2 / 16) / (2 / 13)
    assert found.ratio == pytest.approx((8 / 48) / (7 / 39))
    assert (found.low, found.high) == (pytest.approx(of_b), pytest.approx(of_a))
    alone = trial.compare("fixed 6", "fixed 3", "chat")
    assert alone.low == alone.ratio == alone.high == pytest.approx(of_b)


def test_gain_by_difficulty() -> None:
    curves = gain_curves([ROUNDS], MarginalScorer(), 6)
    assert curves.num_rounds == {"easy": 2, "medium": 1, "hard": 1}
    assert curves.tokens["easy"].tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert curves.tokens["medium"].tolist() == [1.0, *[2.0] * 6]
    assert np.all(curves.tokens["hard"] == 1.0)
