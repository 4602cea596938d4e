"""Replay: what another scorer and another budget would have made of recorded rounds, without a model.

The target's continuation does not depend on the tree, so the accepted length at a recorded root is the depth to which
the rebuilt tree holds the tokens that really followed. Owns the rules of that count, where a round is lost, and the
totals; reading rounds from a store is `storage.recorded_rounds`'. Batches pass through once; only counters are kept.

What follows a root ends with the answer. A path that reaches the last token is cut there and has no bonus token, as
when decoding; and a tree is never deeper than could still become output (`rooms`).

Not covered: other positions. A policy that accepts more visits other roots than the recorded ones; replay judges it at
the recorded ones (dense rounds: at all positions alike). Joint budgets of a batch: each round stands alone.

Letters: S rounds, D draft depth, K candidates, H hidden size, B largest budget, G prices.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from graft_dist.budget import BudgetPolicy, DraftState, sequence_key
from graft_dist.cost_curve import CostCurve
from graft_dist.draft_tree import DraftTree, TreeBatch, build_trees
from graft_dist.edge_scorer import EdgeScorer

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Groups = Sequence[tuple[str, str]]
"""(kind, task) of rounds."""
SequenceName = tuple[str, str]
"""(unit id, sequence id)"""

ALL_TASKS = "all"

LOST = ("end", "depth_cap", "outside", "wrong_parent", "cut")
"""Where a round stops, exactly one of:

end: the path reaches the last token of the answer, or the deepest node that could still become output;
depth_cap: the path is as deep as the drafter (or the policy) goes;
outside: the wanted token is not among the candidates of its depth;
wrong_parent: it sits in the tree at its depth, but under another parent: the mismatch of GRAFT (arXiv 2608.20375);
cut: it is a candidate, but no node of the tree at its depth carries it: the budget ended before.
"""

_NUM_PRICES = 84
_LEAST_TOKENS, _MOST_TOKENS = 0.25, 64.0  # per plain round, as the ends of the oracle's grid of prices


@dataclass(frozen=True, eq=False)
class RecordedRounds:
    """S rounds of one shape [D, K], decoded or dense, with what followed them."""

    groups: Groups  # of each round
    unit_ids: Sequence[str]
    sequence_ids: Sequence[str]  # unique within a unit
    round_indices: Int32Array  # [S]
    context_lengths: Int32Array  # [S]
    root_tokens: Int64Array  # [S]
    candidate_ids: Int32Array  # [S, D, K]
    log_probs: Float32Array  # [S, D, K]
    followed: Int32Array  # [S, D], the tokens that followed the root; -1 beyond the last
    num_left: Int32Array  # [S], tokens from the root's successor to the end of the answer, at least 1
    rooms: Int32Array  # [S], tokens the sequence was allowed to go on for, at least `num_left`
    conf: Float32Array  # [S]
    degen: Float32Array  # [S]
    hist: Float32Array  # [S]
    hidden: Float32Array | None = None  # [S, D, H], the drafter's hidden states, where they were recorded

    def __len__(self) -> int:
        return len(self.root_tokens)

    @property
    def keys(self) -> list[SequenceName]:
        """What names each round's sequence in the store."""
        return list(zip(self.unit_ids, self.sequence_ids, strict=True))


@dataclass(frozen=True, eq=False)
class Walk:
    """The rebuilt trees of S rounds, and where they hold what followed."""

    trees: TreeBatch
    depth_cap: int  # as deep as the drafter and the policy go
    depth_limits: Int32Array  # [S], as deep as a node could still become output, at most `depth_cap`
    path_nodes: Int32Array  # [S, D], the node at depth d + 1 of the path that followed; 0: not in the tree
    first_nodes: Int32Array  # [S, D], the first node at depth d + 1 with the wanted token, whatever its parent; 0: none


@dataclass(frozen=True, eq=False)
class Budgets:
    """What a policy chose for S rounds."""

    nodes: Int64Array  # [S], nodes verified
    is_drafted: BoolArray  # [S], the drafter was asked before the policy chose

    @property
    def priced(self) -> Int64Array:
        """[S], by which costs are looked up: a draft of which nothing is verified costs more than a plain round.

        It is counted as the smallest drafted round, which is the most that it can cost.
        """
        return np.maximum(self.nodes, self.is_drafted)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What S rounds give at chosen budgets."""

    accepted: Int64Array  # [S], nodes accepted
    num_tokens: Int64Array  # [S], acceptance length: bonus token included, cut at the end of the answer
    lost: Int64Array  # [S], index into `LOST`


@dataclass(frozen=True)
class ReplayRow:
    """One policy over one kind of rounds and one task, or all tasks."""

    kind: str
    task: str
    policy: str
    num_rounds: int
    mat: float  # mean acceptance length
    mismatch_rate: float
    mean_budget: float  # nodes verified per round
    tokens_per_s: float | None  # under the cost curve; None without one
    speedup: float | None  # over plain decoding under the same curve
    regret: float | None  # share of the oracle's tokens per second that is missing
    lost: dict[str, int]  # rounds by where they stop, see `LOST`


@dataclass(frozen=True)
class OracleRow:
    """The bound: every round's best budget up to the largest, known in advance, so that tokens per second are most."""

    kind: str
    task: str
    mat: float
    mean_budget: float
    tokens_per_s: float
    speedup: float


