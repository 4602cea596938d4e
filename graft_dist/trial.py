"""A trial: what several decoders would have got of the same recorded rounds, kept by prompt, so that two of them can
be compared with an interval.

`replay.replay` sums over all rounds at once; here the sums are per prompt, since prompts are what differs by chance.
The same rules of counting (`replay.outcomes`). Only decoded rounds are tried: dense ones weigh positions that decoding
would have skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from graft_dist.budget import BudgetPolicy, sequence_key
from graft_dist.cost_curve import CostCurve
from graft_dist.counter_random import uniform
from graft_dist.edge_scorer import EdgeScorer
from graft_dist.replay import (
    ALL_TASKS,
    LOST,
    Budgets,
    RecordedRounds,
    SequenceName,
    Walk,
    choose_budgets,
    outcomes,
    walk_rounds,
)

FloatArray = npt.NDArray[np.float64]

DIFFICULTIES = ("easy", "medium", "hard")
"""Rounds by how deep the drafter's own tree of the largest budget is accepted: over half of the depth, over a quarter,
less."""

_DRAWS = 2000  # of the bootstrap
_COLUMNS = ("rounds", "tokens", "nodes", "mismatched", "ms", "plain_ms")


@dataclass(frozen=True)
class Arm:
    """One decoder of a trial."""

    name: str
    scorer: str  # key of the trial's scorers
    new_budget: Callable[[], BudgetPolicy]  # a fresh policy: it may carry running averages
    max_budget: int | None = None  # nodes of the trees it chooses from; None: the trial's


@dataclass(frozen=True)
class TrialRow:
    """One arm over one task, or all tasks."""

    arm: str
    task: str
    num_rounds: int
    mat: float  # mean acceptance length
    mismatch_rate: float
    mean_budget: float
    tokens_per_s: float  # under the cost curve
    speedup: float  # over plain decoding under the same curve


@dataclass(frozen=True)
class Interval:
    """A number of some prompts, and where it lies in 95 % of the draws of as many of them with replacement."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One arm against another on the same prompts; all intervals are of the same draws."""

    arm: str
    baseline: str
    task: str
    ratio: float  # of tokens per second
    low: float  # 95 % of the ratio when the prompts are drawn again with replacement
    high: float
    mat: Interval  # ratio of the mean acceptance lengths
    mismatch: Interval  # the arm's share of mismatched rounds less the baseline's: a difference, since both may be 0


@dataclass(frozen=True)
class GainCurves:
    """Mean tokens of a round at every budget, by difficulty."""

    tokens: Mapping[str, FloatArray]  # [max_budget + 1], for `DIFFICULTIES`
    context_lengths: Mapping[str, float]  # means
    num_rounds: Mapping[str, int]


class Trial:
    """Sums of every arm, prompt and task."""

    def __init__(self, cost: CostCurve) -> None:
        self._cost = cost
        self._sums: dict[str, dict[tuple[str, str], FloatArray]] = defaultdict(
            lambda: defaultdict(lambda: np.zeros(len(_COLUMNS)))
        )

    def add(self, arm: str, rounds: RecordedRounds, prompts: Sequence[str], walk: Walk, budgets: Budgets) -> None:
        """Add what an arm gets of some rounds; `prompts` [S] names each round's prompt."""
        found, priced = outcomes(rounds, walk, budgets.nodes), budgets.priced
        cost_ms = self._cost.table(int(priced.max()))  # without a context, whose price is each round's own
        context_ms = self._cost.token_ms * rounds.context_lengths
        columns = (
            np.ones(len(rounds)), found.num_tokens, budgets.nodes, found.lost == LOST.index("wrong_parent"),
            cost_ms[priced] + context_ms, cost_ms[0] + context_ms,
        )  # fmt: skip
        rows = np.stack([np.asarray(column, np.float64) for column in columns], axis=1)
        own = self._sums[arm]
        for prompt, row, (_, task) in zip(prompts, rows, rounds.groups, strict=True):
            own[prompt, task] += row

    def take_in(self, other: Trial) -> None:
        """Add the sums of a trial of other prompts under the same costs."""
        for arm, sums in other._sums.items():
            for key, row in sums.items():
                self._sums[arm][key] += row

    @property
    def tasks(self) -> list[str]:
        """All tasks together, then each."""
        return [ALL_TASKS, *sorted({task for own in self._sums.values() for _, task in own})]

    def row(self, arm: str, task: str = ALL_TASKS) -> TrialRow:
        """What an arm got of a task."""
        rounds, tokens, nodes, mismatched, ms, plain_ms = self._of(arm, task).sum(axis=0).tolist()
        rate = 1000 * tokens / ms
        return TrialRow(
            arm=arm,
            task=task,
            num_rounds=int(rounds),
            mat=tokens / rounds,
            mismatch_rate=mismatched / rounds,
            mean_budget=nodes / rounds,
            tokens_per_s=rate,
            speedup=rate * plain_ms / rounds / 1000,  # plain decoding takes a round for every token
        )

    def compare(self, arm: str, baseline: str, task: str = ALL_TASKS, seed: int = 0) -> Comparison:
        """Compare two arms, with a bootstrap over prompts."""
        ours, theirs = self._of(arm, task), self._of(baseline, task)
        random = np.random.default_rng(seed)
        draws = (random.integers(len(ours), size=len(ours)) for _ in range(_DRAWS))
        whole = ours.sum(axis=0), theirs.sum(axis=0)
        sums = np.array([(ours[draw].sum(axis=0), theirs[draw].sum(axis=0)) for draw in draws])
        drawn = sums[:, 0], sums[:, 1]
        rate, mat, mismatch = (
            _interval(measure(*whole), measure(*drawn)) for measure in (_rate_ratio, _mat_ratio, _mismatch_difference)
        )
        return Comparison(arm, baseline, task, rate.value, rate.low, rate.high, mat, mismatch)

    def _of(self, arm: str, task: str) -> FloatArray:
        """[prompts, columns], the prompts in one order for every arm."""
        prompts: dict[str, FloatArray] = {}
        for (prompt, of_task), row in sorted(self._sums[arm].items(), key=lambda item: item[0]):
            if task in (ALL_TASKS, of_task):
                prompts[prompt] = prompts[prompt] + row if prompt in prompts else row
        return np.stack(list(prompts.values()))


