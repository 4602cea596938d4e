"""The drafter's head: from its hidden states to the candidates of every depth and their probabilities.

It is the target's LM head, or some rows of it. Of a drafting pass for a small target that product is the larger part,
and most of its rows are tokens that hardly ever come; so a checkpoint may name those that are worth proposing, its
*draft vocabulary* (frequency-ranked as in FR-Spec, arXiv 2502.14856; EAGLE-3, arXiv 2503.01840, trains with one).
Others are never proposed: where the target wants one, the round stops there. The target decides over all tokens, so no
answer changes. Probabilities are over the draft vocabulary, so a little higher than over all tokens.

Owns the file `draft_vocabulary.json`, too, which lies beside a checkpoint's weights and which other readers of the
public layout pass over. `jobs/draft_vocabulary.py` makes one from stored answers.

Letters: S slots, D draft depth, H hidden, K candidates, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from graft_dist.errors import DrafterError

if TYPE_CHECKING:
    from graft_dist.target import Target

FILE_NAME = "draft_vocabulary.json"


@dataclass(frozen=True)
class DraftProposal:
    """What one pass of the drafter says of every slot."""

    candidate_ids: npt.NDArray[np.int32]
    """[S, D, K] the most likely tokens of each depth, most likely first."""
    log_probs: npt.NDArray[np.float32]
    """[S, D, K] their log-probabilities over the draft vocabulary."""
    hidden: torch.Tensor
    """[S, D, H] final hidden rows, on the drafter's device."""


class DraftHead:
    """The target's LM head over a draft vocabulary: rising token ids, or None for all tokens."""

    def __init__(self, target: Target, token_ids: Sequence[int] | None = None) -> None:
        self._head: Callable[[torch.Tensor], torch.Tensor] = target.lm_head
        self.token_ids: torch.Tensor | None = None
        if token_ids is not None:
            self.token_ids = torch.tensor(token_ids, device=target.device)
            self._head = target.lm_head_of(self.token_ids)

    def propose(self, hidden: torch.Tensor, num_candidates: int) -> DraftProposal:
        """Return the best `num_candidates` (or all) of every depth for final hidden rows [S, D, H]."""
        # In two dimensions: on a slice of three, matmul copies the whole weight (bf16 on a CPU: 130 ms a round).
        logits = self._head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]).float()
        top = logits.topk(min(num_candidates, logits.shape[-1]), dim=-1)
        log_probs = top.values - logits.logsumexp(dim=-1, keepdim=True)
        ids = top.indices if self.token_ids is None else self.token_ids[top.indices]
        return DraftProposal(ids.to(torch.int32).cpu().numpy(), log_probs.cpu().numpy(), hidden)


def read_draft_vocabulary(folder: Path, vocab_size: int) -> list[int] | None:
    """The draft vocabulary of the checkpoint in `folder`; None where it has none.

    Raises `DrafterError` unless it is a JSON list of rising token ids below `vocab_size`.
    """
    file = folder / FILE_NAME
    try:
        token_ids = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DrafterError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise DrafterError(f"{file} is not a list of token ids")
    if any(later <= earlier for earlier, later in pairwise(token_ids)):
        raise DrafterError(f"the token ids in {file} must rise, without repeats")
    if not (token_ids[0] >= 0 and token_ids[-1] < vocab_size):
        raise DrafterError(
            f"{file} has the token ids {token_ids[0]} to {token_ids[-1]}, the target's vocabulary is {vocab_size}"
        )
    return token_ids
