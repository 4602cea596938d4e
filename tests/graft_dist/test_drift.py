"""Drift is judged by MAT and an interval over prompts: literal sums, whose verdict can be worked out."""

from __future__ import annotations

import numpy as np
import pytest

from graft_dist.drift import Acceptance, Drift, Verdict, judge
from graft_dist.retraining import DriftRule

RULE = DriftRule(drop=0.05, min_rounds=1)


def accepting(mat: float, spread: float = 0.1, num_prompts: int = 60, task: str = "chat") -> Acceptance:
    """Prompts of ten rounds each, whose MATs lie evenly around `mat`."""
    mats = mat + spread * np.linspace(-1, 1, num_prompts)
    return Acceptance({(task, f"{task}-{at}"): np.array([10, 10 * own, 2, 6]) for at, own in enumerate(mats)})


@pytest.mark.parametrize(
    ("recent", "verdict"),
    [
        (accepting(2.0), Verdict.drifted),
        (accepting(2.4), Verdict.steady),  # 4 % lower, for sure, but that is not asked about
        (accepting(2.5), Verdict.steady),
        (accepting(3.0), Verdict.steady),
        (accepting(2.3, spread=1.2, num_prompts=6), Verdict.steady),  # 8 % lower, by chance
    ],
)
def test_a_drop_beyond_the_rule_and_beyond_chance_is_drift(recent: Acceptance, verdict: Verdict) -> None:
    drift = judge(accepting(2.5), recent, RULE)
    assert drift.verdict == verdict and drift.calls_for_training == (verdict is Verdict.drifted)
    assert drift.ratio is not None and drift.low is not None and drift.high is not None
    assert drift.low <= drift.ratio <= drift.high
    assert drift.sentence.startswith("drift (MAT " if verdict is Verdict.drifted else "no drift (MAT ")


def test_the_sentence_and_the_rows_say_what_was_compared() -> None:
    drift = judge(accepting(2.5, spread=0.0), accepting(2.0, spread=0.0, num_prompts=3, task="code"), RULE)
    assert drift.sentence == (
        "drift (MAT 2.00 against 2.50 in training: ratio 0.800, 95 % between 0.800 and 0.800, 30 recent rounds of 3 "
        "prompts)"
    )
    assert [(row.side, row.task, row.num_rounds) for row in drift.rows] == [
        ("training", "all", 600), ("training", "chat", 600), ("recent", "all", 30), ("recent", "code", 30),
    ]  # fmt: skip
    assert (drift.rows[0].mat, drift.rows[0].mismatch_rate, drift.rows[0].conf) == pytest.approx((2.5, 0.2, 0.6))


def test_nothing_is_judged_by_no_rounds() -> None:
    with pytest.raises(ValueError, match="rounds of both sides"):
        judge(accepting(2.5), Acceptance({}), RULE)
    assert Drift(Verdict.unknown, "no champion").calls_for_training
    assert not Drift(Verdict.unseen, "no traffic").calls_for_training
