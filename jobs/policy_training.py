"""One learning run: find the data, fit the edge scorer, fit and choose the budgets, judge the choice, keep the policy.

Every step that took long leaves its result in the run's folder, and the store's snapshot is pinned there, so that the
same command goes on where it ended and learns from the same rows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from graft_dist import __version__
from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import (
    EdgeScorer,
    MarginalScorer,
    Reading,
    TdesConfig,
    TdesNetwork,
    TdesScorer,
    fold_projection,
    hidden_projection,
)
from graft_dist.errors import ConfigError, StoreError
from graft_dist.learning.saba import (
    CostFits,
    Observations,
    fit_calibrations,
    fit_costs,
    fit_gain,
    join_observations,
    observe,
)
from graft_dist.learning.tdes import Evaluation, TdesTraining
from graft_dist.policy import GraftPolicy
from graft_dist.prompts import LearningSplit
from graft_dist.replay import RecordedRounds, walk_rounds
from graft_dist.target import read_embeddings
from graft_dist.trial import GainCurves, Trial, gain_curves, of_sequences, run_trial
from jobs.budget_candidate import CADDTREE, PLAIN, Candidate, baselines, fixed_candidates, learned_candidates
from jobs.cluster import job_id
from jobs.learning_data import LearningData, decoded_rounds, open_snapshot, read_learning_data
from jobs.out_file import to_json, write_aside
from jobs.scorer_training import Placement, ScorerPlan, fit_scorer, hidden_rms, say, strip
from jobs.tracked_run import TrackedRun
from jobs.training_plots import draw_plots
from jobs.training_report import Choice, Report, report_of
from storage import connect
from storage.learning_rounds import timed_rounds
from storage.registry import SPEC_TAG, Registry, model_name
from storage.trajectories import local_root

_MOST_ROUNDS = 50_000  # that budgets are fitted to: some hundred bytes each, and more change nothing


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
        config = self.config
        return {
            **asdict(self.training),
            "width": self.width,
            "gate_rank": self.gate_rank,
            "reliance": self.reliance,
            "reading": self.reading,
            "max_budget": self.max_budget,
            "every_prompt": self.every_prompt,
            "target": config.target,
            "drafter": config.drafter,
        }


def run(request: PolicyRequest) -> int:
    """Learn, report and register; returns the exit code 0.

    Raises a `GraftError`, in one sentence, when the request cannot be carried out.
    """
    torch.set_num_threads(request.threads)
    pinned = _Pinned.open(request)
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
    costs = _costs(request, data)
    registry = Registry(request.tracking_uri)
    tracked = TrackedRun.open(registry, request.config.slug, pinned.run_id, request.settings)
    pinned.keep(snapshot.sequences_version, snapshot.rounds_version, tracked.run_id)
    tracked.log_data(data, request.store)
    network, looks = _fit(request, data, pinned.identity)
    lab = _Laboratory(request, data, network, costs.best.curve)
    choice = _choose(lab)
    say(f"chosen: {choice.chosen.name}; judging it on the test split")
    trial = lab.try_out("test", choice.tried)
    report = report_of(trial, choice, looks, costs, request.max_budget, request.training.seed)
    policy = _policy(request, data, network, report)
    folder = policy.save(request.out / "policy")
    write_aside(request.out / "report.json", to_json(report.as_json()))
    plots = draw_plots(request.out / "plots", report, lab.gain_curves("test"))
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
    tracked.finish()
    return 0


class _Pinned:
    """What a run's folder says of earlier starts: settings, snapshot, MLflow run."""

    def __init__(self, path: Path, identity: str, known: dict[str, Any] | None) -> None:
        self._path, self.identity = path, identity
        self.versions = None if known is None else (known["sequences_version"], known["rounds_version"])
        self.run_id: str | None = None if known is None else known["run_id"]

    @classmethod
    def open(cls, request: PolicyRequest) -> _Pinned:
        """Read the folder, which is made if it is not there. Refuses one of a run with other settings."""
        # The snapshot's versions say nothing without the store that they count in.
        known_by = {**request.settings, "store": str(local_root(request.store))}
        identity = hashlib.sha256(json.dumps(known_by, sort_keys=True).encode()).hexdigest()[:16]
        try:
            request.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder of the run {request.out} cannot be made ({error.strerror})") from error
        path = request.out / "run.json"
        if not path.exists():
            return cls(path, identity, None)
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["identity"] != identity:
            raise ConfigError(f"{request.out} holds a run with other settings; choose another --out folder")
        say(f"going on with the run in {request.out}, on the rows it began with")
        return cls(path, identity, known)

    def keep(self, sequences_version: int, rounds_version: int, run_id: str) -> None:
        """Write down what the next start goes on with."""
        known = {"identity": self.identity, "run_id": run_id}
        versions = {"sequences_version": sequences_version, "rounds_version": rounds_version}
        write_aside(self._path, to_json({**known, **versions}))


