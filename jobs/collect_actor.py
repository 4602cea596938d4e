"""CollectActor: a `Collector` with its models, as the class that Ray runs as an actor; and the plan that it is made
from."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.decode_spec import DecodeSpec
from jobs.units import Unit
from jobs.work import Report

if TYPE_CHECKING:
    from jobs.collector import Collector


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


class CollectActor:
    """The actor: loads when asked to, works when asked to, and leaves the rest to `Collector`."""

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._loaded: tuple[Collector, ModelInfo] | None = None

    def load(self) -> WorkerInfo:
        """Load the models, once. Not done in the constructor: an actor whose constructor fails is never restarted."""
        if self._loaded is None:
            # Here and not above: the driver imports this class too, and does without transformers and the engine.
            from jobs.collector_loading import load_collector

            self._loaded = load_collector(self._plan)
        return WorkerInfo(self._loaded[1], platform.node())

    def work(self, held: Sequence[str], new: Unit | None, has_more: bool) -> Report:
        """One slice of work: see `Collector.work`."""
        from jobs.collector import FATAL_ERRORS

        self.load()
        assert self._loaded is not None
        try:
            return self._loaded[0].work(held, new, has_more)
        except FATAL_ERRORS as error:
            # The driver sees a lost worker, and the device's memory is given back with the process.
            print(f"actor {os.getpid()} ends: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
