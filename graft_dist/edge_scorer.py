"""Edge scorers: what an edge of the draft tree, from a parent to a candidate child, is worth.

Owns the interface the engine calls once per round for all slots, and the scorer that trusts the drafter alone.
Does not build trees (`draft_tree.py`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class EdgeScorer(Protocol):
    """Scores every edge a round's trees may use."""

    def score(
        self,
        root_tokens: npt.NDArray[np.int64],
        candidate_ids: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Return edge scores float32 [S, D, P, K] for S slots, D depths and K candidates, with P == 1 or P == K.

        Args:
            root_tokens: int64 [S], the last committed token of each slot.
            candidate_ids: int32 [S, D, K], distinct within a depth.
            log_probs: float32 [S, D, K], the drafter's log-probabilities of the candidates over the full vocabulary.

        Entry [s, d, p, c] is the score of candidate c of depth d+1 under candidate p of depth d (under the root at
        d == 0: row 0). P == 1 means that a child's score does not depend on its parent.
        """
        ...


class MarginalScorer:
    """DDTree's scorer (arXiv 2604.12989): an edge is worth the drafter's marginal log-probability of its child.

    `S(v) = log q_d(c)`, whatever the parent; the sum along a path is the log-probability the drafter gives the path.
    """

    def score(
        self,
        root_tokens: npt.NDArray[np.int64],
        candidate_ids: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Return `log_probs` as float32 [S, D, 1, K]: one row of scores shared by all parents."""
        return np.asarray(log_probs, dtype=np.float32)[:, :, None, :]
