"""Drift: whether recent rounds accept less than the rounds that a policy was trained on.

Both sides are replayed with the drafter's own trees (DDTree) of one budget, whatever policy decoded them and whatever
it spent: so their acceptance lengths can be compared, no model is needed, and nothing was fitted to either side.

Not covered: rounds that their policy decoded without a draft have nothing to replay; and a policy that accepts more
visits other positions, as in every replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from graft_dist.edge_scorer import MarginalScorer
from graft_dist.replay import ALL_TASKS, LOST, RecordedRounds, SequenceName, outcomes, walk_rounds
from graft_dist.retraining import DriftRule
from graft_dist.trial import of_sequences

FloatArray = npt.NDArray[np.float64]

_DRAWS = 2000  # of the bootstrap
_COLUMNS = ("rounds", "tokens", "mismatched", "conf")


class Verdict(StrEnum):
    """What the comparison says."""

    drifted = "drifted"  # recent rounds accept less
    steady = "steady"
    unseen = "unseen"  # too few recent rounds to tell
    unknown = "unknown"  # nothing to compare them with


@dataclass(frozen=True)
class DriftRow:
    """One side over one task, or all tasks."""

    side: str  # "training" or "recent"
    task: str
    num_prompts: int
    num_rounds: int
    mat: float  # tokens a round
    mismatch_rate: float
    conf: float  # mean chance that the drafter gives its first candidates


@dataclass(frozen=True)
class Drift:
    """The verdict, and what it rests on."""

    verdict: Verdict
    sentence: str  # for people
    rows: Sequence[DriftRow] = ()
    ratio: float | None = None  # MAT of recent rounds over that of training, with a 95 % interval over prompts
    low: float | None = None
    high: float | None = None

    @property
    def calls_for_training(self) -> bool:
        """Whether a run that waits for drift has reason to go on: without a comparison it goes on as well."""
        return self.verdict in (Verdict.drifted, Verdict.unknown)


class Acceptance:
    """What DDTree of one budget gets of some rounds, by prompt."""

    def __init__(self, sums: Mapping[tuple[str, str], FloatArray]) -> None:
        self._sums = sums  # of `_COLUMNS`, by task and prompt

    @classmethod
    def of(cls, batches: Iterable[RecordedRounds], prompt_of: Mapping[SequenceName, str], budget: int) -> Acceptance:
        """Replay rounds; `prompt_of` maps sequences to prompts, rounds of other sequences are passed over."""
        sums: dict[tuple[str, str], FloatArray] = defaultdict(lambda: np.zeros(len(_COLUMNS)))
        for rounds in of_sequences(batches, prompt_of):
            walk = walk_rounds(rounds, MarginalScorer(), budget)
            found = outcomes(rounds, walk, np.full(len(rounds), budget, np.int64))
            is_mismatch = found.lost == LOST.index("wrong_parent")
            rows = np.stack([np.ones(len(rounds)), found.num_tokens, is_mismatch, rounds.conf], axis=1)
            for row, key, (_, task) in zip(rows, rounds.keys, rounds.groups, strict=True):
                sums[task, prompt_of[key]] += row
        return cls(dict(sums))

    @property
    def num_rounds(self) -> int:
        """Replayed rounds."""
        return int(sum(row[0] for row in self._sums.values()))

    def rows(self, side: str) -> list[DriftRow]:
        """All tasks together, then each."""
        tasks = sorted({task for task, _ in self._sums})
        return [self._row(side, task) for task in (ALL_TASKS, *tasks)]

    def drawn_mats(self, random: np.random.Generator) -> FloatArray:
        """MAT when the prompts are drawn again with replacement, so many times [draws]."""
        sums = self._of(ALL_TASKS)
        drawn = [sums[random.integers(len(sums), size=len(sums))].sum(axis=0) for _ in range(_DRAWS)]
        return np.array([tokens / rounds for rounds, tokens, _, _ in drawn])

    def _row(self, side: str, task: str) -> DriftRow:
        own = self._of(task)
        rounds, tokens, mismatched, conf = own.sum(axis=0).tolist()
        return DriftRow(side, task, len(own), int(rounds), tokens / rounds, mismatched / rounds, conf / rounds)

    def _of(self, task: str) -> FloatArray:
        """[prompts, columns]."""
        return np.stack([self._sums[key] for key in sorted(self._sums) if task in (ALL_TASKS, key[0])])


def judge(training: Acceptance, recent: Acceptance, rule: DriftRule) -> Drift:
    """Compare recent rounds with those of training.

    They have drifted when their MAT is lower by the rule's share, with the whole interval of the ratio below 1.

    Raises:
        ValueError: a side without rounds.
    """
    if 0 in (training.num_rounds, recent.num_rounds):
        raise ValueError("drift is judged by rounds of both sides")
    rows = [*training.rows("training"), *recent.rows("recent")]
    before, now = (next(row for row in rows if row.side == side) for side in ("training", "recent"))
    random = np.random.default_rng(0)
    ratios = recent.drawn_mats(random) / training.drawn_mats(random)
    low, high = (float(bound) for bound in np.quantile(ratios, (0.025, 0.975)))
    ratio = now.mat / before.mat
    is_drifted = ratio <= 1.0 - rule.drop and high < 1.0
    sentence = (
        f"{'drift' if is_drifted else 'no drift'} (MAT {now.mat:.2f} against {before.mat:.2f} in training: ratio "
        f"{ratio:.3f}, 95 % between {low:.3f} and {high:.3f}, {now.num_rounds} recent rounds of {now.num_prompts} "
        "prompts)"
    )
    return Drift(Verdict.drifted if is_drifted else Verdict.steady, sentence, rows, ratio, low, high)
