"""One learning run: find the data, fit the edge scorer, fit and choose the budgets, judge the choice, keep the policy.

Every step that took long leaves its result in the run's folder, and the store's snapshot is pinned there, so that the
same command goes on where it ended and learns from the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from graft_dist import __version__
from graft_dist.config import TargetConfig
from graft_dist.edge_scorer import (
    EdgeScorer,
    MarginalScorer,
    Reading,
    TdesNetwork,
    TdesScorer,
    fold_projection,
    hidden_projection,
)
from graft_dist.errors import ConfigError
from graft_dist.learning.saba import CostFits
from graft_dist.learning.tdes import Evaluation, TdesTraining
from graft_dist.policy import GraftPolicy
from graft_dist.target import read_embeddings
from jobs.cluster import job_id
from jobs.laboratory import Laboratory, choose, recorded_costs
from jobs.learning_data import LearningData, open_snapshot, read_learning_data
from jobs.out_file import to_json, write_aside
from jobs.pinned_run import PinnedRun, config_settings
from jobs.scorer_training import Placement, ScorerPlanner, fit_scorer, say
from jobs.tracked_run import TrackedRun
from jobs.training_plots import draw_plots
from jobs.training_report import Report, report_of
from storage.registry import SPEC_TAG, Registry, model_name


@dataclass(frozen=True, kw_only=True)
class PolicyRequest:
    """What a learning run is asked to do."""

    config: TargetConfig
    store: str
    out: Path
    training: TdesTraining
    width: int  # of the edge scorer
    gate_rank: int
    reliance: bool
    reading: Reading
    max_budget: int  # that a policy may choose
    placement: Placement
    threads: int
    tracking_uri: str
    registers: bool
    every_prompt: bool  # also prompts that a drafter of ours would have been trained on
    min_rounds: int

    def __post_init__(self) -> None:
        if self.placement.num_workers < 0:
            raise ConfigError(f"workers is {self.placement.num_workers}; it must be at least 0, which is this process")
        if self.placement.max_failures < 0:
            raise ConfigError(f"max-failures is {self.placement.max_failures}; it must be at least 0")
        if not 1 <= self.max_budget <= 4096:
            raise ConfigError(f"max-budget is {self.max_budget}; allowed is 1 to 4096")
        if self.gate_rank < 0:
            raise ConfigError(f"gate-rank is {self.gate_rank}; it must be at least 0, which is no gate")

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the result; where and by how many workers it is computed does not."""
        return {
            **asdict(self.training),
            "width": self.width,
            "gate_rank": self.gate_rank,
            "reliance": self.reliance,
            "reading": self.reading,
            "max_budget": self.max_budget,
            "every_prompt": self.every_prompt,
            **config_settings(self.config),
        }


def run(request: PolicyRequest) -> int:
    """Learn, report and register; returns the exit code 0.

    Raises a `GraftError`, in one sentence, when the request cannot be carried out.
    """
    torch.set_num_threads(request.threads)
    pinned = PinnedRun.open(request.out, request.settings, request.store)
    if not pinned.is_new:
        say(f"going on with the run in {request.out}, on the rows it began with")
    snapshot = open_snapshot(request.store, pinned.versions)
    data = read_learning_data(
        request.config,
        request.store,
        snapshot,
        every_prompt=request.every_prompt,
        min_rounds=request.min_rounds,
        needs_hidden=request.gate_rank > 0,
    )
    _say_data(data)
    costs = recorded_costs(data, request.store, request.config.slug)
    for one in costs:
        say(f"cost of rounds on {one.hardware}: {one.best.name}, {one.best.error_ms:.2f} ms off on held-out rounds")
    pinned.check(data.drafter_fingerprint)  # before a run that has ended in MLflow is taken up for nothing
    registry = Registry(request.tracking_uri)
    with TrackedRun.open(registry, request.config.slug, pinned.run_id, request.settings, pinned.place) as tracked:
        pinned.keep(snapshot, data.drafter_fingerprint, tracked.run_id)
        tracked.log_data(data, data.identity(costs), request.store)
        _learn(request, data, costs, pinned, registry, tracked)
    pinned.release()
    return 0


