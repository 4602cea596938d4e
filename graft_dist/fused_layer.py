"""Decoder layers on a CPU in thirteen calls instead of some forty-five: norms, rotary embedding and joined products.

A round has few rows, so that each of a layer's small operators takes less time than calling it. Here the layers of the
Llama family (Llama, Mistral, Qwen2, Qwen3) keep their modules, names and weights and get another `forward`: norms and
rotary embedding are compiled functions, query, key and value are one product, gate and up another. Every number is
rounded where transformers' own layer rounds it, so that in bfloat16 norms and embeddings are the same to the last bit.

Owns that forward. Not covered: other families, quantised layers and GPUs, whose layers stay as they are.

Letters: S slots, R rows of a slot, N = S * R rows, H hidden size, Q query heads, G key/value heads, d head size,
I size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numba import njit, types
from numba.extending import overload
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from graft_dist.attention import IMPLEMENTATION, grouped_attention
from graft_dist.packed_linear import can_be_packed, packed

LAYER_TYPES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers whose `forward` this module knows; a subclass may compute something else."""

Stored = npt.NDArray[np.float32] | npt.NDArray[np.int16]
"""A tensor's numbers as compiled functions take them: float32, or the bits of bfloat16."""


def fuse_layers(layers: Sequence[nn.Module]) -> set[nn.Module]:
    """Give every decoder layer that can be fused its new `forward`; returns the linear layers that it joined.

    Those are multiplied by as parts of a product of their own and need no packed weights any more.
    """
    joined: set[nn.Module] = set()
    for layer in layers:
        if _can_be_fused(layer):
            fused = FusedForward(layer)
            layer.forward = fused  # type: ignore[method-assign]
            joined |= fused.joined
    return joined


def _can_be_fused(layer: Any) -> bool:
    if type(layer) not in LAYER_TYPES or layer.self_attn.config.hidden_act != "silu":
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return all(type(linear) is nn.Linear and can_be_packed(linear) for linear in linears)


