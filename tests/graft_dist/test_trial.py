"""Trials: sums by prompt, comparisons, and gain by difficulty, on rounds that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graft_dist.budget import FixedBudget
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.trial import Arm, Interval, gain_curves, run_trial, thinned
from tests.graft_dist.test_replay import DraftingInVain, rounds_of

COST = CostCurve((0, 1, 6), (10.0, 11.0, 16.0), "by hand")
ROUNDS = rounds_of(
    [[5, 7], [6, 7], [5, 9], [9, 9]],
    [9, 9, 9, 9],
    groups=[("decoded", "code"), ("decoded", "code"), ("decoded", "chat"), ("decoded", "chat")],
)
PROMPTS = {("u", "s0"): "a", ("u", "s1"): "a", ("u", "s2"): "b"}
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


def test_a_draft_of_which_nothing_is_verified_is_paid_for() -> None:
    arms = [Arm("in vain", "marginal", DraftingInVain), ARMS[0]]
    trial = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, arms, COST, 6)
    assert trial.row("in vain").tokens_per_s == pytest.approx(1000 / 11)
    assert trial.row("in vain").speedup == pytest.approx(10 / 11) and trial.row("fixed 0").speedup == 1.0


def test_a_prompt_under_two_tasks_counts_for_both_and_is_drawn_once() -> None:
    groups = [("decoded", task) for task in ("code", "chat", "chat", "chat")]
    trial = run_trial([replace(ROUNDS, groups=groups)], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    rows = {task: trial.row("fixed 6", task) for task in trial.tasks}
    assert {task: row.num_rounds for task, row in rows.items()} == {"all": 3, "chat": 2, "code": 1}
    assert rows["code"].mat == 3.0 and rows["chat"].mat == pytest.approx(5 / 2)
    same = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    assert trial.compare("fixed 6", "fixed 3") == same.compare("fixed 6", "fixed 3")


def test_sequences_of_another_unit_are_others() -> None:
    rounds = replace(ROUNDS, unit_ids=["u", "v", "u", "u"])
    trial = run_trial([rounds], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    assert trial.row("fixed 6").num_rounds == 2


def test_an_arm_may_have_trees_of_its_own_size() -> None:
    arms = [ARMS[2], replace(ARMS[2], name="whole", max_budget=6), replace(ARMS[2], name="small", max_budget=2)]
    trial = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, arms, COST, 3)
    assert {arm.name: trial.row(arm.name).mean_budget for arm in arms} == {"fixed 6": 3.0, "whole": 6.0, "small": 2.0}
    whole = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    assert replace(trial.row("whole"), arm="fixed 6") == whole.row("fixed 6")


def test_comparisons_draw_prompts() -> None:
    trial = run_trial([ROUNDS], PROMPTS, {"marginal": MarginalScorer()}, ARMS, COST, 6)
    found = trial.compare("fixed 6", "fixed 3")
    of_a, of_b = (6 / 32) / (5 / 26), (2 / 16) / (2 / 13)
    assert found.ratio == pytest.approx((8 / 48) / (7 / 39))
    assert (found.low, found.high) == (pytest.approx(of_b), pytest.approx(of_a))
    # Tokens a round: of a 6 / 2 against 5 / 2, of b 2 in both. Mismatched: of a's two rounds one with 3 nodes alone.
    assert found.mat == Interval(pytest.approx(8 / 7), 1.0, pytest.approx(6 / 5))
    assert found.mismatch == Interval(pytest.approx(-1 / 3), pytest.approx(-1 / 2), 0.0)
    alone = trial.compare("fixed 6", "fixed 3", "chat")
    assert alone.low == alone.ratio == alone.high == pytest.approx(of_b)


def test_trials_of_different_prompts_are_one_trial() -> None:
    scorers = {"marginal": MarginalScorer()}
    whole = run_trial([ROUNDS], PROMPTS, scorers, ARMS, COST, 6)
    parts = [
        run_trial([ROUNDS], {key: name for key, name in PROMPTS.items() if name == prompt}, scorers, ARMS, COST, 6)
        for prompt in ("b", "a")
    ]
    parts[0].take_in(parts[1])
    for arm in ("fixed 0", "fixed 6"):
        assert [parts[0].row(arm, task) for task in whole.tasks] == [whole.row(arm, task) for task in whole.tasks]
    assert parts[0].compare("fixed 6", "fixed 3") == whole.compare("fixed 6", "fixed 3")


def test_a_sample_is_even_and_does_not_depend_on_the_order() -> None:
    """Rounds of an old and of a new run, of which three tenths are wanted: as many of each, wherever they stand."""
    ids = [f"{'old' if at < 2000 else 'new'}-{at % 2000 // 50}" for at in range(4000)]
    indices, conf = np.arange(4000, dtype=np.int32) % 50, np.arange(4000, dtype=np.float32)
    rounds = rounds_of([[5, 7]] * 4000, [9] * 4000, sequence_ids=ids, round_indices=indices, conf=conf)
    kept = thinned(rounds, 0.3)
    counts = [sum(name.startswith(run) for name in kept.sequence_ids) for run in ("old", "new")]
    assert counts == pytest.approx([600, 600], abs=60)
    backwards = np.arange(4000)[::-1]
    turned = replace(rounds, sequence_ids=ids[::-1], round_indices=indices[backwards], conf=conf[backwards])
    assert thinned(turned, 0.3).conf.tolist() == kept.conf.tolist()[::-1]
    assert thinned(rounds, 1.0) is rounds


def test_gain_by_difficulty() -> None:
    lengths = np.array([10, 20, 40, 50], np.int32)
    curves = gain_curves([replace(ROUNDS, context_lengths=lengths)], MarginalScorer(), 6)
    assert curves.context_lengths == {"easy": 15.0, "medium": 40.0, "hard": 50.0}
    assert curves.num_rounds == {"easy": 2, "medium": 1, "hard": 1}
    assert curves.tokens["easy"].tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert curves.tokens["medium"].tolist() == [1.0, *[2.0] * 6]
    assert np.all(curves.tokens["hard"] == 1.0)
