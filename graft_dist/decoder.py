"""A target with its drafter, loaded together as a configuration says: what every command and job starts with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from graft_dist.bench import DFLASH, ORACLE
from graft_dist.config import TargetConfig
from graft_dist.drafter import DFlashDrafter, checkpoint_folder
from graft_dist.engine import Engine
from graft_dist.policy import ALL_METHODS, DecodingPolicy
from graft_dist.target import Target

UNDRAFTED_METHODS = ("plain",)
"""Methods that need no drafter."""


def load_target(config: TargetConfig) -> Target:
    """Load the target alone. Raises `TargetError` with one sentence."""
    return Target.load(
        config.target,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
    )


@dataclass(frozen=True)
class LoadTimes:
    """Seconds that loading took."""

    target_s: float
    drafter_s: float  # 0 where none was loaded


def load_decoder(config: TargetConfig, *methods: str) -> tuple[Target, DFlashDrafter | None]:
    """Load the target, and its drafter when one of `methods` drafts; without `methods` both are loaded.

    Raises `TargetError` or `DrafterError` with one sentence when one of them is missing or the two do not fit.
    """
    target, drafter, _ = load_timed(config, *methods)
    return target, drafter


def load_timed(config: TargetConfig, *methods: str) -> tuple[Target, DFlashDrafter | None, LoadTimes]:
    """`load_decoder`, and what it took."""
    drafts = not methods or needs_drafter(*methods)
    if drafts:
        # A missing drafter is said before the target takes its time to load.
        checkpoint_folder(config.drafter, config.drafter_revision)
    started = time.perf_counter()
    target = load_target(config)
    loaded = time.perf_counter()
    if not drafts:
        return target, None, LoadTimes(loaded - started, 0.0)
    drafter = DFlashDrafter.load(config.drafter, target, revision=config.drafter_revision)
    return target, drafter, LoadTimes(loaded - started, time.perf_counter() - loaded)


def needs_drafter(*methods: str) -> bool:
    """Whether any of the methods drafts."""
    return any(method in (*ALL_METHODS, DFLASH, ORACLE) and method not in UNDRAFTED_METHODS for method in methods)


def new_engine(  # noqa: PLR0913 - the engine's own switches, with the configuration's limits
    config: TargetConfig,
    target: Target,
    drafter: DFlashDrafter | None,
    policy: DecodingPolicy,
    *,
    max_slots: int | None = None,
    max_budget: int | None = None,
    record: bool = False,
    projection: torch.Tensor | None = None,
    detokenize: bool = True,
) -> Engine:
    """An engine with the configuration's limits.

    `max_slots` overrides the configured number, and `max_budget`, the largest budget that any policy of this engine
    will have, the configuration's largest.
    """
    limit_bytes = None if config.memory_limit_gb is None else int(config.memory_limit_gb * 1e9)
    return Engine(
        target,
        drafter,
        policy,
        max_slots=max_slots or config.max_slots,
        max_length=min(config.max_length, target.max_position_embeddings),
        memory_limit_bytes=limit_bytes,
        max_budget=max(config.budget, *config.budgets) if max_budget is None else max_budget,
        record=record,
        projection=projection,
        detokenize=detokenize,
    )
