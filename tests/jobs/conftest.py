"""A tiny target with a tiny random drafter in folders, and the configuration that names both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graft_dist.config import Resources, TargetConfig
from graft_dist.drafter import DFlashModel, DrafterConfig, save_drafter
from graft_dist.target import Target


@pytest.fixture(scope="session")
def tiny_drafter_folder(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 drafter of two layers and block 5 for `tiny_llama`."""
    config = DrafterConfig(
        hidden_size=tiny_llama.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        vocab_size=tiny_llama.vocab_size,
        block_size=5,
        num_target_layers=tiny_llama.num_layers,
        mask_token_id=0,
        target_layer_ids=(1, 4),
    )
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
