"""Dense rounds: what the drafter proposes, and what the target thinks of it, at every position of a finished sequence.

Teacher-forced: one forward of the target over the whole sequence, then the drafter's block at every output position
from its tapped features. A dense round has no tree and no timings, but there is one for each output token instead of
one for each round, at a small fraction of decoding's cost.

Letters: L tokens of the sequence, A anchors (roots), B = D + 1 block rows, D draft depth, K candidates, G kv heads, d
head size, F = taps * H features, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from graft_dist.attention import grouped_attention
from graft_dist.budget import confidences, degenerations
from graft_dist.draft_head import DraftProposal
from graft_dist.drafter import DFlashDrafter
from graft_dist.rounds import RoundRecord, projected
from graft_dist.target import Target

ANCHORS_AT_ONCE = 32
"""Bounds the memory of the drafter's blocks and of their logits over the vocabulary."""


@torch.inference_mode()
def dense_rounds(
    target: Target,
    drafter: DFlashDrafter,
    sequence_id: str,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    num_candidates: int,
    projection: torch.Tensor | None = None,
) -> list[RoundRecord]:
    """One round of kind "dense" for every output token but the last, whose continuation nobody knows.

    None, as in decoding, where the drafter's block would end beyond its `max_positions`, and where its proposal is not
    finite.

    The round at root position i (prompt included) holds the drafter's candidates for positions i+1 .. i+D,
    `followed`: the tokens that came there (fewer than D near the end), and for each of them the target's raw logits
    over the candidates and their log-sum-exp over the vocabulary, given the true tokens before. `round_index` counts
    the roots from 0. With a `projection` [H, H'] it also keeps the drafter's hidden states, see `rounds.projected`.

    Holds the logits of all output positions at once, in the model's dtype: 13 MB for 128 tokens and 49,152 words.

    """
    token_ids = [*prompt_token_ids, *output_token_ids]
    first, last = len(prompt_token_ids), len(token_ids) - 1  # roots: first .. last - 1
    end = min(last, drafter.max_positions - drafter.draft_depth)  # of the roots that can be drafted from
    if first >= end:
        return []
    positions = torch.arange(last, device=target.device)[None]
    ids = torch.tensor([token_ids[:last]], device=target.device)
    output = target.forward(ids, positions, None, None, drafter.target_layer_ids, positions[0, first:])
    logsumexp = torch.cat([rows.float().logsumexp(dim=-1) for rows in output.logits.split(ANCHORS_AT_ONCE)])
    context = drafter.model.context_key_values(output.features, positions)
    records: list[RoundRecord] = []
    for start in range(first, end, ANCHORS_AT_ONCE):
        anchors = range(start, min(start + ANCHORS_AT_ONCE, end))
        proposal = draft_blocks(drafter, context, [token_ids[anchor] for anchor in anchors], anchors, num_candidates)
        conf, degen = confidences(proposal.log_probs), degenerations(proposal.hidden)
        hidden = None if projection is None else projected(proposal.hidden, projection)
        is_usable = np.all(proposal.log_probs < np.inf, axis=(1, 2))  # also false of NaN
        for row, anchor in enumerate(anchors):
            if not is_usable[row]:
                continue
            followed = token_ids[anchor + 1 : anchor + 1 + drafter.draft_depth]
            known = slice(anchor - first, anchor - first + len(followed))
            chosen = torch.from_numpy(proposal.candidate_ids[row, : len(followed)].astype(np.int64)).to(target.device)
            records.append(
                _record(
                    sequence_id=sequence_id,
                    round_index=anchor - first,
                    context_length=anchor,
                    root_token=token_ids[anchor],
                    candidate_ids=proposal.candidate_ids[row],
                    candidate_log_probs=proposal.log_probs[row],
                    conf=float(conf[row]),
                    degen=float(degen[row]),
                    parent_logits=output.logits[known].gather(1, chosen).float().cpu().numpy(),
                    parent_logsumexp=logsumexp[known].cpu().numpy(),
                    followed=np.array(followed, np.int32),
                    hidden=None if hidden is None else hidden[row],
                )
            )
    return records


def draft_blocks(
    drafter: DFlashDrafter,
    context: Sequence[tuple[torch.Tensor, torch.Tensor]],
    root_tokens: Sequence[int],
    anchors: Sequence[int],
    num_candidates: int,
) -> DraftProposal:
    """Draft a block at each of A anchors of one sequence, each from the features before its anchor only.

    `context` holds per layer the key and value [1, G, L, d] of the sequence's features; `anchors` are in order.

    """
    config, target = drafter.config, drafter.target
    num_anchors, num_rows, width = len(anchors), drafter.block_size, anchors[-1]
    starts = torch.tensor(list(anchors), device=target.device)[:, None]
    positions = starts + torch.arange(num_rows, device=target.device)
    hidden_columns = torch.cat(
        [
            torch.arange(width, device=target.device) >= starts,
            starts.new_zeros(num_anchors, num_rows, dtype=torch.bool),
        ],
        dim=1,
    )
    mask = torch.zeros(hidden_columns.shape, dtype=target.dtype, device=target.device)
    mask = mask.masked_fill_(hidden_columns, float("-inf"))[:, None, None]
    mask = mask.expand(-1, -1, num_rows * (config.num_attention_heads // config.num_key_value_heads), -1)
    scale = config.head_dim**-0.5

    def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context_key, context_value = (part[:, :, :width].expand(num_anchors, -1, -1, -1) for part in context[index])
        keys, values = torch.cat([context_key, key], dim=2), torch.cat([context_value, value], dim=2)
        return grouped_attention(query, keys, values, mask, scale)

    tokens = torch.full((num_anchors, num_rows), config.mask_token_id, device=target.device)
    tokens[:, 0] = torch.tensor(list(root_tokens), device=target.device)
    hidden = drafter.model(target.embed(tokens), positions, attend)[:, 1:]
    return drafter.head.propose(hidden, num_candidates)


def _record(**known: Any) -> RoundRecord:
    """A dense round: no tree, no acceptance, no timings."""
    nothing = np.zeros(0, np.int32)
    return RoundRecord(
        kind="dense",
        hist=0.0,
        budget=0,
        tree_tokens=nothing,
        tree_parents=nothing,
        tree_depths=nothing,
        target_tokens=nothing,
        accepted=nothing,
        num_tokens=0,
        draft_ns=0,
        build_ns=0,
        verify_ns=0,
        commit_ns=0,
        batch_size=0,
        batch_rows=0,
        **known,
    )