def _say_data(data: LearningData) -> None:
    for split, sequences in data.splits.items():
        decoded, dense = (sum(getattr(each, name) for each in sequences) for name in ("num_decoded", "num_dense"))
        prompts = len({sequence.prompt_token_ids for sequence in sequences})
        say(f"{split}: {prompts} prompts, {decoded} decoded and {dense} dense rounds")
    if data.num_trained_on or data.num_unreadable:
        say(
            f"left out: {data.num_trained_on} sequences of prompts that the drafter may know, "
            f"{data.num_unreadable} whose prompts cannot be read back"
        )


def _costs(request: PolicyRequest, data: LearningData) -> CostFits:
    """What rounds cost on the hardware that most of them were timed on.

    Where only batches were timed, the curve is of a sequence's share: it judges policies here, and is kept under a name
    that no hardware has, so that who decodes with the policy measures rounds instead of believing it.
    """
    with closing(connect(request.store, snapshot=data.snapshot)) as connection:
        for timed in timed_rounds(connection, request.config.slug):
            fits = fit_costs(timed.rounds, timed.label)
            if fits is not None:
                say(f"cost of rounds: {fits.best.name}, {fits.best.error_ms:.2f} ms off on held-out rounds")
                return fits
    raise StoreError(
        "the decoded rounds have too few budgets to tell what others would cost: collect with --explore 0,4,8,16,32,64"
    )


def _fit(request: PolicyRequest, data: LearningData, identity: str) -> tuple[TdesNetwork, tuple[Evaluation, ...]]:
    config = request.config
    embeddings = read_embeddings(config.target, revision=config.revision)
    sequences, shape = data.splits["fit"], data.shape
    network = TdesConfig(
        embedding_size=embeddings.shape[1],
        draft_depth=shape.depth,
        width=request.width,
        gate_rank=request.gate_rank,
        hidden_size=shape.num_hidden,
        embedding_rms=math.sqrt(float(embeddings.float().square().mean())),
        hidden_rms=hidden_rms(request.store, data.snapshot, sequences, shape) if shape.num_hidden else 1.0,
        reliance=request.reliance,
    )
    plan = ScorerPlan(
        store=request.store,
        snapshot=data.snapshot,
        shape=data.shape,
        fit=strip(data.splits["fit"]),
        tune=strip(data.splits["tune"]),
        target=config.target,
        revision=config.revision,
        network=network,
        training=request.training,
        out=request.out,
        identity=f"{identity} {data.snapshot.name}",
        threads=request.threads,
        uses_gpu=config.resources.num_gpus > 0 and (request.placement.num_workers > 0 or torch.cuda.is_available()),
    )
    return fit_scorer(plan, request.placement)


