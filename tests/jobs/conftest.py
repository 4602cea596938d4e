"""A tiny target with a tiny random drafter in folders, and the configuration that names both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch

from graft_dist.config import Resources, TargetConfig
from graft_dist.drafter import DFlashModel, save_drafter
from graft_dist.target import Target
from jobs.ray_head import RayHead
from tests.conftest import tiny_drafter_config


@pytest.fixture(scope="session")
def tiny_drafter_folder(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 drafter of two layers and block 5 for `tiny_llama`."""
    config = tiny_drafter_config(tiny_llama)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-drafter") / "drafter"
    save_drafter(DFlashModel(config), folder, tokenizer_sha256=tiny_llama.tokenizer_sha256, dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: Callable[[str], Path], tiny_drafter_folder: Path) -> TargetConfig:
    return TargetConfig(
        target=str(tiny_folder("llama")),
        drafter=str(tiny_drafter_folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_length=256,
        max_slots=3,
        num_candidates=4,
        budget=6,
        budgets=(4, 6),
        resources=Resources(num_cpus=0.2),
    )


@pytest.fixture
def joinable(ray_head: RayHead, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster that commands in this process may join; it is left in the end."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as the head has it
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # two seconds by default, at every turn of a run
    yield ray_head.address
    ray.shutdown()
