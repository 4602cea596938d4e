"""The DFlash drafter (arXiv 2602.06036): a small block-diffusion transformer, D tokens proposed in one pass.

Owns the architecture, the public checkpoint layout, and the context cache used while decoding; how it is trained is in
`learning/drafter.py`, which calls the same `DFlashModel`.

It has no embedding and no LM head of its own. Hidden states of the target at `target_layer_ids` are fused into
*context features*, which enter every layer as keys and values; the queries are a *block*: the embedding of the root
token, then D mask tokens. Attention is bidirectional inside the block and over the whole context. Rows 1..D of the
output, through the target's LM head (`draft_head.py`), are the distributions of the next D tokens.

Letters: S slots, R context rows, B = D + 1 block rows, D draft depth, K candidates, H hidden, F = taps * H, G kv heads,
d head size, W cache width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from graft_dist.attention import grouped_attention
from graft_dist.draft_head import DraftHead, DraftProposal, read_draft_vocabulary
from graft_dist.errors import DrafterError
from graft_dist.kv_cache import SlotCache
from graft_dist.packed_linear import pack_linears

if TYPE_CHECKING:
    from graft_dist.target import Target

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer index, query [S, Q, B, d], key [S, G, B, d], value [S, G, B, d]) -> attended [S, Q, B, d]."""

RotaryTable = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [S, 1, R, d]."""

_BOOKKEEPING_KEYS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys of a Qwen3 `config.json` that do not change what the drafter computes."""


