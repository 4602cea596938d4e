"""The gate's verdicts, from evidence whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from graft_dist.trial import Interval
from jobs.gate import Decision, Evidence, compare, decide, gate_tags


def evidence(source: str = "replay", *, faster: float, noise: float = 0.0, prompts: int = 50) -> Evidence:
    """A challenger that takes 1 / `faster` of the champion's time, give or take `noise` of it from prompt to prompt."""
    random = np.random.default_rng(0)
    champion = np.stack([random.uniform(900, 1100, prompts), np.full(prompts, 100.0)], axis=1)
    factor = 1 / faster + noise * random.standard_normal(prompts)
    challenger = champion * np.stack([factor, np.ones(prompts)], axis=1)
    return compare(source, ("champion v1", champion, 2.0, 0.1), ("challenger v2", challenger, 2.5, 0.05))


def decided(replayed: Evidence, live: Evidence | None = None, num_bugs: int = 0, margin: float = 0.01) -> Decision:
    return decide(replayed, live, num_audited=4, num_bugs=num_bugs, margin=margin)


def test_evidence_is_paired_by_prompt() -> None:
    found = evidence(faster=1.25)
    assert found.ratio == pytest.approx(1.25) and found.low == pytest.approx(1.25) and found.num_prompts == 50
    assert found.challenger.tokens_per_s == pytest.approx(1.25 * found.champion.tokens_per_s)
    assert found.champion.tokens_per_s == pytest.approx(100, rel=0.1)
    assert "challenger v2" in found.sentence() and "ratio 1.250 (1.250 to 1.250, 50 prompts)" in found.sentence()


@pytest.mark.parametrize("prompts", [0, 3])
def test_evidence_needs_the_same_prompts(prompts: int) -> None:
    with pytest.raises(ValueError, match="the same prompts"):
        compare("replay", ("a", np.ones((prompts, 2)), 1.0, None), ("b", np.ones((0, 2)), 1.0, None))


def test_a_clearly_faster_challenger_is_promoted() -> None:
    decision = decided(evidence(faster=1.05), evidence("live", faster=0.99, noise=0.2))
    assert decision.is_promoted and decision.reason.startswith("replay: challenger v2")
    assert "; live: challenger v2" in decision.reason
    assert decision.reason.endswith("; audit: 0 of 4 answers are not the target's own")
    assert decided(evidence(faster=1.05)).is_promoted


def test_the_sentence_has_what_else_was_observed() -> None:
    found = evidence(faster=1.25)
    assert found.sentence().endswith(", MAT 2.50 against 2.00, mismatch 5.0% against 10.0%")
    drawn = replace(found, mat=Interval(1.25, 1.2, 1.3), mismatch=Interval(-0.05, -0.06, 0.004))
    assert drawn.sentence().endswith(
        ", MAT 2.50 against 2.00 (1.200 to 1.300 times), mismatch 5.0% against 10.0% (-6.0 to +0.4 points)"
    )
    unseen = replace(found, champion=replace(found.champion, mismatch_rate=None))
    assert unseen.sentence().endswith(", MAT 2.50 against 2.00")


def test_numbers_that_were_not_observed_are_no_tags() -> None:
    names = {name.removeprefix("graft.gate.") for name in gate_tags(evidence(faster=1.25), None, 0, 0)}
    assert names == {"ratio", "low", "high", "mat", "champion_mat", "mismatch", "champion_mismatch", "audited", "bugs"}


@pytest.mark.parametrize(
    ("replayed", "live", "num_bugs", "reason"),
    [
        (evidence(faster=1.5), None, 1, "1 audited answers are not the target's own"),
        (evidence(faster=1.5, prompts=4), None, 0, "5 held-out prompts are the fewest to judge by"),
        (replace(evidence(faster=1.5), low=float("nan")), None, 0, "does not lie above 1"),
        (evidence(faster=1.005), None, 0, "not faster by 1 %"),
        (evidence(faster=0.9), None, 0, "not faster by 1 %"),
        (evidence(faster=1.05, noise=0.4), None, 0, "does not lie above 1"),
        (evidence(faster=1.05), evidence("live", faster=0.9), 0, "the live run found it slower"),
    ],
)
def test_others_are_not(replayed: Evidence, live: Evidence | None, num_bugs: int, reason: str) -> None:
    decision = decided(replayed, live, num_bugs)
    assert not decision.is_promoted and reason in decision.reason


def test_equal_policies_do_not_replace_each_other_even_without_a_margin() -> None:
    same = replace(evidence(faster=1.0), low=1.0, high=1.0)
    assert not decided(same, margin=0.0).is_promoted
