"""Evidence for the gate: challenger and champion replayed on the same held-out rounds, and decoding live in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray

from graft_dist.budget import FixedBudget
from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.errors import GraftError, PolicyError
from graft_dist.generate import Request
from graft_dist.policy import GraftPolicy
from graft_dist.retraining import Retraining
from graft_dist.target import read_embeddings
from graft_dist.trial import Arm, Interval, Trial, run_trial
from jobs.cluster import connected, reserved
from jobs.gate import Evidence, Side, compare
from jobs.learning_data import LearningData, decoded_rounds, open_snapshot, read_learning_data
from jobs.live_trial import Audit, LivePlan, LiveTrial, Turns, run_live
from storage import connect
from storage.learning_rounds import prompts_of, timed_hardware

Version = tuple[int, Path]
"""A registered version's number and its policy's folder."""


def evidence_of(row: Mapping[str, Any] | None) -> Evidence | None:
    """The evidence that `asdict` made a row of."""
    if row is None:
        return None
    sides = {name: Side(**row[name]) for name in ("champion", "challenger")}
    intervals = {name: Interval(**row[name]) for name in ("mat", "mismatch") if row.get(name) is not None}
    return Evidence(**{**row, **sides, **intervals})


class Evaluator:
    """Compares policies of one target on the test split of one store."""

    def __init__(self, config: TargetConfig, settings: Retraining, store: str, address: str | None) -> None:
        self.config, self.settings, self.store, self.address = config, settings, store, address

    def compare(self, champion: Version | None, challenger: Version) -> dict[str, Any]:
        """Return `replay` and `live` evidence as rows, and what the audit found.

        Without a champion, or with one that was trained for another target or drafter, the challenger has to beat
        DDTree: at its best configured budget in replay, at the configuration's budget live.
        """
        ours = GraftPolicy.load(challenger[1])
        theirs = None if champion is None else _fitting(GraftPolicy.load(champion[1]), ours)
        data = read_learning_data(
            self.config,
            self.store,
            open_snapshot(self.store, None),
            every_prompt=self.settings.every_prompt,
            min_rounds=1,
            needs_hidden=_has_gate(ours) or _has_gate(theirs),
        )
        is_foreign = champion is not None and theirs is None
        note = f"champion v{champion[0]} was trained for other models" if champion is not None and is_foreign else ""
        replayed = self._replay(data, theirs, f"v{champion[0]}" if champion else "", ours, f"v{challenger[0]}")
        live, audit = self._live(data, champion if theirs is not None else None, challenger)
        return {
            "replay": asdict(replayed),
            "live": None if live is None else asdict(live),
            "num_audited": 0 if audit is None else audit.num_audited,
            "num_bugs": 0 if audit is None else audit.num_bugs,
            "differences": [] if audit is None else audit.differences,
            "note": note,
        }

    def _replay(
        self, data: LearningData, theirs: GraftPolicy | None, their_name: str, ours: GraftPolicy, our_name: str
    ) -> Evidence:
        with closing(connect(self.store, snapshot=data.snapshot)) as connection:
            places = timed_hardware(connection, self.config.slug, data.drafter_fingerprint, data.shape)
        cost = _cost(ours, places)
        embeddings = read_embeddings(self.config.target, revision=self.config.revision)
        scorers = {"challenger": ours.replay_scorer(embeddings, data.shape.num_hidden), "marginal": MarginalScorer()}
        arms = [Arm("challenger", "challenger", lambda: ours.budget_policy(cost))]
        budgets = [budget for budget in self.config.budgets if budget <= ours.max_budget] or [ours.max_budget]
        if theirs is None:
            arms += [Arm(f"ddtree {budget}", "marginal", _fixed(budget)) for budget in budgets]
        else:
            scorers["champion"] = theirs.replay_scorer(embeddings, data.shape.num_hidden)
            arms.append(Arm(f"champion {their_name}", "champion", lambda: theirs.budget_policy(cost)))
        # Those with rounds to replay alone: they are what the interval is drawn from.
        ids = {each.key for each in data.splits["test"] if each.num_decoded > 0}
        prompt_of = {name: prompt for name, prompt in data.prompt_of("test").items() if name in ids}
        rounds = decoded_rounds(data, self.store, self.config.slug, "test")
        most = max(ours.max_budget, theirs.max_budget if theirs is not None else 0)
        trial = run_trial(rounds, prompt_of, scorers, arms, cost, most)
        rival = max((arm.name for arm in arms[1:]), key=lambda name: trial.row(name).tokens_per_s)
        compared = trial.compare("challenger", rival)
        return Evidence(
            "replay",
            _side(trial, rival, rival),
            _side(trial, "challenger", f"challenger {our_name}"),
            compared.ratio,
            compared.low,
            compared.high,
            len(set(prompt_of.values())),
            compared.mat,
            compared.mismatch,
        )

    def _live(
        self, data: LearningData, champion: Version | None, challenger: Version
    ) -> tuple[Evidence | None, Audit | None]:
        """Run the live trial and the audit where the models fit: as a task with an actor's resources."""
        settings = self.settings
        most = max(settings.num_live_prompts, settings.num_audit_prompts)
        requests = _test_requests(data, self.store, self.config.slug, most)
        if not requests:
            return None, None
        cpus, gpus = self.config.resources.num_cpus, self.config.resources.num_gpus
        plan = LivePlan(
            config=self.config,
            requests=requests,
            num_turns=settings.num_live_prompts,
            num_audited=settings.num_audit_prompts,
            max_new_tokens=settings.max_new_tokens,
            challenger=str(challenger[1]),
            champion=None if champion is None else str(champion[1]),
            ddtree_budget=self.config.budget,
            num_threads=self.config.threads or max(1, int(cpus)),
        )
        try:
            with connected(self.address), reserved(cpus, gpus, who="the live trial") as room:
                task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=1, scheduling_strategy=room)(run_live)
                found: LiveTrial = ray.get(task.remote(plan))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GraftError):  # its own sentence, without Ray's copy of the traceback
                raise error.cause from error
            raise
        if found.turns is None:
            return None, found.audit
        rival = f"ddtree {self.config.budget}" if champion is None else f"champion v{champion[0]}"
        sides = (
            (name, _totals(turns), turns.mat, None)
            for name, turns in zip((rival, f"challenger v{challenger[0]}"), found.turns, strict=True)
        )
        return compare("live", *sides), found.audit


