"""The drafter that ships in the package: its files are what they are said to be, and it drafts for its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graft_dist.config import TargetConfig
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.drafter import DFlashModel, checkpoint_folder, read_config, read_tensors
from graft_dist.generate import Answer, answer_all, to_request
from graft_dist.policy import ddtree, plain
from graft_dist.prompts import Prompt, starter_prompts_path
from graft_dist.sampling import SamplingParams

SPEC = "builtin:smollm2-135m"


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint_folder(SPEC)


def test_it_is_small(folder: Path) -> None:
    assert 0 < sum(file.stat().st_size for file in folder.rglob("*")) <= 20_000_000


def test_its_tensors_are_exactly_the_models(folder: Path) -> None:
    tensors, metadata = read_tensors(folder)
    wanted = DFlashModel(read_config(folder)).state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in wanted.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() and tensor.any() for tensor in tensors.values())
    assert len(metadata["tokenizer_sha256"]) == 64
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    assert f"| {num_parameters:,} parameters, bfloat16," in (folder / "README.md").read_text(encoding="utf-8")


def test_its_config_has_the_public_layout(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = read_config(folder)
    assert fields == config.to_json(torch.bfloat16)
    assert (config.hidden_size, config.num_target_layers, config.vocab_size) == (576, 30, 49152)
    assert config.draft_depth == 7


@pytest.mark.slow
def test_it_drafts_for_the_builtin_target_and_changes_no_token() -> None:
    config = TargetConfig(target=SPEC, drafter=SPEC, dtype="float32", device="cpu", max_length=512)
    target, drafter = load_decoder(config)
    rows = [json.loads(line) for line in starter_prompts_path().read_text(encoding="utf-8").splitlines()]
    shortest = sorted((row for row in rows if row["task"] == "code"), key=lambda row: len(row["turns"][0]))[:2]
    prompts = [Prompt(row["id"], row["task"], tuple(row["turns"])) for row in shortest]
    requests = [to_request(prompt, target.tokenizer, config) for prompt in prompts]
    params = SamplingParams(max_new_tokens=32)

    def answers(num_nodes: int) -> dict[str, Answer]:
        policy = ddtree(num_nodes, config.num_candidates) if num_nodes else plain()
        engine = new_engine(config, target, drafter if num_nodes else None, policy, max_slots=2, max_budget=8)
        return {answer.request.prompt_id: answer for answer in answer_all(engine, requests, params)}

    expected, drafted = answers(0), answers(8)
    assert {name: answer.token_ids for name, answer in drafted.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    assert all(answer.error is None and len(answer.token_ids) > 10 for answer in expected.values())
    lengths = [length for answer in drafted.values() for length in answer.acceptance_lengths]
    assert sum(lengths) / len(lengths) > 1.5
