"""Fused layers compute what transformers' own layers do, rounded at the same places, and change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from graft_dist.attention import IMPLEMENTATION, transformers_attention
from graft_dist.fused_layer import FusedForward, _normalise, _rotate, _stored, fuse_layers
from graft_dist.kv_cache import SlotCache
from graft_dist.packed_linear import pack_linears
from graft_dist.target import tree_mask
from tests.conftest import PACKED_DTYPES, tiny_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # over eight layers


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    AttentionInterface.register(IMPLEMENTATION, transformers_attention)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, 96, **overrides), attn_implementation=IMPLEMENTATION)
    for name, weight in model.named_parameters():
        if "norm" in name:  # as made they are all 1
            nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(dtype).eval().requires_grad_(False)


def fused(model: Any) -> Any:
    decoder = model.get_decoder()
    pack_linears(model, but=fuse_layers(decoder.layers))
    return model


def verified(model: Any, dtype: torch.dtype) -> torch.Tensor:
    """The last layer's output for two slots of seven and five committed rows, each with a tree of three nodes."""
    config = model.config
    cache = SlotCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, 2, 32, dtype)
    generator = torch.Generator().manual_seed(1)
    decoder, groups = model.get_decoder(), config.num_attention_heads // config.num_key_value_heads

    def run(ids: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden: torch.Tensor = decoder(
            input_ids=ids, position_ids=rows, attention_mask=mask, cache=cache, use_cache=True
        ).last_hidden_state
        return hidden

    with torch.no_grad():
        for length in (7, 5):
            slot = cache.add()
            rows = torch.arange(length)[None]
            cache.begin(rows, length, slots=[slot])
            run(torch.randint(96, (1, length), generator=generator), rows, None)
            cache.advance([slot], [length])
        seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
        lengths = torch.tensor([[7], [5]])
        cache.begin(lengths + torch.arange(4), 11)
        mask = tree_mask([7, 5], seen.expand(2, 4, 4).numpy(), 11, dtype, torch.device("cpu"), groups)
        positions = lengths + torch.tensor([0, 1, 1, 2])
        return run(torch.randint(96, (2, 4), generator=generator), positions, mask)


@PACKED_DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_computes_what_transformers_does(family: str, dtype: torch.dtype) -> None:
    model = fused(tiny_model(family, dtype))
    assert all(isinstance(layer.forward, FusedForward) for layer in model.get_decoder().layers)
    expected, found = verified(tiny_model(family, dtype), dtype), verified(model, dtype)
    torch.testing.assert_close(found, expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])


@pytest.mark.parametrize("num_rows", [1, 9])
def test_norms_are_the_same_to_the_last_bit(num_rows: int) -> None:
    norm = LlamaRMSNorm(576, eps=1e-5).bfloat16().requires_grad_(False)
    nn.init.normal_(norm.weight)
    rows = torch.randn(num_rows, 576).mul_(3).bfloat16()
    found = torch.empty_like(rows)
    _normalise(_stored(rows), _stored(norm.weight), 1e-5, _stored(found))
    assert torch.equal(found, norm(rows))


def test_rotary_embeddings_are_the_same_to_the_last_bit() -> None:
    num_slots, num_rows, size = 2, 3, 16
    joined = torch.randn(num_slots * num_rows, (4 + 2 + 2) * size).bfloat16()
    angles = torch.randn(num_slots, num_rows, size // 2)
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    heads = joined.view(num_slots, num_rows, 8, size).transpose(1, 2)
    expected = [*apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cos, sin), heads[:, 6:]]
    found = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in expected]
    none = _stored(torch.empty(0).bfloat16())
    _rotate(_stored(joined), (_stored(cos), _stored(sin)), (none, none), 1e-5, *map(_stored, found))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@PACKED_DTYPES
def test_numbers_that_are_not_finite_stay_visible(dtype: torch.dtype, wrong: float) -> None:
    rows = torch.randn(2, 8).to(dtype)
    rows[1, 3] = wrong
    found = torch.empty_like(rows)
    _normalise(_stored(rows), _stored(torch.ones(8).to(dtype)), 1e-5, _stored(found))
    assert found[0].isfinite().all() and not found[1].isfinite().all()


def test_modules_names_and_weights_stay_and_nothing_is_kept_twice() -> None:
    plain, model = tiny_model("llama"), fused(tiny_model("llama"))
    states = plain.state_dict(), model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    attention = model.get_decoder().layers[0].self_attn
    bases = {linear.weight.untyped_storage().data_ptr() for linear in (attention.q_proj, attention.v_proj)}
    assert len(bases) == 1
    assert type(attention.q_proj) is nn.Linear and type(attention.o_proj) is not nn.Linear


def test_the_models_own_layers_compute_with_another_attention_and_for_learning() -> None:
    plain, model = tiny_model("llama"), fused(tiny_model("llama"))
    for each in (plain, model):
        each.set_attn_implementation("eager")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected, found = plain(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for each in (plain, model):
        each.set_attn_implementation(IMPLEMENTATION)
    inputs = [torch.ones(1, 9, plain.config.hidden_size, requires_grad=True) for _ in range(2)]
    for each, own in zip((plain, model), inputs, strict=True):
        each(inputs_embeds=own, use_cache=False).logits.sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is not None
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-4)


def test_what_is_not_known_stays_as_it_is() -> None:
    mixture = tiny_model("qwen3_moe")
    other_activation = tiny_model("llama", hidden_act="gelu")
    adapted = tiny_model("llama")
    for layer in adapted.get_decoder().layers:
        layer.mlp.up_proj = nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)
    for model in (mixture, other_activation, adapted):
        assert fuse_layers(model.get_decoder().layers) == set()
        assert not any(isinstance(layer.forward, FusedForward) for layer in model.get_decoder().layers)
