"""CollectActor: a `Collector` with its models, as the class that Ray runs as an actor; and the plan that it is made
from."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers.utils.logging import disable_progress_bar

from graft_dist.decoder import load_decoder, new_engine
from graft_dist.dense import dense_rounds
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import hidden_projection
from graft_dist.engine import Engine
from graft_dist.hardware import describe_hardware
from graft_dist.prompts import Prompt, render
from graft_dist.rounds import RoundRecord, SequenceRecord
from graft_dist.sampling import SamplingParams
from graft_dist.software import describe_software
from graft_dist.target import Target
from jobs.collector import FATAL_ERRORS, Collector
from jobs.decode_spec import DecodeSpec
from jobs.units import Unit, WorkItem
from jobs.work import Report
from storage.schema import Provenance, UnitKey
from storage.trajectories import FileInfo, TrajectoryStore, new_attempt


@dataclass(frozen=True, kw_only=True)
class ActorPlan:
    """Everything an actor needs to know; plain data."""

    spec: DecodeSpec
    store: str | None  # root of the store; None records nothing
    num_slots: int
    num_threads: int
    slice_s: float = 2.0


@dataclass(frozen=True)
class ModelInfo:
    """The identity of the loaded models; equal on all actors of a run."""

    target_fingerprint: str
    tokenizer_sha256: str
    drafter_fingerprint: str | None
    draft_depth: int  # 0 without a drafter
    dtype: str  # float32 or bfloat16, also where the configuration says auto

    def identity(self, spec: DecodeSpec) -> str:
        """The run's identity: see `DecodeSpec.identity`. Also its run id in the store."""
        return spec.identity(self.target_fingerprint, self.drafter_fingerprint, self.dtype)


@dataclass(frozen=True)
class WorkerInfo:
    """What an actor says of itself once its models are loaded."""

    models: ModelInfo
    host: str
    pid: int


class CollectActor:
    """The actor: loads when asked to, works when asked to, and leaves the rest to `Collector`."""

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._loaded: tuple[Collector, ModelInfo] | None = None

    def load(self) -> WorkerInfo:
        """Load the models, once. Not done in the constructor: an actor whose constructor fails is never restarted."""
        if self._loaded is None:
            self._loaded = load_collector(self._plan)
        return WorkerInfo(self._loaded[1], platform.node(), os.getpid())

    def work(self, held: Sequence[str], new: Unit | None, has_more: bool) -> Report:
        """One slice of work: see `Collector.work`."""
        self.load()
        assert self._loaded is not None
        try:
            return self._loaded[0].work(held, new, has_more)
        except FATAL_ERRORS as error:
            # The driver sees a lost worker, and the device's memory is given back with the process.
            print(f"actor {os.getpid()} ends: {type(error).__name__}: {error}", flush=True)
            os._exit(1)


def load_collector(plan: ActorPlan) -> tuple[Collector, ModelInfo]:
    """Load target, drafter and engine as `plan` says. Raises `TargetError`, `DrafterError` or `PolicyError`."""
    torch.set_num_threads(plan.num_threads)
    disable_progress_bar()  # a hundred lines in the job's log, from every actor
    spec, config = plan.spec, plan.spec.config
    # Dense rounds ask the drafter also where no round drafts.
    target, drafter = load_decoder(config, "ddtree" if spec.dense else spec.method)
    models = ModelInfo(
        target.fingerprint,
        target.tokenizer_sha256,
        None if drafter is None else drafter.fingerprint,
        0 if drafter is None else drafter.draft_depth,
        target.dtype_name,
    )
    projection = None
    if spec.num_hidden > 0 and drafter is not None:
        projection = hidden_projection(drafter.fingerprint, target.hidden_size, spec.num_hidden)
    make_engine = partial(
        new_engine,
        config,
        target,
        None if spec.method == "plain" else drafter,
        spec.policy(),
        max_slots=plan.num_slots,
        max_budget=spec.max_budget,
        record=plan.store is not None and spec.records_rounds,
        projection=projection,
        detokenize=False,
    )
    _warm_up(make_engine())
    dense = None
    if spec.dense and drafter is not None and plan.store is not None:
        dense = partial(_dense, target, drafter, config.num_candidates, projection)
    made_by = _provenance(spec, models, describe_hardware(models.dtype, target.device))
    collector = Collector(
        make_engine=make_engine,
        num_slots=plan.num_slots,
        render=partial(_render, target, spec),
        sampling=spec.sampling,
        write=None if plan.store is None else _Writer(plan.store, made_by, models.identity(spec)),
        dense=dense,
        slice_s=plan.slice_s,
    )
    return collector, models


def _warm_up(engine: Engine) -> None:
    """Decode a few tokens: the first round compiles the tree builder, which must not be recorded as anyone's timing."""
    engine.add([0, 1, 2], SamplingParams(max_new_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()


def _render(target: Target, spec: DecodeSpec, item: WorkItem) -> list[int]:
    prompt = Prompt(item.prompt_id, item.task, item.turns)
    return render(target.tokenizer, prompt, spec.config.system_prompt, spec.config.enable_thinking)


def _dense(
    target: Target,
    drafter: DFlashDrafter,
    num_candidates: int,
    projection: torch.Tensor | None,
    record: SequenceRecord,
) -> list[RoundRecord]:
    known = (record.sequence_id, record.prompt_token_ids, record.output_token_ids)
    return dense_rounds(target, drafter, *known, num_candidates, projection)


class _Writer:
    """Writes each unit as a new attempt of this run."""

    def __init__(self, root: str, provenance: Provenance, run_id: str) -> None:
        self._store = TrajectoryStore(root)
        self._provenance = provenance
        self._run_id = run_id

    def __call__(
        self, unit: Unit, sequences: Sequence[SequenceRecord], rounds: Sequence[RoundRecord]
    ) -> list[FileInfo]:
        key = UnitKey(unit_id=unit.unit_id, attempt=new_attempt(), run_id=self._run_id)
        return self._store.write_unit(key, self._provenance, sequences, rounds)


def _provenance(spec: DecodeSpec, models: ModelInfo, hardware: str) -> Provenance:
    return Provenance(
        target=spec.config.slug,
        target_spec=spec.config.target,
        target_fingerprint=models.target_fingerprint,
        drafter_fingerprint=models.drafter_fingerprint,
        policy=spec.policy().name,
        policy_fingerprint=spec.policy_fingerprint(),
        hardware=hardware,
        software=describe_software(),
    )