@dataclass(frozen=True)
class ReplayReport:
    """Rows in the order: kind, all tasks together, each task; policies as they were given."""

    rows: list[ReplayRow]
    oracles: list[OracleRow]


def replay(
    batches: Iterable[RecordedRounds],
    scorer: EdgeScorer,
    policies: Mapping[str, BudgetPolicy],
    *,
    max_budget: int,
    max_depth: int | None = None,
    cost: CostCurve | None = None,
) -> ReplayReport:
    """Replay every round once with trees of `max_budget` nodes, and read off what each policy gets of them.

    Trees are nested, so the tree of a smaller budget is the first nodes of the one that is built. Policies that
    remember past rounds do so for decoded and dense rounds apart, each starting from the policy as it was given.
    """
    totals = _Totals(cost, max_budget)
    remembering: dict[str, list[BudgetPolicy]] = {}  # by kind of rounds
    for rounds in batches:
        walk = walk_rounds(rounds, scorer, max_budget, max_depth)
        groups, members = _memberships(rounds.groups)
        kinds = np.array([kind for kind, _ in rounds.groups])
        nodes = np.zeros((len(policies), len(rounds)), np.int64)
        is_drafted = np.zeros(nodes.shape, np.bool_)
        for kind in dict.fromkeys(kinds.tolist()):
            own = remembering.setdefault(kind, [copy.deepcopy(policy) for policy in policies.values()])
            rows = np.flatnonzero(kinds == kind)
            for at, chosen in enumerate(choose_budgets(rounds, walk, own, max_budget, rows)):
                nodes[at, rows], is_drafted[at, rows] = chosen.nodes, chosen.is_drafted
        for at, name in enumerate(policies):
            budgets = Budgets(nodes[at], is_drafted[at])
            found = outcomes(rounds, walk, budgets.nodes)
            totals.add_policy(name, groups, members, budgets, rounds.context_lengths, found)
        totals.add_oracle(groups, members, walk.path_nodes, rounds)
    return totals.report(list(policies))


def walk_rounds(rounds: RecordedRounds, scorer: EdgeScorer, max_budget: int, max_depth: int | None = None) -> Walk:
    """Rebuild the trees and find the tokens that followed in them."""
    depth = rounds.candidate_ids.shape[1]
    cap = depth if max_depth is None else min(depth, max_depth)
    limits = np.minimum(rounds.rooms - 1, cap).astype(np.int32)  # a round gives one token more than its path is long
    hidden = None if rounds.hidden is None else torch.from_numpy(rounds.hidden)
    scores = scorer.score(rounds.root_tokens, rounds.candidate_ids, rounds.log_probs, hidden)
    trees = build_trees(rounds.root_tokens, rounds.candidate_ids, scores, max_budget, limits)
    first_nodes = np.zeros_like(rounds.followed)
    _find_first(trees.tokens, trees.depths, trees.num_nodes, rounds.followed, first_nodes)
    return Walk(trees, cap, limits, trees.follow(rounds.followed), first_nodes)


@njit(cache=True)
def _find_first(
    tokens: Int32Array, depths: Int32Array, num_nodes: Int32Array, followed: Int32Array, first_nodes: Int32Array
) -> None:
    """Fill `first_nodes` [S, D], all 0 so far."""
    for slot in range(len(tokens)):
        for node in range(1, num_nodes[slot] + 1):
            at = depths[slot, node] - 1
            if tokens[slot, node] == followed[slot, at] and first_nodes[slot, at] == 0:
                first_nodes[slot, at] = node


def choose_budgets(
    rounds: RecordedRounds,
    walk: Walk,
    policies: Iterable[BudgetPolicy],
    max_budget: int,
    rows: Int64Array | None = None,
) -> list[Budgets]:
    """Ask each policy for the budgets of the rounds `rows` (all: None), as the engine does: a limit, then the tree.

    `hist` is the recorded one (0 in dense rounds), whatever the policy would have accepted before.
    """
    asked = range(len(rounds)) if rows is None else rows.tolist()
    trees = [walk.trees.tree(slot) for slot in range(len(rounds))]
    room = np.where(walk.depth_limits > 0, max_budget, 0).tolist()
    undrafted = [0.0] * len(rounds)
    before = _states(rounds, undrafted, undrafted, room)
    after = _states(rounds, rounds.conf.tolist(), rounds.degen.tolist(), room)
    return [_ask(policy, asked, trees, before, after) for policy in policies]