class FusedForward:
    """The forward of one decoder layer, [S, R, H] -> [S, R, H], over modules that stay the layer's own."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._config = attention.config
        self._index: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self.joined: set[nn.Module] = set()
        self.products = (
            self._joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            self._joined([mlp.gate_proj, mlp.up_proj]),
        )
        self._query_key_value, self._gate_up = self.products
        self._num_kv_heads = attention.k_proj.out_features // attention.head_dim
        self._num_heads = attention.q_proj.out_features // attention.head_dim
        self._intermediate_size: int = mlp.gate_proj.out_features
        self._first_norm, self._eps = _norm(layer.input_layernorm)
        self._second_norm, _ = _norm(layer.post_attention_layernorm)
        self._head_norms = self._first_norm[:0], self._first_norm[:0]
        if hasattr(attention, "q_norm"):
            self._head_norms = _norm(attention.q_norm)[0], _norm(attention.k_norm)[0]

    def _joined(self, linears: Sequence[nn.Linear]) -> nn.Linear:
        """One linear layer for several with the same input; they keep their weights, as views of its own."""
        self.joined.update(linears)
        sizes = [linear.out_features for linear in linears]
        whole = nn.Linear(linears[0].in_features, sum(sizes), bias=linears[0].bias is not None, device="meta")
        for name in ("weight", "bias") if linears[0].bias is not None else ("weight",):
            joined = torch.cat([getattr(linear, name).detach() for linear in linears])
            setattr(whole, name, nn.Parameter(joined, requires_grad=False))
            for linear, part in zip(linears, joined.split(sizes), strict=True):
                setattr(linear, name, nn.Parameter(part, requires_grad=False))
        return packed(whole)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the layer's own; which computes where the model was told to use another attention, or to learn."""
        is_learning = torch.is_grad_enabled() and hidden_states.requires_grad
        if is_learning or self._config._attn_implementation != IMPLEMENTATION or position_embeddings is None:
            own: Callable[..., torch.Tensor] = type(self._layer).forward
            return own(
                self._layer,
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                cache=cache,
                **kwargs,
            )
        rows = hidden_states.flatten(0, 1)
        normed = torch.empty_like(rows)
        _normalise(_stored(rows), self._first_norm, self._eps, _stored(normed))
        query, key, value = self._heads(normed, hidden_states.shape[0], *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self._index)
        attended = grouped_attention(query, key, value, attention_mask, self._scale)
        added = self._layer.self_attn.o_proj(attended.transpose(1, 2).reshape(len(rows), -1))
        # The sum goes where its second half was.
        _add_and_normalise(_stored(rows), self._second_norm, self._eps, _stored(added), _stored(normed))
        gate, up = self._gate_up(normed).split(self._intermediate_size, dim=-1)
        result: torch.Tensor = self._layer.mlp.down_proj(F.silu(gate).mul_(up)).add_(added)
        return result.view(hidden_states.shape)

    def _heads(
        self, normed: torch.Tensor, num_slots: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [S, Q, R, d], key and value [S, G, R, d] of normed rows [N, H]; the first two are rotated."""
        num_rows = len(normed) // num_slots
        query = normed.new_empty(num_slots, self._num_heads, num_rows, self._head_dim)
        key, value = normed.new_empty(2, num_slots, self._num_kv_heads, num_rows, self._head_dim)
        table = _stored(cos.expand(num_slots, -1, -1)), _stored(sin.expand(num_slots, -1, -1))
        joined = _stored(self._query_key_value(normed))
        _rotate(joined, table, self._head_norms, self._eps, _stored(query), _stored(key), _stored(value))
        return query, key, value


def _norm(norm: Any) -> tuple[Stored, np.float32]:
    return _stored(norm.weight.detach()), np.float32(norm.variance_epsilon)


def _stored(tensor: torch.Tensor) -> Stored:
    """The tensor's own memory for a compiled function."""
    array: Stored = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


# ---- compiled


def _number(stored: Any) -> np.float32:
    """A stored number as float32."""
    raise NotImplementedError


def _rounded(number: np.float32, like: Any) -> Any:
    """A float32 number as it is stored: rounded to bfloat16 (to even, NaN stays NaN) where `like` is bits of that."""
    raise NotImplementedError


# numba compares the annotations of an overload with those of what it returns.


@overload(_number)
def _number_of(stored: Any) -> Any:
    def same(stored: Any) -> Any:
        return stored

    def from_bits(stored: Any) -> Any:
        return np.int32(np.int32(stored) << np.int32(16)).view(np.float32)

    return same if isinstance(stored, types.Float) else from_bits


@overload(_rounded)
def _rounded_like(number: Any, like: Any) -> Any:
    def same(number: Any, like: Any) -> Any:
        return np.float32(number)

    def to_bits(number: Any, like: Any) -> Any:
        bits = np.float32(number).view(np.int32)
        rounded = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
        return np.int16(rounded) if number == number else np.int16(0x7FC0)

    return same if isinstance(like, types.Float) else to_bits


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _normalise(rows: Stored, weight: Stored, eps: np.float32, normed: Stored) -> None:
    """RMSNorm of rows [N, H]: rounded before the weight and after it, as transformers does."""
    num_rows, size = rows.shape
    for row in range(num_rows):
        total = np.float32(0.0)
        for at in range(size):
            number = _number(rows[row, at])
            total += number * number
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for at in range(size):
            scaled = _number(_rounded(_number(rows[row, at]) * scale, rows[row, at]))
            normed[row, at] = _rounded(_number(weight[at]) * scaled, rows[row, at])


@njit(cache=True)
def _add_and_normalise(rows: Stored, weight: Stored, eps: np.float32, sums: Stored, normed: Stored) -> None:
    """Add rows [N, H] to `sums`, and write the norm of that to `normed`."""
    num_rows, size = rows.shape
    for row in range(num_rows):
        for at in range(size):
            sums[row, at] = _rounded(_number(rows[row, at]) + _number(sums[row, at]), rows[row, at])
    _normalise(sums, weight, eps, normed)


@njit(cache=True)
def _rotate(
    joined: Stored,
    table: tuple[Stored, Stored],
    norms: tuple[Stored, Stored],
    eps: np.float32,
    query: Stored,
    key: Stored,
    value: Stored,
) -> None:
    """Take rows [N, (Q + 2 G) * d] apart into query [S, Q, R, d], key and value [S, G, R, d].

    The first two are rotated by `table` (cos and sin, [S, R, d]), before which each head is normalised where `norms`
    has a weight [d] for it. Products and their sum are rounded each, as transformers does.
    """
    num_slots, num_heads, num_rows, size = query.shape
    num_kv_heads = key.shape[1]
    cos, sin = table
    for slot in range(num_slots):
        for at in range(num_rows):
            heads = joined[slot * num_rows + at].reshape((num_heads + 2 * num_kv_heads, size))
            queries, keys = heads[:num_heads], heads[num_heads : num_heads + num_kv_heads]
            if len(norms[0]):
                _normalise(queries, norms[0], eps, queries)
                _normalise(keys, norms[1], eps, keys)
            for head in range(num_heads):
                _rotate_head(queries[head], cos[slot, at], sin[slot, at], query[slot, head, at])
            for head in range(num_kv_heads):
                _rotate_head(keys[head], cos[slot, at], sin[slot, at], key[slot, head, at])
                value[slot, head, at] = heads[num_heads + num_kv_heads + head]


@njit(cache=True)
def _rotate_head(head: Stored, cos: Stored, sin: Stored, rotated: Stored) -> None:
    """x * cos + rotate_half(x) * sin of one head [d], where rotate_half([a, b]) is [-b, a]."""
    half = len(head) // 2
    for place in range(half):
        first, second = _number(head[place]), _number(head[half + place])
        rotated[place] = _turned(first, cos[place], -second, sin[place])
        rotated[half + place] = _turned(second, cos[half + place], first, sin[half + place])


@njit(cache=True)
def _turned(kept: np.float32, cos: Any, turned: np.float32, sin: Any) -> Any:
    kept, turned = _rounded(kept * _number(cos), cos), _rounded(turned * _number(sin), cos)
    return _rounded(_number(kept) + _number(turned), cos)
