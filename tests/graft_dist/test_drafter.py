"""The drafter: its checkpoint layout, what it refuses, and its drafting with a context cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft_dist.drafter import (
    DFlashDrafter,
    DFlashModel,
    DrafterConfig,
    check_fits,
    default_target_layer_ids,
    fingerprint,
    load_drafter,
    read_config,
    save_drafter,
)
from graft_dist.errors import DrafterError
from graft_dist.target import Target


def tiny_drafter_config(target: Target, **changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": target.vocab_size,
        "block_size": 5,
        "num_target_layers": target.num_layers,
        "mask_token_id": 0,
        "target_layer_ids": (1, 3, 6),
    }
    return DrafterConfig(**(fields | changes))


def tiny_model(target: Target, seed: int = 0, **changes: Any) -> DFlashModel:
    torch.manual_seed(seed)
    model = DFlashModel(tiny_drafter_config(target, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def checkpoint(tiny_llama: Target, tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    model = tiny_model(tiny_llama)
    save_drafter(model, folder, tokenizer_sha256=tiny_llama.tokenizer_sha256, dtype=torch.float32)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def test_the_checkpoint_has_exactly_the_public_names(checkpoint: Path) -> None:
    names = set(load_file(checkpoint / "model.safetensors"))
    per_layer = {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    per_layer |= {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    per_layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert names == expected | {f"layers.{i}.{name}" for i in range(2) for name in per_layer}
    fields = json.loads((checkpoint / "config.json").read_text())
    assert fields["dflash_config"] == {"mask_token_id": 0, "target_layer_ids": [1, 3, 6]}
    assert (fields["block_size"], fields["num_target_layers"], fields["model_type"]) == (5, 8, "qwen3")


def test_saving_and_loading_keep_everything(tiny_llama: Target, checkpoint: Path) -> None:
    drafter = load_drafter(checkpoint, tiny_llama)
    again = tiny_model(tiny_llama)
    assert drafter.config == again.config
    assert drafter.fingerprint == fingerprint(again.config, again.state_dict())
    for name, tensor in again.state_dict().items():
        assert torch.equal(drafter.model.state_dict()[name], tensor)
    assert not list(checkpoint.parent.glob("*.writing"))


def test_a_checkpoint_is_there_whole_whenever_saving_is_cut_short(
    tiny_llama: Target, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_file(checkpoint / "model.safetensors")
    renamed: list[tuple[Path, Path]] = []

    def stop_at_the_second(source: Path, destination: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append((source, destination))
        os.rename(source, destination)
        return destination

    monkeypatch.setattr(Path, "rename", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(tiny_model(tiny_llama, seed=7), checkpoint, tokenizer_sha256=tiny_llama.tokenizer_sha256)
    kept = load_file(renamed[0][1] / "model.safetensors")
    assert renamed[0][0] == checkpoint and all(torch.equal(kept[name], before[name]) for name in before)
    monkeypatch.undo()
    save_drafter(tiny_model(tiny_llama, seed=7), checkpoint, tokenizer_sha256=tiny_llama.tokenizer_sha256)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == [checkpoint.name]
    load_drafter(checkpoint, tiny_llama)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_says_what_the_weights_are_saved_in(tiny_llama: Target, tmp_path: Path, dtype: torch.dtype) -> None:
    save_drafter(tiny_model(tiny_llama), tmp_path / "d", tokenizer_sha256=tiny_llama.tokenizer_sha256, dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "d" / "model.safetensors").values()} == {dtype}
    said = json.loads((tmp_path / "d" / "config.json").read_text())["dtype"]
    assert isinstance(said, str) and getattr(torch, said) is dtype
    assert read_config(tmp_path / "d") == tiny_drafter_config(tiny_llama)


def test_a_public_config_with_bookkeeping_keys_is_read(tiny_llama: Target, checkpoint: Path) -> None:
    edit_config(
        checkpoint,
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        torch_dtype="bfloat16",
        transformers_version="4.57.1",
        max_window_layers=5,
        bos_token_id=1,
    )
    assert read_config(checkpoint) == tiny_drafter_config(tiny_llama)
    edit_config(checkpoint, dflash_config={"mask_token_id": 0})
    assert read_config(checkpoint).target_layer_ids == default_target_layer_ids(8, 2)


def test_default_taps() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30, 1) == (15,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "only DFlashDraftModel"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"block_size": ...}, "lacks block_size"),
        ({"num_draft_heads": 3}, "num_draft_heads"),
        ({"dflash_config": {"mask_token_id": 0, "shift_label": True}}, "dflash_config.shift_label"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks mask_token_id"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1]}}, "320 is outside the embedding of 320"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 7]}}, "0..6"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"block_size": 1}, "at least 2"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_configs_of_another_kind_are_refused(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(DrafterError, match=message):
        read_config(checkpoint)


def test_tensors_must_match_the_config(tiny_llama: Target, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    for wrong, message in (
        ({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, "missing fc.weight"),
        (tensors | {"markov.weight": torch.ones(2)}, "unknown markov.weight"),
        (tensors | {"fc.weight": torch.ones(32, 5)}, r"fc.weight is \[32, 5\] where the config gives \[32, 96\]"),
        (tensors | {"norm.weight": torch.full((32,), float("nan"))}, "norm.weight .* not finite"),
    ):
        save_file(wrong, path)
        with pytest.raises(DrafterError, match=message):
            load_drafter(checkpoint, tiny_llama)
    path.write_bytes(b"\x00" * 10)
    with pytest.raises(DrafterError, match="cannot be read as safetensors"):
        load_drafter(checkpoint, tiny_llama)
    path.unlink()
    with pytest.raises(DrafterError, match="no safetensors file"):
        load_drafter(checkpoint, tiny_llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size is 64, the target's is 32"),
        ({"num_target_layers": 12}, "number of target layers is 12, the target's is 8"),
        ({"vocab_size": 400}, "vocabulary is 400, the target's is 320"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tiny_llama: Target, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        check_fits(tiny_drafter_config(tiny_llama, **changes), tiny_llama)


def test_a_drafter_of_another_tokenizer_is_refused(tiny_llama: Target, tmp_path: Path) -> None:
    save_drafter(tiny_model(tiny_llama), tmp_path / "d", tokenizer_sha256="0" * 64)
    with pytest.raises(DrafterError, match="tokenizer 000000000000"):
        load_drafter(tmp_path / "d", tiny_llama)


@pytest.mark.parametrize("spec", ["./nowhere", "no-such-thing", "builtin:no-such-thing"])
def test_a_checkpoint_that_is_not_there_is_one_sentence(tiny_llama: Target, spec: str) -> None:
    with pytest.raises(DrafterError, match=spec.removeprefix("builtin:")):
        DFlashDrafter.load(spec, tiny_llama)


def features_of(target: Target, drafter: DFlashDrafter, tokens: torch.Tensor) -> torch.Tensor:
    return target.read(tokens, drafter.target_layer_ids, 0).features


def test_drafting_in_steps_equals_drafting_at_once(tiny_llama: Target) -> None:
    """Context appended over several rounds, in slots of different length, gives the blocks of a fresh context."""
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "test")
    torch.manual_seed(1)
    sequences = [torch.randint(tiny_llama.vocab_size, (length,)) for length in (40, 25, 33)]
    features = [features_of(tiny_llama, drafter, tokens) for tokens in sequences]
    cache = drafter.new_cache(max_slots=3, max_length=64)
    starts = [10, 3, 8]
    for slot, start in enumerate(starts):
        cache.add()
        drafter.extend(cache, [slot], features[slot][:, :start], [start])
    at = list(starts)
    for counts in ([1, 4, 2], [5, 1, 1], [2, 2, 4]):
        rows = torch.zeros(3, max(counts), drafter.config.feature_size)
        for slot, count in enumerate(counts):
            rows[slot, :count] = features[slot][0, at[slot] : at[slot] + count]
            at[slot] += count
        roots = [int(sequences[slot][at[slot]]) for slot in range(3)]
        proposal = drafter.propose(cache, rows, counts, roots, num_candidates=6)
        assert cache.lengths == at
        for slot in range(3):
            fresh = drafter.new_cache(max_slots=1, max_length=64)
            fresh.add()
            alone = drafter.propose(fresh, features[slot][:, : at[slot]], [at[slot]], [roots[slot]], num_candidates=6)
            np.testing.assert_array_equal(proposal.candidate_ids[slot], alone.candidate_ids[0])
            np.testing.assert_allclose(proposal.log_probs[slot], alone.log_probs[0], atol=1e-4)
            torch.testing.assert_close(proposal.hidden[slot], alone.hidden[0], atol=1e-4, rtol=1e-4)


def test_candidates_are_the_most_likely_tokens_in_order(tiny_llama: Target) -> None:
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "test")
    cache = drafter.new_cache(max_slots=1, max_length=64)
    cache.add()
    features = features_of(tiny_llama, drafter, torch.arange(12))
    proposal = drafter.propose(cache, features, [12], [7], num_candidates=4)
    expected = tiny_llama.lm_head(proposal.hidden).log_softmax(dim=-1).sort(dim=-1, descending=True)
    assert proposal.candidate_ids.shape == (1, drafter.draft_depth, 4)
    np.testing.assert_array_equal(proposal.candidate_ids, expected.indices[..., :4].numpy())
    np.testing.assert_allclose(proposal.log_probs, expected.values[..., :4].numpy(), atol=1e-5)


def test_the_root_and_the_taps_matter(tiny_llama: Target) -> None:
    """Slot 0 of the block is the root's embedding, and features come from the configured layers."""
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "test")
    tokens = torch.arange(12)
    hidden = []
    for root, taps in ((7, (1, 3, 6)), (8, (1, 3, 6)), (7, (0, 3, 6))):
        cache = drafter.new_cache(max_slots=1, max_length=64)
        cache.add()
        features = tiny_llama.read(tokens, taps, 0).features
        hidden.append(drafter.propose(cache, features, [12], [root], num_candidates=4).hidden)
    assert not torch.allclose(hidden[0], hidden[1], atol=1e-3)
    assert not torch.allclose(hidden[0], hidden[2], atol=1e-3)


def test_config_is_frozen_and_round_trips(tiny_llama: Target) -> None:
    config = tiny_drafter_config(tiny_llama)
    assert DrafterConfig.from_json(config.to_json()) == config
    assert replace(config, block_size=9).draft_depth == 8