def _has_gate(policy: GraftPolicy | None) -> bool:
    return policy is not None and policy.tdes is not None and policy.tdes.config.gate_rank > 0


def _fitting(champion: GraftPolicy, challenger: GraftPolicy) -> GraftPolicy | None:
    """The champion, if it is of the challenger's target and drafter."""
    try:
        champion.check(challenger.target_fingerprint, challenger.drafter_fingerprint)
    except PolicyError:
        return None
    return champion


def _cost(policy: GraftPolicy, places: Sequence[str]) -> CostCurve:
    """The curve that both sides are judged by, as the challenger was: of the first hardware that it knows costs of."""
    if not policy.cost_curves:
        raise PolicyError("the challenger has no cost curve to judge by")
    for hardware in places:
        for name, curve in policy.cost_curves.items():
            if name == hardware or name.startswith(f"{hardware}, share of "):
                return curve
    return next(iter(policy.cost_curves.values()))


def _fixed(budget: int) -> Any:
    return lambda: FixedBudget(budget)


def _side(trial: Trial, arm: str, name: str) -> Side:
    row = trial.row(arm)
    return Side(name, row.tokens_per_s, row.mat, row.mismatch_rate)


def _totals(turns: Turns) -> Any:
    """[prompts, 2] milliseconds and tokens."""
    return np.array([turns.decode_ms, turns.num_tokens], np.float64).T


def _test_requests(data: LearningData, store: str, slug: str, count: int) -> tuple[Request, ...]:
    """The first prompts of the test split, in the order of their ids."""
    found = {sequence.prompt_id: sequence for sequence in data.splits["test"]}
    chosen = [found[name] for name in sorted(found)[:count]]
    with closing(connect(store, snapshot=data.snapshot)) as connection:
        requests = [
            Request(sequence.prompt_id, sequence.task, list(token_ids))
            for sequence, token_ids in prompts_of(connection, slug, chosen)
        ]
    return tuple(sorted(requests, key=lambda request: request.prompt_id))