def _learn(
    request: PolicyRequest,
    data: LearningData,
    costs: Sequence[CostFits],
    pinned: PinnedRun,
    registry: Registry,
    tracked: TrackedRun,
) -> None:
    embeddings = read_embeddings(request.config.target, revision=request.config.revision)
    network, looks = _fit(request, data, embeddings, pinned.identity)
    scorers: dict[str, EdgeScorer] = {
        "marginal": MarginalScorer(),
        "tdes": TdesScorer(network, embeddings, request.reading),
    }
    lab = Laboratory(data, request.store, request.config.slug, scorers, costs[0].best.curve, request.max_budget)
    choice = choose(lab)
    for scorer, fits in choice.calibrations.items():
        error = choice.gains[scorer].error
        say(f"{scorer}: chances of nodes {fits.best.name}, off by {fits.best.error:.4f}; gain off by {error:.3f}")
    say(f"chosen: {choice.chosen.name}; judging it on the test split")
    trial = lab.try_out(choice.tried)
    report = report_of(trial, choice, looks, costs, request.max_budget, request.training.seed)
    policy = _policy(request, data, network, report)
    folder = policy.save(request.out / "policy")
    ended = _ended(request.out / "report.json", policy, is_resumed=not pinned.is_new)
    write_aside(request.out / "report.json", to_json({**ended, **report.as_json()}))
    plots = draw_plots(request.out / "plots", report, lab.gain_curves())
    tracked.log_results(report.metrics, looks, [*plots, request.out / "report.json"])
    print(report.as_table())
    say(f"policy {policy.fingerprint} in {folder}; plots and report in {request.out}")
    if request.registers:
        version = registry.register(
            folder,
            request.config.slug,
            report.metrics,
            _tags(data, policy),
            description=report.headline,
            run_id=tracked.run_id,
        )
        say(f"{model_name(request.config.slug)} version {version} is the challenger in {request.tracking_uri}")


def _say_data(data: LearningData) -> None:
    for split, sequences in data.splits.items():
        decoded, dense = (sum(getattr(each, name) for each in sequences) for name in ("num_decoded", "num_dense"))
        prompts = len({sequence.prompt_name for sequence in sequences})
        say(f"{split}: {prompts} prompts, {decoded} decoded and {dense} dense rounds")
    if data.num_trained_on or data.num_unreadable or data.num_of_other_drafters:
        say(
            f"left out: {data.num_trained_on} sequences of prompts that the drafter may know, "
            f"{data.num_unreadable} whose prompts cannot be read back, {data.num_of_other_drafters} of other drafters"
        )


def _fit(
    request: PolicyRequest, data: LearningData, embeddings: torch.Tensor, identity: str
) -> tuple[TdesNetwork, tuple[Evaluation, ...]]:
    planner = ScorerPlanner(request.config, request.store, data, embeddings, request.threads)
    plan = planner.plan(
        request.out,
        identity,
        request.training,
        width=request.width,
        gate_rank=request.gate_rank,
        reliance=request.reliance,
    )
    has_gpu = request.placement.num_workers > 0 or torch.cuda.is_available()
    plan = replace(plan, uses_gpu=request.config.resources.num_gpus > 0 and has_gpu)
    return fit_scorer(plan, request.placement, embeddings)


def _ended(report: Path, policy: GraftPolicy, is_resumed: bool) -> dict[str, Any]:
    """When this policy was first there: a run that is started again afterwards has spent no more time on it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    ended = {"policy": policy.fingerprint, "finished_at": now, "is_resumed": is_resumed}
    known = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return {name: known.get(name) for name in ended} if known.get("policy") == policy.fingerprint else ended


def _policy(request: PolicyRequest, data: LearningData, network: TdesNetwork, report: Report) -> GraftPolicy:
    chosen = report.choice.chosen
    if data.shape.num_hidden > 0:  # fitted through the projection that rounds are recorded with, decoding without one
        projection = hidden_projection(data.drafter_fingerprint, data.hidden_size, data.shape.num_hidden)
        network = fold_projection(network, projection)
    return GraftPolicy(
        slug=request.config.slug,
        target_fingerprint=data.source.target_fingerprint,
        drafter_fingerprint=data.drafter_fingerprint,
        software=f"graft-dist {__version__}, torch {torch.__version__}",
        tdes=network if chosen.scorer == "tdes" else None,
        reading=request.reading,
        kind=chosen.kind,
        fixed_budget=chosen.fixed_budget,
        gain=chosen.gain,
        form=chosen.form,
        num_candidates=data.shape.width,
        max_budget=request.max_budget,
        cost_curves={fits.hardware: fits.best.curve for fits in report.costs},
        data=data.identity(report.costs),
        metrics=report.metrics,
    )


def _tags(data: LearningData, policy: GraftPolicy) -> dict[str, str]:
    identity = policy.data
    return {
        SPEC_TAG: data.source.target_spec,
        "graft.target_fingerprint": data.source.target_fingerprint,
        "graft.drafter_fingerprint": data.drafter_fingerprint,
        "graft.policy_fingerprint": policy.fingerprint,
        "graft.software": policy.software,
        "graft.data": identity.store,
        "graft.data_runs": ",".join(identity.run_ids)[:4000],
        "graft.cost_runs": ",".join(identity.cost_run_ids)[:4000],
        "graft.num_sequences": str(identity.num_sequences),
        "graft.num_decoded_rounds": str(identity.num_decoded_rounds),
        "graft.num_dense_rounds": str(identity.num_dense_rounds),
        "graft.ray_submission_id": job_id() or "",
    }
