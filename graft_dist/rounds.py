"""What decoding leaves behind: one record per round, one per sequence.

Records hold ids, counts and small numpy arrays, never model tensors, so that they can cross a process boundary.

Letters: N tree rows (nodes and the root), D draft depth, K candidates per depth, A accepted nodes, P recorded parents,
H' numbers that are kept of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from graft_dist.sampling import SamplingParams

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort", "error"]


def _no_tokens() -> Int32Array:
    return np.zeros(0, np.int32)


def is_mismatch(tree_tokens: Int32Array, tree_depths: Int32Array, last: int, wanted: int) -> bool:
    """Whether a walk that stopped at node `last` would have gone on under another parent: `wanted` is at that depth."""
    return bool(np.any((tree_depths == tree_depths[last] + 1) & (tree_tokens == wanted)))


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round of one sequence: what was drafted, what was verified, what the target wanted, what was kept.

    Node 0 is the root: the last committed token, at position `context_length`, whose KV row was not yet in the cache.
    Everything about acceptance is counted after trimming at a stop token or a limit: the tokens of the round are the
    accepted nodes' tokens and, unless the sequence ended inside the path, the target's token at the last of them.
    """

    sequence_id: str
    round_index: int  # 0 for the first round of the sequence
    context_length: int  # committed rows in the KV cache = position of the root
    root_token: int
    candidate_ids: Int32Array  # [D, K]; [0, K] when nothing was drafted
    candidate_log_probs: Float32Array  # [D, K], log softmax over what the drafter may propose
    conf: float  # draft confidence (0 when nothing was drafted)
    degen: float  # representation degeneration (0 when nothing was drafted)
    hist: float  # mean of the last accepted lengths (0 in the first round)
    budget: int  # number of nodes verified, root not counted
    tree_tokens: Int32Array  # [N], root included
    tree_parents: Int32Array  # [N], -1 at the root
    tree_depths: Int32Array  # [N], 0 at the root
    target_tokens: Int32Array  # [N], the target's next token at every node
    accepted: Int32Array  # [A], node indices of the accepted path, root excluded
    num_tokens: int  # acceptance length: A + 1, or A when the sequence ended inside the path
    parent_logits: Float32Array  # [P, K], P = min(A + 1, D): raw target logits at the root and each accepted node ...
    parent_logsumexp: Float32Array  # [P]          ... over the candidates of the next depth, and over the vocabulary
    draft_ns: int  # wall time of the batch's round, shared by all its sequences
    build_ns: int
    verify_ns: int
    commit_ns: int
    batch_size: int  # live slots in the round
    batch_rows: int  # rows verified in the round over all slots, padding excluded
    kind: Literal["decoded", "dense"] = "decoded"
    followed: Int32Array = field(default_factory=_no_tokens)  # [<= D], dense only: the tokens that followed the root
    hidden: Float32Array | None = None  # [D, H'], the drafter's hidden states, see `projected`; None: not recorded

    @property
    def is_finite(self) -> bool:
        """Whether every number that an edge scorer would learn from is finite."""
        columns = (self.candidate_log_probs, self.parent_logits, self.hidden)
        return all(column is None or bool(np.isfinite(column).all()) for column in columns)

    @property
    def is_mismatch(self) -> bool:
        """True if the walk stopped although the wanted token sat at that depth under another parent."""
        if self.num_tokens <= len(self.accepted) or len(self.tree_tokens) == 0:
            return False
        last = int(self.accepted[-1]) if len(self.accepted) else 0
        return is_mismatch(self.tree_tokens, self.tree_depths, last, int(self.target_tokens[last]))

    @property
    def emitted_tokens(self) -> list[int]:
        """The tokens this round committed, `num_tokens` of them."""
        if len(self.tree_tokens) == 0:
            return []
        last = int(self.accepted[-1]) if len(self.accepted) else 0
        tokens = [*self.tree_tokens[self.accepted].tolist(), int(self.target_tokens[last])]
        return tokens[: self.num_tokens]


@dataclass(frozen=True, eq=False)
class RoundTrace:
    """What a round did to one sequence, in numbers that are there anyway: every round's event carries one.

    The part of `RoundRecord` that watching a decoder needs, under the same names; learning needs the rest.
    """

    round_index: int  # 0 for the first round of the sequence
    budget: int  # number of nodes verified, root not counted
    tree_tokens: Int32Array  # [N], root included
    tree_parents: Int32Array  # [N], -1 at the root
    tree_depths: Int32Array  # [N], 0 at the root
    accepted: Int32Array  # [A], node indices of the accepted path, root excluded
    num_tokens: int  # acceptance length: A + 1, or A when the sequence ended inside the path
    is_mismatch: bool  # the walk stopped although the wanted token sat at that depth under another parent
    draft_ns: int  # wall time of the batch's round, shared by all its sequences
    build_ns: int
    verify_ns: int
    commit_ns: int
    batch_size: int  # live slots in the round
    batch_rows: int  # rows verified in the round over all slots, padding excluded


def projected(hidden: torch.Tensor, projection: torch.Tensor) -> Float32Array:
    """Return what is recorded of hidden states [.., H]: their projection [.., H'], in float16's precision.

    As float32 numbers, since few readers know float16; the bits that are zero then cost next to nothing on disk.
    """
    small = hidden.float() @ projection.to(hidden.device)
    return small.half().float().cpu().numpy()


@dataclass(frozen=True)
class SequenceSummary:
    """The counters of one finished sequence."""

    num_rounds: int
    num_drafted: int  # draft nodes verified
    num_accepted: int  # draft nodes that became output
    prefill_s: float  # the target's forwards over the prompt
    decode_s: float  # rounds the sequence took part in, drafting included; the sum of the four stages
    draft_s: float
    build_s: float
    verify_s: float
    commit_s: float


@dataclass(frozen=True)
class SequenceRecord:
    """One decoded prompt."""

    sequence_id: str
    prompt_id: str
    task: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    finish_reason: FinishReason
    sampling: SamplingParams
    seed: int | None
    num_rounds: int
    num_drafted: int
    num_accepted: int
    prefill_s: float
    decode_s: float
    error: str | None = None
