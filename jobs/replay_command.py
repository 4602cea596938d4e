"""`graft replay`: rounds out of the store, through the replay, onto the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb
import torch

from graft_dist.budget import BudgetPolicy, FixedBudget
from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve, fit_cost_curve, read_cost_curve
from graft_dist.decoder import load_target
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer
from graft_dist.errors import PolicyError, PromptError, StoreError
from graft_dist.policy import CADDTREE_BUDGET, GraftPolicy, caddtree
from graft_dist.prompts import BadPrompt, LearningSplit, Prompt, is_held_out, learning_split
from graft_dist.replay import LOST, OracleRow, ReplayReport, ReplayRow, replay
from jobs.out_file import to_json
from storage import TrajectoryStore, connect
from storage.recorded_rounds import (
    Selection,
    Skipped,
    check_one_source,
    count_skipped,
    recorded_rounds,
    recorded_timings,
)

METHODS = ("ddtree", "graft")
"""Whose trees are replayed: under the drafter's own probabilities, or under a learned policy's edge scores."""

_HEADER = (
    f"{'kind':<9}{'task':<12}{'policy':<10}{'rounds':>9}{'MAT':>7}{'budget':>8}{'mismatch':>10}{'tokens/s':>10}"
    f"{'speedup':>9}{'regret':>8}" + "".join(f"{name:>14}" for name in LOST)
)


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay, and how."""

    store: str
    method: str
    learned: GraftPolicy | None  # needed by "graft"
    config: TargetConfig | None  # whose token embeddings a learned edge scorer reads
    budgets: list[int]
    target: str | None
    task: str | None
    prompts: list[Prompt | BadPrompt] | None
    is_held_out_only: bool
    split: LearningSplit | None
    kind: str | None  # decoded or dense; None: both
    cost: Path | None

    def max_budget(self, cost: CostCurve | None) -> int:
        """Nodes of the trees that are built: as many as any of the policies may ask for."""
        if self.learned is not None:
            return max(*self.budgets, self.learned.max_budget)
        return max(*self.budgets, 0 if cost is None else CADDTREE_BUDGET)


def run_replay(request: ReplayRequest, format: str) -> int:
    """Replay and print; returns the exit code."""
    selection = Selection(request.target, request.task, _prompt_ids(request), request.kind)
    store = TrajectoryStore(request.store)
    if not store.exists:
        raise StoreError(f"there is no trajectory store at {store.root}: a collect job creates one when it starts.")
    with closing(connect(request.store, threads=1)) as connection:  # in one order: what a policy remembers hangs on it
        drafters = check_one_source(connection, selection)
        _warn_of_several_drafters(drafters)
        cost = _cost_curve(request, connection, replace(selection, kind=None))  # dense rounds have no timings
        skipped = count_skipped(connection, selection)
        scorer = _scorer(request, drafters)
        rounds = recorded_rounds(connection, selection, with_hidden=scorer.needs_hidden)
        report = replay(rounds, scorer, _policies(request, cost), max_budget=request.max_budget(cost), cost=cost)
    if not report.rows:
        raise StoreError(f"no recorded round to replay: {_skipped_text(skipped)}.")
    print(_as_json(request, cost, skipped, report) if format == "json" else _as_table(cost, skipped, report))
    return 0


def _policies(request: ReplayRequest, cost: CostCurve | None) -> dict[str, BudgetPolicy]:
    """Fixed budgets, and where costs are known the method that weighs them; what remembers starts afresh."""
    policies: dict[str, BudgetPolicy] = {"plain": FixedBudget(0)}
    policies |= {f"fixed-{budget}": FixedBudget(budget) for budget in request.budgets}
    if request.learned is not None:
        if request.learned.kind == "fixed" or cost is not None:
            policies["graft"] = request.learned.budget_policy(cost)
    elif cost is not None:
        policies["caddtree"] = caddtree(cost).budget
    return policies


class RecordedScorer:
    """A learned policy's edge scorer over recorded rounds, whose hidden states may be projected to several sizes."""

    def __init__(self, policy: GraftPolicy, embeddings: torch.Tensor) -> None:
        self._policy, self._embeddings = policy, embeddings
        self._scorers: dict[int, EdgeScorer] = {}
        self.needs_hidden = policy.tdes is not None and policy.tdes.config.gate_rank > 0

    def score(self, root_tokens: Any, candidate_ids: Any, log_probs: Any, hidden: torch.Tensor | None = None) -> Any:
        """See `EdgeScorer.score`."""
        size = 0 if hidden is None else hidden.shape[2]
        if size not in self._scorers:
            self._scorers[size] = self._policy.replay_scorer(self._embeddings, size)
        return self._scorers[size].score(root_tokens, candidate_ids, log_probs, hidden)


