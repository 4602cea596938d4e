"""The oracle: budgets chosen by what a round will turn out to be worth, which nobody knows who decodes in earnest.

A benchmark knows the answer already, since plain decoding has given it. The distance between the oracle and a budget
policy is what a better choice of budgets could still bring with the same trees (the regret, in a replay).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graft_dist.budget import AcceptanceGain, DraftState, FloatArray
from graft_dist.draft_tree import DraftTree


class KnownAnswer:
    """A gain model that has read the answer of the one sequence that is decoded: a node on its way brings one token.

    Where the sequence has left the answer (two ways to round a near tie in bfloat16) it expects what the scores say.
    """

    needs_state = False

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._unknown = AcceptanceGain()

    def tell(self, token_ids: Sequence[int]) -> None:
        """The prompt's token ids and those of its answer."""
        self._tokens = token_ids

    def marginals(self, tree: DraftTree, state: DraftState) -> FloatArray:
        """Return 1 for each node [N] that the answer goes through, and 0 for the others."""
        known = self._tokens[state.context_length :]
        if not known or known[0] != tree.tokens[0]:
            return self._unknown.marginals(tree, state)
        gains = np.zeros(tree.num_nodes)
        for node in tree.follow(known[1:]):
            gains[node - 1] = 1.0
        return gains
