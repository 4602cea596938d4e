"""The gate: whether a challenger takes the champion's place, from measured evidence alone.

Evidence is paired by prompt: what the champion and the challenger made of the same prompts, in tokens and milliseconds.
Replay's evidence covers many rounds and has no noise of timing, so it decides; the live run is short and noisy, so it
may only object; the audit may refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graft_dist.bench import bootstrap_interval, paired_ratio
from graft_dist.trial import Interval

FloatArray = npt.NDArray[np.float64]

_MIN_PROMPTS = 5
"""Of replay: the interval is drawn from the prompts themselves, and that of one or two prompts is as good as none."""


@dataclass(frozen=True)
class Side:
    """One policy's part of the evidence."""

    name: str  # "champion v3", "ddtree 8"
    tokens_per_s: float
    mat: float  # tokens a round
    mismatch_rate: float | None  # of rounds; None where it was not observed


@dataclass(frozen=True)
class Evidence:
    """Tokens per second of the challenger over the champion's, with a 95 % interval over prompts."""

    source: str  # "replay" or "live"
    champion: Side
    challenger: Side
    ratio: float
    low: float
    high: float
    num_prompts: int
    mat: Interval | None = None  # ratio of MATs; None where rounds were not kept by prompt
    mismatch: Interval | None = None  # the challenger's rate less the champion's; None where it was not observed

    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.source}: {self.challenger.name} {self.challenger.tokens_per_s:.1f} tokens/s, {self.champion.name} "
            f"{self.champion.tokens_per_s:.1f}, ratio {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}, "
            f"{self.num_prompts} prompts), MAT {self.challenger.mat:.2f} against {self.champion.mat:.2f}"
            + self._mat_interval()
            + self._mismatch_sentence()
        )

    def _mat_interval(self) -> str:
        return "" if self.mat is None else f" ({self.mat.low:.3f} to {self.mat.high:.3f} times)"

    def _mismatch_sentence(self) -> str:
        ours, theirs = self.challenger.mismatch_rate, self.champion.mismatch_rate
        if ours is None or theirs is None:
            return ""
        between = ""
        if self.mismatch is not None:
            between = f" ({100 * self.mismatch.low:+.1f} to {100 * self.mismatch.high:+.1f} points)"
        return f", mismatch {ours:.1%} against {theirs:.1%}{between}"


@dataclass(frozen=True)
class Decision:
    """What the gate says, and why."""

    is_promoted: bool
    reason: str


def compare(
    source: str,
    champion: tuple[str, FloatArray, float, float | None],
    challenger: tuple[str, FloatArray, float, float | None],
) -> Evidence:
    """Pair two policies.

    Args:
        source: where the numbers come from.
        champion, challenger: name, [prompts, 2] milliseconds and tokens of the same prompts, MAT, mismatch rate.

    Raises:
        ValueError: no prompts, or other prompts on one side.
    """
    ours, theirs = challenger[1], champion[1]
    if ours.shape != theirs.shape or len(ours) == 0:
        raise ValueError(f"evidence needs the same prompts on both sides, not {theirs.shape} and {ours.shape}")
    low, high = bootstrap_interval(theirs, ours)
    return Evidence(
        source,
        _side(*champion),
        _side(*challenger),
        paired_ratio(theirs, ours),
        low,
        high,
        len(ours),
    )


def decide(replayed: Evidence, live: Evidence | None, *, num_audited: int, num_bugs: int, margin: float) -> Decision:
    """Return the decision, `num_bugs` being audited answers that are not the target's own.

    The challenger is promoted when no audited answer differs from the target's own, replay of prompts enough finds it
    faster by `margin` (a share, such as 0.01) with the whole interval above 1, and the live run does not find it slower
    with its whole interval.
    """
    audit = f"audit: {num_bugs} of {num_audited} answers are not the target's own" if num_audited else "no audit"
    found = "; ".join([replayed.sentence(), *([live.sentence()] if live is not None else []), audit])
    if num_bugs:
        return Decision(False, f"{num_bugs} audited answers are not the target's own: {found}")
    if replayed.num_prompts < _MIN_PROMPTS:
        return Decision(False, f"{_MIN_PROMPTS} held-out prompts are the fewest to judge by: {found}")
    if not replayed.ratio >= 1.0 + margin:  # nor if it is not a number
        return Decision(False, f"it is not faster by {100 * margin:g} %: {found}")
    if not replayed.low > 1.0:
        return Decision(False, f"the interval does not lie above 1: {found}")
    if live is not None and live.high < 1.0:
        return Decision(False, f"the live run found it slower: {found}")
    return Decision(True, found)


def gate_tags(replayed: Evidence, live: Evidence | None, num_audited: int, num_bugs: int) -> dict[str, str]:
    """The numbers as tags of the challenger's version; those that were not observed are left out."""
    numbers = {
        "ratio": replayed.ratio,
        "low": replayed.low,
        "high": replayed.high,
        "mat": replayed.challenger.mat,
        "champion_mat": replayed.champion.mat,
        "mismatch": replayed.challenger.mismatch_rate,
        "champion_mismatch": replayed.champion.mismatch_rate,
        "live_ratio": None if live is None else live.ratio,
        "live_low": None if live is None else live.low,
        "live_high": None if live is None else live.high,
    }
    tags = {f"graft.gate.{name}": f"{value:.4f}" for name, value in numbers.items() if value is not None}
    return {**tags, "graft.gate.audited": str(num_audited), "graft.gate.bugs": str(num_bugs)}


def _side(name: str, totals: FloatArray, mat: float, mismatch_rate: float | None) -> Side:
    ms, tokens = totals.sum(axis=0)
    return Side(name, float(tokens / ms * 1000), mat, mismatch_rate)
