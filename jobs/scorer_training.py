"""Fitting the edge scorer on Ray Train's workers, or in this process: each worker reads its own sequences and no other.

Everything a worker needs travels in a small plan; rounds come from the store, weights go to a checkpoint folder that
all workers see. Whatever is killed, the next start goes on from the last look at the held-out rounds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from graft_dist.config import TargetConfig
from graft_dist.edge_scorer import TdesConfig, TdesNetwork, root_mean_square
from graft_dist.errors import ConfigError
from graft_dist.learning.drafter import worker
from graft_dist.learning.lesson_file import INDEX_NAME, LessonWriter, empty_lessons, open_share
from graft_dist.learning.scorer_checkpoint import ScorerCheckpoint
from graft_dist.learning.tdes import Evaluation, Share, TdesTrainer, TdesTraining, lessons_of
from graft_dist.rounds import RoundRecord
from graft_dist.target import read_embeddings
from jobs.cluster import wait_until_fits
from jobs.learning_data import LearningData
from storage import connect
from storage.learning_rounds import RecordedSequence, RoundShape, round_records
from storage.trajectories import Snapshot

_PART_ROUNDS = 1024  # rounds turned into lessons at a time
_STORE_MEMORY = "1GB"  # of DuckDB, in each worker


@dataclass(frozen=True, kw_only=True)
class ScorerPlan:
    """What every worker is told."""

    store: str
    snapshot: Snapshot
    slug: str  # the target's, in the store
    shape: RoundShape
    fit: tuple[RecordedSequence, ...]
    tune: tuple[RecordedSequence, ...]
    target: str
    revision: str | None
    network: TdesConfig
    training: TdesTraining
    out: Path  # seen by all workers
    identity: str  # of the run, kept in its checkpoints
    threads: int
    lessons: Path  # where lessons are kept while fitting
    uses_gpu: bool = False
    fitted: tuple[str, ...] | None = None  # names of the parameters that are fitted; None: all


class ScorerPlanner:
    """Plans fits to the rounds of one data set; what all of them need of it is read once."""

    def __init__(
        self, config: TargetConfig, store: str, data: LearningData, embeddings: torch.Tensor, threads: int
    ) -> None:
        self._config, self._store, self._data, self._threads = config, store, data, threads
        self._fit, self._tune = (tuple(data.splits[split]) for split in ("fit", "tune"))
        self._embedding_size, self._embedding_rms = embeddings.shape[1], root_mean_square(embeddings)
        self._hidden_rms = _hidden_rms(store, config.slug, data) if data.shape.num_hidden > 0 else 1.0

    def plan(
        self,
        out: Path,
        identity: str,
        training: TdesTraining,
        *,
        width: int = TdesConfig.width,
        gate_rank: int,
        reliance: bool,
    ) -> ScorerPlan:
        """A fit in the folder `out` of the run `identity`, on CPUs, of all parameters."""
        data = self._data
        return ScorerPlan(
            store=self._store,
            snapshot=data.snapshot,
            slug=self._config.slug,
            shape=data.shape,
            fit=self._fit,
            tune=self._tune,
            target=self._config.target,
            revision=self._config.revision,
            network=TdesConfig(
                embedding_size=self._embedding_size,
                draft_depth=data.shape.depth,
                width=width,
                gate_rank=gate_rank,
                hidden_size=data.shape.num_hidden if gate_rank > 0 else 0,
                embedding_rms=self._embedding_rms,
                hidden_rms=self._hidden_rms,
                reliance=reliance,
            ),
            training=training,
            out=out,
            identity=f"{identity} {data.snapshot.name} {data.drafter_fingerprint}",
            threads=self._threads,
            lessons=out / "lessons" / data.drafter_fingerprint,
        )


@dataclass(frozen=True)
class Placement:
    """Where the workers run."""

    num_workers: int  # 0: in this process
    address: str | None
    max_failures: int = 3  # times that the workers are started again after one died
    wait_for_nodes_s: float = 0.0  # how long a cluster that is too small may take to start nodes


def say(line: str) -> None:
    """Print a line at once, so that a job's log can be followed."""
    print(f"train: {line}", flush=True)


def fit_scorer(
    plan: ScorerPlan, placement: Placement, embeddings: torch.Tensor
) -> tuple[TdesNetwork, tuple[Evaluation, ...]]:
    """Fit, or take what an earlier start has finished; returns the best weights and every look.

    `embeddings` [V, E] are the target's; Ray's workers read their own, since a plan has to stay small.
    Raises the `GraftError` that a worker met.
    """
    checkpoint = ScorerCheckpoint(plan.out / "scorer", plan.identity)
    if checkpoint.result() is None:
        if placement.num_workers == 0:
            train_on_worker(plan, embeddings)
        else:
            _train_on_ray(plan, placement)
    else:
        say("the edge scorer is fitted already")
    result = checkpoint.result()
    if result is None:
        raise ConfigError(
            f"the workers fitted the edge scorer, but {plan.out} does not hold it here: --out must be a folder "
            "that all nodes see"
        )
    for folder in ("lessons", "ray"):  # gigabytes that nobody reads again
        shutil.rmtree(plan.out / folder, ignore_errors=True)
    weights, evaluations = result
    network = TdesNetwork(plan.network)
    network.load_state_dict(weights)
    return network, evaluations