def _ask(
    policy: BudgetPolicy,
    rows: Sequence[int],
    trees: list[DraftTree],
    before: list[DraftState],
    after: list[DraftState],
) -> Budgets:
    """Each round by itself: what stands together here never shared a batch."""
    nodes, is_drafted = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    for at, row in enumerate(rows):
        limit = policy.limits(before[row : row + 1])[0]
        nodes[at] = policy.choose([trees[row].take(limit)], after[row : row + 1])[0]
        is_drafted[at] = limit > 0
    return Budgets(nodes, is_drafted)


def _states(rounds: RecordedRounds, conf: list[float], degen: list[float], room: list[int]) -> list[DraftState]:
    keys = [sequence_key(sequence_id) for sequence_id in rounds.sequence_ids]
    columns = (conf, degen, rounds.hist.tolist(), rounds.context_lengths.tolist(), room, keys)
    return [DraftState(*values) for values in zip(*columns, rounds.round_indices.tolist(), strict=True)]


def outcomes(rounds: RecordedRounds, walk: Walk, budgets: Int64Array) -> Outcomes:
    """Count what the first `budgets[s]` nodes of each tree give, and say where the round stops."""
    is_held = (walk.path_nodes > 0) & (walk.path_nodes <= budgets[:, None])
    accepted = is_held.sum(axis=1)
    slots, following = np.arange(len(rounds)), np.minimum(accepted, rounds.followed.shape[1] - 1)
    wanted = rounds.followed[slots, following]
    first = walk.first_nodes[slots, following]
    is_deepest = accepted == walk.depth_limits
    lost = np.select(
        [
            (accepted >= rounds.num_left) | (is_deepest & (walk.depth_limits < walk.depth_cap)),
            is_deepest,
            (rounds.candidate_ids[slots, following] != wanted[:, None]).all(axis=1),
            (first > 0) & (first <= budgets),
        ],
        [LOST.index(name) for name in ("end", "depth_cap", "outside", "wrong_parent")],
        LOST.index("cut"),
    )
    return Outcomes(accepted, np.minimum(accepted + 1, rounds.num_left), lost)


def _memberships(groups: Groups) -> tuple[Groups, BoolArray]:
    """The distinct groups, those of all tasks of a kind among them, and which rounds belong to each [groups, S]."""
    index = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    own = np.array([index[group] for group in groups])[None] == np.arange(len(index))[:, None]
    members = dict(zip(index, own, strict=True))
    for kind in {kind for kind, _ in index}:
        members[kind, ALL_TASKS] = np.any([rows for (other, _), rows in members.items() if other == kind], axis=0)
    return list(members), np.array(list(members.values()))


@dataclass
class _Tally:
    """Sums over rounds of one policy and one group."""

    num_rounds: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    ms: float = 0.0
    lost: Int64Array = field(default_factory=lambda: np.zeros(len(LOST), np.int64))


@dataclass
class _OracleTally:
    """The same of the oracle, at each price [G]."""

    num_rounds: int = 0
    num_tokens: FloatArray = field(default_factory=lambda: np.zeros(_NUM_PRICES))
    num_nodes: FloatArray = field(default_factory=lambda: np.zeros(_NUM_PRICES))
    ms: FloatArray = field(default_factory=lambda: np.zeros(_NUM_PRICES))
    plain_ms: float = 0.0  # had the same rounds been plain ones


