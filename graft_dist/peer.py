"""transformers' own ways to decode faster, set up for a `Reference`: what the engine's methods are measured against.

`hf` is its plain greedy `generate`, `hf-lookup` its prompt-lookup decoding, `hf-dflash` its DFlash-assisted generation
with our drafter. transformers has that drafter's architecture only under the name of one model family, whose layers are
those of every public DFlash checkpoint; two tensors go by other names there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedModel

from graft_dist.bench import DFLASH, LOOKUP, LOOKUP_TOKENS
from graft_dist.drafter import DFlashDrafter, DrafterConfig
from graft_dist.errors import PolicyError

_RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


@dataclass(frozen=True)
class Assistance:
    """What makes `generate` speculate; nothing does so by default."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # of its GenerationConfig
    model: PreTrainedModel | None = None  # that drafts


def assistance(method: str, drafter: DFlashDrafter | None) -> Assistance:
    """How transformers is to decode as the peer `method` says; `hf-dflash` needs the drafter."""
    if method == LOOKUP:
        return Assistance({"prompt_lookup_num_tokens": LOOKUP_TOKENS})
    if method == DFLASH:
        assert drafter is not None
        return Assistance({"speculation_type": "dflash"}, assistant_model(drafter))
    return Assistance()


def assistant_model(drafter: DFlashDrafter) -> PreTrainedModel:
    """The drafter's weights in transformers' own model. Raises `PolicyError` where transformers has none."""
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError as error:
        raise PolicyError(f"transformers {transformers.__version__} has no {DFLASH}: leave it out") from error
    weights = {_RENAMED.get(name, name): tensor for name, tensor in drafter.model.state_dict().items()}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**_fields(drafter.config)))
    model.load_state_dict(weights)
    return model.to(device=drafter.target.device, dtype=drafter.target.dtype).eval()  # type: ignore[no-any-return]


def _fields(config: DrafterConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