def _train_on_ray(plan: ScorerPlan, placement: Placement) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from jobs.ray_training import training_cluster

    with training_cluster(placement.address) as cluster:
        say(cluster.message)
        num_gpus = 1.0 if plan.uses_gpu else 0.0
        size = (placement.num_workers, plan.threads, num_gpus)
        wait_until_fits(cluster, *size, wait_s=placement.wait_for_nodes_s, say=say, who="workers")
        TorchTrainer(
            lambda: train_on_worker(plan, read_embeddings(plan.target, revision=plan.revision)),
            # The network is small: gloo adds up its gradients on CPU and GPU alike.
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=placement.num_workers,
                use_gpu=plan.uses_gpu,
                resources_per_worker={"CPU": plan.threads},
            ),
            # A name of its own: Ray Train resumes runs by name, and this run resumes from its own checkpoints.
            run_config=RunConfig(
                name=f"scorer-{time.time_ns()}",
                storage_path=str(plan.out.absolute() / "ray"),
                failure_config=FailureConfig(max_failures=placement.max_failures),
            ),
        ).fit()


def train_on_worker(plan: ScorerPlan, embeddings: torch.Tensor) -> None:
    """One worker's part of the fit; the first worker keeps the checkpoints. `embeddings` [V, E] are the target's."""
    torch.set_num_threads(plan.threads)
    rank, num_workers = worker()
    say(f"worker {rank} of {num_workers} is process {os.getpid()}")
    lessons, held_out = (
        _share(plan, split, sequences) for split, sequences in (("fit", plan.fit), ("tune", plan.tune))
    )
    device = torch.device("cuda" if plan.uses_gpu else "cpu")
    network = TdesNetwork(plan.network, plan.training.seed).to(device)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(plan.fitted is None or name in plan.fitted)
    trainer = TdesTrainer(network, embeddings.to(device), lessons, held_out, plan.training)
    checkpoint = ScorerCheckpoint(plan.out / "scorer", plan.identity)
    if checkpoint.load(trainer) and rank == 0:
        say(f"resumed at step {trainer.step} of {plan.training.steps}")
    started, first = time.monotonic(), trainer.step
    while not trainer.is_done:
        look = trainer.advance()
        if rank == 0:
            checkpoint.save(trainer)
            left = (time.monotonic() - started) / (look.step - first) * (plan.training.steps - look.step)
            say(
                f"step {look.step} of {plan.training.steps}, loss {look.loss:.4f}, held-out KL {look.held_out_kl:.4f} "
                f"(best {trainer.best.held_out_kl:.4f} at step {trainer.best.step}); at most {left / 60:.1f} min left"
            )
    if rank == 0:
        checkpoint.save(trainer)


def _share(plan: ScorerPlan, split: str, sequences: Sequence[RecordedSequence]) -> Share:
    """This worker's lessons: every so many-th sequence, read from the store once and then mapped from its own file."""
    rank, num_workers = worker()
    counts = [sequence.num_decoded + sequence.num_dense for sequence in sequences]
    starts = [0, *accumulate(counts)]
    folder = plan.lessons / f"{split}-{rank}-of-{num_workers}"
    if not (folder / INDEX_NAME).is_file():
        own = {sequence.key: start for sequence, start in list(zip(sequences, starts, strict=False))[rank::num_workers]}
        say(f"worker {rank}: reading {len(own)} sequences to {split} on")
        num_left_out = _write_lessons(plan, folder, sequences[rank::num_workers], own)
        if num_left_out > 0:
            say(f"worker {rank}: {num_left_out} rounds to {split} on hold numbers that are not finite and are left out")
    return open_share(folder, starts[-1])


def _write_lessons(
    plan: ScorerPlan, folder: Path, sequences: Sequence[RecordedSequence], starts: dict[tuple[str, str], int]
) -> int:
    """Keep what the rounds teach; returns how many are left out: one that is not finite would spoil the whole fit."""
    waiting: list[RoundRecord] = []
    numbers: list[int] = []
    num_left_out = 0
    with (
        closing(
            connect(plan.store, memory_limit=_STORE_MEMORY, threads=plan.threads, snapshot=plan.snapshot)
        ) as connection,
        LessonWriter(folder) as writer,
    ):
        writer.add(empty_lessons(plan.shape.depth, plan.shape.width, plan.shape.num_hidden), np.zeros(0, np.int64))
        for sequence, records in round_records(connection, plan.slug, sequences, plan.shape):
            sound = [(at, record) for at, record in enumerate(records, starts[sequence.key]) if record.is_finite]
            num_left_out += len(records) - len(sound)
            numbers += [at for at, _ in sound]
            waiting += [record for _, record in sound]
            if len(waiting) >= _PART_ROUNDS:
                writer.add(lessons_of(waiting), np.array(numbers))
                waiting, numbers = [], []
        if waiting:
            writer.add(lessons_of(waiting), np.array(numbers))
    return num_left_out


def _hidden_rms(store: str, slug: str, data: LearningData) -> float:
    """Root mean square of the recorded hidden states of the first sequences."""
    with closing(connect(store, memory_limit=_STORE_MEMORY, snapshot=data.snapshot)) as connection:
        some = [
            record.hidden
            for _, records in round_records(connection, slug, data.splits["fit"][:64], data.shape)
            for record in records
            if record.hidden is not None and record.is_finite
        ]
    return root_mean_square(torch.from_numpy(np.stack(some)))