class _Totals:
    """Counters of every policy and of the oracle, by (kind, task); ratios only in the report.

    The oracle's budgets maximise the ratio of the summed tokens to the summed milliseconds. For the right price of a
    millisecond that is, round by round, the largest tokens minus price times milliseconds (Dinkelbach); the price is
    only known at the end, so all of a grid are tried and the best kept: from a quarter of plain decoding's rate without
    a context, which may cost as much again as the rest, to more than any policy can reach. The ratio is flat around the
    best price: a grid of 7 % steps misses it by less than 0.1 %.
    """

    def __init__(self, cost: CostCurve | None, max_budget: int) -> None:
        self._cost_ms = None if cost is None else cost.table(max(max_budget, 1))  # without a context
        self._token_ms = 0.0 if cost is None else cost.token_ms
        self._tallies: dict[tuple[str, str, str], _Tally] = defaultdict(_Tally)  # by kind, task, policy
        self._oracles: dict[tuple[str, str], _OracleTally] = defaultdict(_OracleTally)

    def add_policy(
        self,
        policy: str,
        groups: Groups,
        members: BoolArray,
        budgets: Budgets,
        context_lengths: Int32Array,
        found: Outcomes,
    ) -> None:
        context_ms = self._token_ms * context_lengths
        for group, own in zip(groups, members, strict=True):
            tally = self._tallies[*group, policy]
            tally.num_rounds += int(own.sum())
            tally.num_tokens += int(found.num_tokens[own].sum())
            tally.num_nodes += int(budgets.nodes[own].sum())
            tally.lost += np.bincount(found.lost[own], minlength=len(LOST))
            if self._cost_ms is not None:
                tally.ms += float((self._cost_ms[budgets.priced] + context_ms)[own].sum())

    def add_oracle(self, groups: Groups, members: BoolArray, path_nodes: Int32Array, rounds: RecordedRounds) -> None:
        if self._cost_ms is None:
            return
        # Only the budgets that just reach the next node of the path can be best.
        slots, lengths = np.arange(len(path_nodes)), np.arange(path_nodes.shape[1] + 1)
        budgets = np.concatenate([np.zeros((len(slots), 1), np.int64), path_nodes], axis=1)
        tokens = np.minimum(lengths + 1, rounds.num_left[:, None])
        plain_ms = self._cost_ms[0] + self._token_ms * rounds.context_lengths
        ms = np.where((budgets > 0) | (lengths == 0), self._cost_ms[budgets], np.inf)
        ms += self._token_ms * rounds.context_lengths[:, None]
        weights = members.astype(np.float64)
        sums = np.zeros((3, len(groups), _NUM_PRICES))
        for at, price in enumerate(np.geomspace(_LEAST_TOKENS, _MOST_TOKENS, _NUM_PRICES) / self._cost_ms[0]):
            best = np.argmax(tokens - price * ms, axis=1)
            for total, values in zip(sums, (tokens, budgets, ms), strict=True):
                total[:, at] = weights @ values[slots, best]
        for group, own, num_tokens, num_nodes, spent in zip(groups, members, *sums, strict=True):
            oracle = self._oracles[group]
            oracle.num_rounds += int(own.sum())
            oracle.plain_ms += float(plain_ms[own].sum())
            oracle.num_tokens += num_tokens
            oracle.num_nodes += num_nodes
            oracle.ms += spent

    def report(self, policies: Sequence[str]) -> ReplayReport:
        keys = sorted({key[:2] for key in self._tallies}, key=lambda key: (key[0], key[1] != ALL_TASKS, key[1]))
        oracles = [self._oracle_row(*key) for key in keys if key in self._oracles]
        rates = {(row.kind, row.task): row.tokens_per_s for row in oracles}
        return ReplayReport([self._row(*key, policy, rates.get(key)) for key in keys for policy in policies], oracles)

    def _row(self, kind: str, task: str, policy: str, oracle_rate: float | None) -> ReplayRow:
        tally = self._tallies[kind, task, policy]
        rates: dict[str, Any] = {"tokens_per_s": None, "speedup": None, "regret": None}
        if self._cost_ms is not None and oracle_rate is not None:
            rate, oracle = 1000 * tally.num_tokens / tally.ms, self._oracles[kind, task]
            rates = {
                "tokens_per_s": rate,
                "speedup": rate * oracle.plain_ms / oracle.num_rounds / 1000,  # a plain round for every token
                "regret": max(0.0, 1 - rate / oracle_rate),  # below 0 by rounding only
            }
        return ReplayRow(
            kind=kind,
            task=task,
            policy=policy,
            num_rounds=tally.num_rounds,
            mat=tally.num_tokens / tally.num_rounds,
            mismatch_rate=int(tally.lost[LOST.index("wrong_parent")]) / tally.num_rounds,
            mean_budget=tally.num_nodes / tally.num_rounds,
            lost=dict(zip(LOST, tally.lost.tolist(), strict=True)),
            **rates,
        )

    def _oracle_row(self, kind: str, task: str) -> OracleRow:
        oracle = self._oracles[kind, task]
        rates = 1000 * oracle.num_tokens / oracle.ms
        best = int(np.argmax(rates))
        return OracleRow(
            kind=kind,
            task=task,
            mat=float(oracle.num_tokens[best] / oracle.num_rounds),
            mean_budget=float(oracle.num_nodes[best] / oracle.num_rounds),
            tokens_per_s=float(rates[best]),
            speedup=float(rates[best] * oracle.plain_ms / oracle.num_rounds / 1000),
        )