def _scorer(request: ReplayRequest, drafters: Sequence[str]) -> EdgeScorer:
    if request.method not in METHODS:
        raise PolicyError(f"unknown method {request.method!r} of a replay: choose one of {', '.join(METHODS)}")
    policy = request.learned
    if policy is None:
        return MarginalScorer()
    others = [drafter for drafter in drafters if drafter != policy.drafter_fingerprint]
    if others:
        policy.check(policy.target_fingerprint, others[0])
    if policy.tdes is None:
        return MarginalScorer()
    if request.config is None:
        raise PolicyError("the policy's edge scorer reads the target's token embeddings: give --config")
    target = load_target(request.config)
    policy.check(target.fingerprint, policy.drafter_fingerprint)
    return RecordedScorer(policy, target.embedding_weight)


def _prompt_ids(request: ReplayRequest) -> list[str] | None:
    if request.prompts is None:
        if request.is_held_out_only or request.split is not None:
            option = "--held-out" if request.is_held_out_only else "--split"
            raise PromptError(f"{option} needs --prompts FILE: the split is by the prompts' text, which no store holds")
        return None
    good = [prompt for prompt in request.prompts if isinstance(prompt, Prompt)]
    for bad in request.prompts:
        if isinstance(bad, BadPrompt):
            print(f"graft: {bad.id}: {bad.error}", file=sys.stderr)
    return [prompt.id for prompt in good if _is_wanted(prompt, request)]


def _is_wanted(prompt: Prompt, request: ReplayRequest) -> bool:
    return (not request.is_held_out_only or is_held_out(prompt.turns)) and (
        request.split is None or learning_split(prompt.turns) == request.split
    )


def _warn_of_several_drafters(drafters: Sequence[str]) -> None:
    if len(drafters) > 1:
        print(f"graft: the rounds come from {len(drafters)} different drafters, averaged together", file=sys.stderr)


def _cost_curve(
    request: ReplayRequest, connection: duckdb.DuckDBPyConnection, selection: Selection
) -> CostCurve | None:
    """The file's, else what the rounds took, else the policy's own, of the rounds' hardware or of the only one."""
    if request.cost is not None:
        return read_cost_curve(request.cost)
    found = recorded_timings(connection, selection)
    curve = None
    if found is not None:
        curve = fit_cost_curve(found.timings, f"{found.hardware}, {found.batch_size} sequences at once")
    if curve is None and request.learned is not None:
        curves = request.learned.cost_curves
        alone = next(iter(curves.values())) if len(curves) == 1 else None
        curve = alone if found is None else curves.get(found.hardware, alone)
    return curve


def _skipped_text(skipped: Skipped) -> str:
    return (
        f"{skipped.num_undrafted} rounds were not drafted for, {skipped.num_cut_off} are too close to where their "
        "sequence was cut off"
    )


def _as_json(request: ReplayRequest, cost: CostCurve | None, skipped: Skipped, report: ReplayReport) -> str:
    value = {
        "store": request.store,
        "method": request.method,
        "policy_fingerprint": None if request.learned is None else request.learned.fingerprint,
        "cost": None if cost is None else asdict(cost),
        "skipped": asdict(skipped),
        **asdict(report),
    }
    return to_json(value).rstrip("\n")


def _as_table(cost: CostCurve | None, skipped: Skipped, report: ReplayReport) -> str:
    oracles = {(row.kind, row.task): row for row in report.oracles}
    lines = [_HEADER]
    for group, rows in groupby(report.rows, key=lambda row: (row.kind, row.task)):
        own = list(rows)
        lines += [_row_line(row) for row in own]
        if group in oracles:
            lines.append(_oracle_line(oracles[group], own[0].num_rounds))
    source = "none: give --cost, or record rounds of at least two budgets" if cost is None else cost.source
    return "\n".join([*lines, "", f"cost: {source}", f"left out: {_skipped_text(skipped)}"])


def _row_line(row: ReplayRow) -> str:
    return (
        _left(row.kind, row.task, row.policy, row.num_rounds, row.mat, row.mean_budget)
        + f"{row.mismatch_rate:>10.1%}"
        + ("" if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}").rjust(10)
        + ("" if row.speedup is None else f"{row.speedup:.2f}").rjust(9)
        + ("" if row.regret is None else f"{row.regret:.1%}").rjust(8)
        + "".join(f"{row.lost[name] / row.num_rounds:>14.1%}" for name in LOST)
    )


def _oracle_line(row: OracleRow, num_rounds: int) -> str:
    left = _left(row.kind, row.task, "oracle", num_rounds, row.mat, row.mean_budget)
    return left + f"{'':>10}{row.tokens_per_s:>10.1f}{row.speedup:>9.2f}"


def _left(kind: str, task: str, policy: str, num_rounds: int, mat: float, mean_budget: float) -> str:
    return f"{kind:<9}{task:<12}{policy:<10}{num_rounds:>9}{mat:>7.2f}{mean_budget:>8.1f}"