def _per(sums: FloatArray, column: str, unit: str) -> FloatArray:
    """One column's sum over another's; `sums` [..., columns]."""
    return sums[..., _COLUMNS.index(column)] / sums[..., _COLUMNS.index(unit)]


def _rate_ratio(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    return _per(ours, "tokens", "ms") / _per(theirs, "tokens", "ms")


def _mat_ratio(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    return _per(ours, "tokens", "rounds") / _per(theirs, "tokens", "rounds")


def _mismatch_difference(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    return _per(ours, "mismatched", "rounds") - _per(theirs, "mismatched", "rounds")


def _interval(value: FloatArray, drawn: FloatArray) -> Interval:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def run_trial(
    batches: Iterable[RecordedRounds],
    prompt_of: Mapping[SequenceName, str],
    scorers: Mapping[str, EdgeScorer],
    arms: Sequence[Arm],
    cost: CostCurve,
    max_budget: int,
) -> Trial:
    """Replay the rounds once for each scorer and size of trees, and ask every arm for its budgets.

    `prompt_of` maps sequences to prompts; rounds of other sequences are passed over.
    """
    trial = Trial(cost)
    groups: dict[tuple[str, int], list[str]] = {}
    for arm in arms:
        groups.setdefault((arm.scorer, arm.max_budget or max_budget), []).append(arm.name)
    policies = {arm.name: arm.new_budget() for arm in arms}
    for rounds in of_sequences(batches, prompt_of):
        prompts = [prompt_of[key] for key in rounds.keys]
        for (scorer, most), own in groups.items():
            walk = walk_rounds(rounds, scorers[scorer], most)
            budgets = choose_budgets(rounds, walk, [policies[name] for name in own], most)
            for name, chosen in zip(own, budgets, strict=True):
                trial.add(name, rounds, prompts, walk, chosen)
    return trial


def gain_curves(batches: Iterable[RecordedRounds], scorer: EdgeScorer, max_budget: int) -> GainCurves:
    """Mean tokens at every budget of rounds that are easy, medium and hard for this scorer's trees."""
    sums = np.zeros((len(DIFFICULTIES), max_budget + 1))
    lengths, counts = np.zeros(len(DIFFICULTIES)), np.zeros(len(DIFFICULTIES), np.int64)
    for rounds in batches:
        walk = walk_rounds(rounds, scorer, max_budget)
        is_node = (walk.path_nodes[:, :, None] > 0) & (walk.path_nodes[:, :, None] <= np.arange(max_budget + 1))
        accepted = is_node.sum(axis=1)  # [S, max_budget + 1]
        depth = rounds.candidate_ids.shape[1]
        kinds = np.digitize(-accepted[:, -1], (-depth / 2, -depth / 4))
        tokens = np.minimum(accepted + 1, rounds.num_left[:, None])
        np.add.at(sums, kinds, tokens)
        np.add.at(lengths, kinds, rounds.context_lengths)
        np.add.at(counts, kinds, 1)
    lengths /= np.maximum(counts, 1)
    return GainCurves(
        {name: sums[at] / max(counts[at], 1) for at, name in enumerate(DIFFICULTIES)},
        dict(zip(DIFFICULTIES, lengths.tolist(), strict=True)),
        dict(zip(DIFFICULTIES, counts.tolist(), strict=True)),
    )


def of_sequences(batches: Iterable[RecordedRounds], wanted: Mapping[SequenceName, str]) -> Iterator[RecordedRounds]:
    """The batches' rounds of some sequences alone."""
    for rounds in batches:
        rows = np.array([at for at, key in enumerate(rounds.keys) if key in wanted], np.int64)
        if 0 < len(rows) == len(rounds):
            yield rounds
        elif len(rows) > 0:
            yield _taken(rounds, rows)


def thinned(rounds: RecordedRounds, share: float) -> RecordedRounds:
    """About that share of the rounds, drawn by sequence and round: the same ones in whatever order they come."""
    if share >= 1:
        return rounds
    names = zip(rounds.sequence_ids, rounds.round_indices.tolist(), strict=True)
    drawn = [uniform(0, sequence_key(sequence), index) < share for sequence, index in names]
    return _taken(rounds, np.flatnonzero(drawn))


def _taken(rounds: RecordedRounds, rows: npt.NDArray[np.int64]) -> RecordedRounds:
    kept: dict[str, Any] = {}
    for field in fields(rounds):
        column = getattr(rounds, field.name)
        kept[field.name] = column[rows] if isinstance(column, np.ndarray) else column and [column[row] for row in rows]
    return replace(rounds, **kept)