@dataclass(frozen=True)
class DrafterConfig:
    """What a public DFlash `config.json` says: Qwen3's fields, the block, and the taps."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise DrafterError(
                f"block_size is {self.block_size}; a block holds the root and at least one mask, so it is at least 2"
            )
        if not self.target_layer_ids:
            raise DrafterError("target_layer_ids is empty; the drafter needs at least one tapped layer")
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise DrafterError(f"target_layer_ids {list(self.target_layer_ids)} must be increasing without repeats")
        if min(self.target_layer_ids) < 0 or max(self.target_layer_ids) >= self.num_target_layers - 1:
            raise DrafterError(
                f"target_layer_ids {list(self.target_layer_ids)} must lie in 0..{self.num_target_layers - 2} for a "
                f"target of {self.num_target_layers} layers: what transformers returns for the last layer is taken "
                "after the final norm"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterError(f"mask_token_id {self.mask_token_id} is outside the embedding of {self.vocab_size} rows")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )

    @property
    def draft_depth(self) -> int:
        """D: how many tokens one pass proposes."""
        return self.block_size - 1

    @property
    def feature_size(self) -> int:
        """F: width of the concatenated taps that enter `fc`."""
        return len(self.target_layer_ids) * self.hidden_size

    @staticmethod
    def from_json(fields: dict[str, Any]) -> DrafterConfig:
        """Read a public `config.json`.

        Raises `DrafterError` for another kind of checkpoint, an unknown key, or a missing one.
        """
        return _config_from_json(dict(fields))

    def to_json(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """The public `config.json`: Qwen3's fields plus `block_size`, `num_target_layers` and `dflash_config`.

        `dtype` is what the weights beside it are saved in.
        """
        return {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
            "dtype": str(dtype).removeprefix("torch."),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The taps of a checkpoint that names none: one in the middle, or spread from layer 1 to L - 3 of L."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _config_from_json(fields: dict[str, Any]) -> DrafterConfig:
    architectures = fields.get("architectures") or ["DFlashDraftModel"]
    if architectures != ["DFlashDraftModel"]:
        raise DrafterError(f"the checkpoint is of kind {architectures}; only DFlashDraftModel can be loaded")
    if fields.get("model_type", "qwen3") != "qwen3":
        raise DrafterError(f"the checkpoint's model_type is {fields['model_type']!r}; DFlash drafters are 'qwen3'")
    dflash = dict(fields.pop("dflash_config", None) or {})
    rope = dict(fields.pop("rope_parameters", None) or {})
    rope_scaling = fields.pop("rope_scaling", None)
    if rope_scaling is not None or rope.get("rope_type", "default") != "default":
        raise DrafterError(f"rope scaling {rope_scaling or rope} is not supported; only plain rotary embeddings are")
    if fields.pop("use_sliding_window", False) or "sliding_attention" in fields.pop("layer_types", []):
        raise DrafterError("the drafter uses sliding-window attention, which is not supported; only full attention is")
    fields.pop("sliding_window", None)
    for key, only in (("hidden_act", "silu"), ("attention_bias", False)):
        if fields.pop(key, only) != only:
            raise DrafterError(f"the drafter's {key} must be {only!r}")
    values: dict[str, Any] = {"rope_theta": rope.get("rope_theta", fields.pop("rope_theta", None))}
    values["mask_token_id"] = dflash.pop("mask_token_id", None)
    layer_ids = dflash.pop("target_layer_ids", None)
    for key in DrafterConfig.__dataclass_fields__.keys() - {"rope_theta", "mask_token_id", "target_layer_ids"}:
        values[key] = fields.pop(key, None)
    if values["head_dim"] is None and values["hidden_size"] and values["num_attention_heads"]:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    missing = sorted(key for key, value in values.items() if value is None)
    if missing:
        raise DrafterError(f"the drafter's config.json lacks {', '.join(missing)}")
    unknown = sorted([*(fields.keys() - _BOOKKEEPING_KEYS), *(f"dflash_config.{key}" for key in dflash)])
    if unknown:
        raise DrafterError(f"the drafter's config.json has keys that this reader does not know: {', '.join(unknown)}")
    if layer_ids is None:
        layer_ids = default_target_layer_ids(values["num_target_layers"], values["num_hidden_layers"])
    return DrafterConfig(target_layer_ids=tuple(layer_ids), **values)


def rotary_table(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> RotaryTable:
    """cos and sin [S, 1, R, d] of `positions` [S, R], computed in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = _RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = _RMSNorm(config.head_dim, config.rms_norm_eps)

    def query(self, x: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
        heads = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return _rotate(self.q_norm(heads).transpose(1, 2), rotary)

    def key_value(self, x: torch.Tensor, rotary: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` [S, R, H] -> key and value, each [S, G, R, d]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return _rotate(key, rotary), value


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, index: int, block: torch.Tensor, rotary: RotaryTable, attend: Attend) -> torch.Tensor:
        normed = self.input_layernorm(block)
        query = self.self_attn.query(normed, rotary)
        attended = attend(index, query, *self.self_attn.key_value(normed, rotary))
        block = block + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashModel(nn.Module):
    """The drafter's weights, with exactly the public checkpoint's tensor names."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> RotaryTable:
        return rotary_table(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def context_key_values(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer the context's key and value [S, G, R, d] from tapped `features` [S, R, F] at `positions` [S, R].

        Context features enter as they are: no `input_layernorm`.
        """
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary(positions, context.dtype)
        return [layer.self_attn.key_value(context, rotary) for layer in self.layers]  # type: ignore[union-attr, operator]

    def forward(self, block: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Embedded `block` [S, B, H] at `positions` [S, B] -> final hidden rows [S, B, H].

        `attend` supplies the context: it gets each layer's block queries, keys and values and returns what they
        attended to.
        """
        rotary = self.rotary(positions, block.dtype)
        for index, layer in enumerate(self.layers):
            block = layer(index, block, rotary, attend)
        hidden: torch.Tensor = self.norm(block)
        return hidden


class DFlashDrafter:
    """A loaded drafter bound to its target, drafting for the live slots of an engine.

    Its context cache is a `SlotCache` of the drafter's own layers with the same slot numbers as the target's.
    """

    def __init__(
        self, model: DFlashModel, target: Target, fingerprint: str, draft_vocabulary: Sequence[int] | None = None
    ) -> None:
        check_fits(model.config, target)
        self.model = model.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        pack_linears(self.model)
        self.config = model.config
        self.target = target
        self.head = DraftHead(target, draft_vocabulary)
        self.fingerprint = fingerprint
        masks = torch.full((self.config.draft_depth,), self.config.mask_token_id, device=target.device)
        self._mask_embeddings = target.embed(masks)

    @staticmethod
    def load(spec: str, target: Target, *, revision: str | None = None) -> DFlashDrafter:
        """Load a drafter for `target` from `builtin:NAME`, a checkpoint folder, or a Hugging Face id.

        Raises `DrafterError` when there is no such checkpoint, when its tensors are not exactly the public
        layout's, or when it does not fit the target.
        """
        return load_drafter(checkpoint_folder(spec, revision), target)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def draft_depth(self) -> int:
        return self.config.draft_depth

    @property
    def max_positions(self) -> int:
        """Positions it can draft at: those its rotary embedding was made for."""
        return self.config.max_position_embeddings

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def new_cache(self, max_slots: int, max_length: int) -> SlotCache:
        """An empty context cache; `max_length` counts committed tokens, room for a block is added."""
        return SlotCache(
            num_layers=self.config.num_hidden_layers,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            max_slots=max_slots,
            max_length=max_length + 2 * self.config.block_size,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    @torch.inference_mode()
    def extend(self, cache: SlotCache, slots: Sequence[int], features: torch.Tensor, counts: Sequence[int]) -> None:
        """Append `counts[i]` rows of `features` [len(slots), R, F] to the contexts of `slots`; drafts nothing."""
        starts = torch.tensor([cache.lengths[slot] for slot in slots], device=features.device)
        rows = torch.arange(features.shape[1], device=features.device)
        positions = starts[:, None] + rows
        cache.begin(positions, int(positions.max()) + 1, slots=list(slots))
        for index, (key, value) in enumerate(self.model.context_key_values(features, positions)):
            cache.update(key, value, index)
        cache.advance(list(slots), list(counts))

    @torch.inference_mode()
    def propose(
        self,
        cache: SlotCache,
        features: torch.Tensor,
        counts: Sequence[int],
        root_tokens: Sequence[int],
        num_candidates: int,
    ) -> DraftProposal:
        """Append the newly committed rows' `features` [S, R, F] to all S live slots and draft one block for each.

        `counts[s]` of the R rows are real. Afterwards `cache.lengths[s]` is the slot's context length.
        """
        num_slots, num_rows, _ = features.shape
        device, depth = features.device, self.config.draft_depth
        lengths = torch.tensor(cache.lengths, device=device)[:, None]
        added = torch.tensor(list(counts), device=device)[:, None]
        rows = torch.arange(num_rows, device=device)[None]
        block_positions = lengths + added + torch.arange(depth + 1, device=device)
        # Padding rows land behind the block, where no mask sees them and the next write covers them.
        context_positions = torch.where(rows < added, lengths + rows, lengths + rows + depth + 1)
        width = max(cache.lengths) + num_rows + depth + 1
        cache.begin(torch.cat([context_positions, block_positions], dim=1), width)
        visible = torch.arange(width, device=device)[None] <= block_positions[:, -1:]
        mask = torch.zeros((num_slots, 1, 1, width), dtype=features.dtype, device=device)
        mask.masked_fill_(~visible[:, None, None], float("-inf"))
        packed_rows = (depth + 1) * (self.config.num_attention_heads // self.config.num_key_value_heads)
        mask = mask.expand(-1, -1, packed_rows, -1)
        context = self.model.context_key_values(features, context_positions)
        scale = self.config.head_dim**-0.5

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            context_key, context_value = context[index]
            keys, values = cache.update(
                torch.cat([context_key, key], dim=2), torch.cat([context_value, value], dim=2), index
            )
            return grouped_attention(query, keys, values, mask, scale)

        roots = self.target.embed(torch.tensor(list(root_tokens), device=device))
        block = torch.cat([roots[:, None], self._mask_embeddings.expand(num_slots, -1, -1)], dim=1)
        hidden = self.model(block, block_positions, attend)[:, 1:]
        proposal = self.head.propose(hidden, num_candidates)
        cache.advance(list(range(num_slots)), list(counts))  # last: until here a call that fails can be repeated
        return proposal


def checkpoint_folder(spec: str, revision: str | None = None) -> Path:
    """The folder behind a drafter spec; a Hugging Face id is downloaded (JSON and safetensors files only)."""
    if spec.startswith("builtin:"):
        name = spec.removeprefix("builtin:")
        folder = Path(str(resources.files("graft_dist") / "data" / "drafters" / name))
        if not (folder / "config.json").is_file():
            raise DrafterError(f"there is no built-in drafter {name!r}; name a checkpoint folder or a Hugging Face id")
        return folder
    if Path(spec).is_dir():
        return Path(spec)
    if spec.startswith((".", "/", "~")) or spec.count("/") != 1:
        raise DrafterError(f"drafter {spec!r} is neither a folder nor a Hugging Face id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(spec, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DrafterError(f"drafter {spec!r} could not be fetched from the Hugging Face hub: {reason}") from error


def load_drafter(folder: Path, target: Target) -> DFlashDrafter:
    """Load the checkpoint in `folder` for `target`; see `DFlashDrafter.load`."""
    config = read_config(folder)
    check_fits(config, target)
    tensors, metadata = read_tensors(folder)
    expected = metadata.get("tokenizer_sha256")
    if expected is not None and expected != target.tokenizer_sha256:
        raise DrafterError(
            f"the drafter in {folder} was trained with tokenizer {expected[:12]}, the target's is "
            f"{target.tokenizer_sha256[:12]}"
        )
    model = build_model(config, tensors, folder)
    vocabulary = read_draft_vocabulary(folder, target.vocab_size)
    return DFlashDrafter(model, target, fingerprint(config, tensors, vocabulary), vocabulary)


def read_config(folder: Path) -> DrafterConfig:
    """`config.json` of a checkpoint folder."""
    try:
        fields = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise DrafterError(f"{folder} holds no config.json, so it is not a DFlash checkpoint") from None
    except json.JSONDecodeError as error:
        raise DrafterError(f"{folder / 'config.json'} is not JSON: {error}") from None
    return DrafterConfig.from_json(fields)


def read_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors and the file metadata of the safetensors files in `folder`."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                metadata |= file.metadata() or {}
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except Exception as error:
            raise DrafterError(f"{path} cannot be read as safetensors: {error}") from error
    if not tensors:
        raise DrafterError(f"{folder} holds no safetensors file")
    return tensors, metadata


def build_model(config: DrafterConfig, tensors: dict[str, torch.Tensor], folder: Path) -> DFlashModel:
    """A model with exactly `tensors`; missing, unknown or misshapen ones are refused."""
    model = DFlashModel(config)
    wanted = model.state_dict()
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} is {list(tensors[name].shape)} where the config gives {list(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DrafterError(f"the tensors in {folder} do not match its config.json: {shown}")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise DrafterError(f"tensor {name} in {folder} holds values that are not finite")
    model.load_state_dict(tensors)
    return model


def check_fits(config: DrafterConfig, target: Target) -> None:
    """Refuse a drafter made for another target, with both sides' numbers."""
    pairs = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
        ("vocabulary", config.vocab_size, target.vocab_size),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise DrafterError(
                f"the drafter does not fit the target {target.spec}: its {what} is {ours}, the target's is {theirs}"
            )


def save_drafter(
    model: DFlashModel, folder: Path, *, tokenizer_sha256: str, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `model` to `folder` in the public layout, aside first, then renamed over what was there."""
    aside = folder.with_name(folder.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt", "tokenizer_sha256": tokenizer_sha256})
    (aside / "config.json").write_text(json.dumps(model.config.to_json(dtype), indent=2) + "\n")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)  # not deleted in place: a process that is killed now leaves both, whole
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def fingerprint(
    config: DrafterConfig, tensors: dict[str, torch.Tensor], draft_vocabulary: Sequence[int] | None = None
) -> str:
    """A short hash of everything that decides what is proposed: configuration, weights, draft vocabulary."""
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if draft_vocabulary is not None:
        digest.update(json.dumps(list(draft_vocabulary)).encode())
    return digest.hexdigest()[:16]