class _Laboratory:
    """The recorded rounds and the scorers to try on them."""

    def __init__(self, request: PolicyRequest, data: LearningData, network: TdesNetwork, cost: CostCurve) -> None:
        config = request.config
        embeddings = read_embeddings(config.target, revision=config.revision)
        self.request, self.data, self.cost = request, data, cost
        self.scorers: dict[str, EdgeScorer] = {
            "marginal": MarginalScorer(),
            "tdes": TdesScorer(network, embeddings, request.reading),
        }

    def rounds(self, split: LearningSplit) -> Iterator[RecordedRounds]:
        """Stream a split's decoded rounds."""
        return decoded_rounds(self.data, self.request.store, self.request.config.slug, split)

    def try_out(self, split: LearningSplit, arms: Sequence[Candidate]) -> Trial:
        """Replay a split's decoded rounds with several decoders."""
        return run_trial(
            self.rounds(split),
            self.data.prompt_of(split),
            self.scorers,
            [arm.arm(self.cost, self.request.max_budget) for arm in arms],
            self.cost,
            self.request.max_budget,
        )

    def observations(self, split: LearningSplit, scorer: str) -> Observations:
        """What a split's rounds, at most `_MOST_ROUNDS`, show of a scorer's trees."""
        wanted = self.data.prompt_of(split)
        parts: list[Observations] = []
        for rounds in of_sequences(self.rounds(split), wanted):
            walk = walk_rounds(rounds, self.scorers[scorer], self.request.max_budget)
            parts.append(observe(rounds, walk, self.request.max_budget))
            if sum(len(part) for part in parts) >= _MOST_ROUNDS:
                break
        return join_observations(parts)

    def gain_curves(self, split: LearningSplit) -> GainCurves:
        """Tokens by budget and difficulty, of the drafter's own trees."""
        wanted = self.data.prompt_of(split)
        rounds = of_sequences(self.rounds(split), wanted)
        return gain_curves(rounds, self.scorers["marginal"], self.request.max_budget)


def _choose(lab: _Laboratory) -> Choice:
    """Fit the budgets to the fit split, and take what gets most tokens per second on the tune split."""
    tried = baselines()
    calibrations, gains = {}, {}
    for scorer in lab.scorers:
        observed, held_out = lab.observations("fit", scorer), lab.observations("tune", scorer)
        calibrations[scorer] = fit_calibrations(observed, held_out)
        gains[scorer] = fit_gain(observed, held_out)
        best = calibrations[scorer].best
        say(f"{scorer}: chances of nodes {best.name}, off by {best.error:.4f}; gain off by {gains[scorer].error:.3f}")
        tried += fixed_candidates(scorer, lab.request.max_budget)
        tried += learned_candidates(scorer, calibrations[scorer], gains[scorer])
    trial = lab.try_out("tune", tried)
    rows = {candidate.name: trial.row(candidate.name) for candidate in tried}
    learned = [candidate for candidate in tried if candidate.name not in (PLAIN, CADDTREE)]
    ddtree = [candidate for candidate in learned if candidate.scorer == "marginal" and candidate.kind == "fixed"]
    chosen, best_ddtree = (
        max(some, key=lambda candidate: rows[candidate.name].tokens_per_s) for some in (learned, ddtree)
    )
    return Choice(chosen, best_ddtree, tried, list(rows.values()), calibrations, gains)


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
        cost_curves={report.costs.hardware: report.costs.best.curve},
        data=data.identity,
        metrics=report.metrics,
    )


def _tags(data: LearningData, policy: GraftPolicy) -> dict[str, str]:
    identity = data.identity
    return {
        SPEC_TAG: data.source.target_spec,
        "graft.target_fingerprint": data.source.target_fingerprint,
        "graft.drafter_fingerprint": data.drafter_fingerprint,
        "graft.policy_fingerprint": policy.fingerprint,
        "graft.software": policy.software,
        "graft.data": identity.store,
        "graft.data_runs": ",".join(identity.run_ids)[:4000],
        "graft.num_sequences": str(identity.num_sequences),
        "graft.num_decoded_rounds": str(identity.num_decoded_rounds),
        "graft.num_dense_rounds": str(identity.num_dense_rounds),
        "graft.ray_submission_id": job_id() or "",
    }
