"""Budgets: how many draft nodes a round verifies for each slot.

Owns the state a choice may look at, how its parts are computed, and the budget policies that need no fitting. A
policy is asked twice per round: for an upper bound before anything is drafted, and for the budget proper once the
trees are there.

Dimension letters: S slots, D draft depth, K candidates per depth, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from graft_dist.counter_random import hash_counters
from graft_dist.draft_tree import DraftTree
from graft_dist.errors import PolicyError

HISTORY_WINDOW = 8
"""Rounds that the acceptance history looks back on."""

NO_LIMIT = 2**31 - 1
"""A budget that never binds: the tree is limited by its depth, its candidates and the room left."""


@dataclass(frozen=True)
class DraftState:
    """What is known about one slot before its budget is chosen (section 6 of the GRAFT paper, arXiv 2608.20375)."""

    conf: float  # draft confidence, see `confidence`; 0 where nothing has been drafted yet
    degen: float  # representation degeneration, see `degeneration`; 0 where nothing has been drafted yet
    hist: float  # acceptance history, see `acceptance_history`; 0 before a sequence's first round
    context_length: int  # committed rows in the KV cache
    max_budget: int  # nodes there is room for
    sequence_key: int  # stable number of the sequence, for draws that must be reproducible
    round_index: int  # 0 in a sequence's first round


def sequence_key(sequence_id: str) -> int:
    """Return the 64-bit number that stands for a sequence in draws, the same when its rounds are replayed."""
    return int.from_bytes(hashlib.sha256(sequence_id.encode()).digest()[:8], "big")


class BudgetPolicy(Protocol):
    """Chooses how many nodes to verify. `states[i]` and `trees[i]` belong to the same slot."""

    @property
    def needs_state(self) -> bool:
        """Whether `choose` reads `conf` and `degen`, which cost the engine a little to compute."""
        ...

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return, before drafting, the most nodes each slot's tree may get; 0 means: do not draft for this slot.

        `conf` and `degen` are 0 in these states, for drafting has not happened yet.
        """
        ...

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the number of nodes to verify for each slot, at most `trees[i].num_nodes`."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """The same budget in every round (DDTree's rule), as far as there is room."""

    budget: int

    needs_state = False

    def __post_init__(self) -> None:
        _check_budgets([self.budget])

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return the budget, or the room left where that is smaller."""
        return [max(0, min(self.budget, state.max_budget)) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the whole trees: their limit was the budget."""
        return [min(tree.num_nodes, limit) for tree, limit in zip(trees, self.limits(states), strict=True)]


@dataclass(frozen=True)
class ExploringBudget:
    """A budget drawn anew for every round from a list, so that recorded rounds identify gain and cost by budget.

    The draw is a hash of (seed, sequence, round): a repeated run draws the same budgets, whatever shares the batch.
    """

    budgets: tuple[int, ...]
    seed: int

    needs_state = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(self.budgets))
        if not self.budgets:
            raise PolicyError("exploring needs at least one budget to draw from")
        _check_budgets(self.budgets)

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return each slot's draw, or the room left where that is smaller."""
        return [max(0, min(self._draw(state), state.max_budget)) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the whole trees: their limit was the draw."""
        return [min(tree.num_nodes, limit) for tree, limit in zip(trees, self.limits(states), strict=True)]

    def _draw(self, state: DraftState) -> int:
        number = hash_counters(self.seed, state.sequence_key, state.round_index)
        return self.budgets[number % len(self.budgets)]


def confidence(top1_log_probs: npt.NDArray[np.floating]) -> float:
    """Return `conf = mean over d of q_d(top-1)` from the top-1 log-probabilities [D]; 0.0 when D is 0."""
    return float(confidences(np.asarray(top1_log_probs)[None, :, None])[0])


def confidences(log_probs: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the draft confidence of each slot, float64 [S], from the candidates' log-probabilities [S, D, K]."""
    num_slots, depth, num_candidates = log_probs.shape
    if depth * num_candidates == 0:
        return np.zeros(num_slots)
    return np.exp(log_probs.max(axis=2).astype(np.float64)).mean(axis=1)


def degeneration(hidden: torch.Tensor | npt.NDArray[np.floating]) -> float:
    """Return the representation degeneration of one slot from the drafter's hidden states [D, H].

    `r_d = cos(h_d, h_{d+1})` for d = 1..D-1 and `degen = mean_d r_d + (r_{D-1} - r_1)`; 0.0 when D < 2.
    """
    return float(degenerations(torch.as_tensor(hidden)[None])[0])


def degenerations(hidden: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return `degeneration` of each slot, float64 [S], from hidden states [S, D, H] on any device, in any dtype."""
    if hidden.shape[1] < 2:
        return np.zeros(hidden.shape[0])
    states = hidden.float()
    cosines = torch.nn.functional.cosine_similarity(states[:, :-1], states[:, 1:], dim=-1)
    return (cosines.mean(dim=1) + cosines[:, -1] - cosines[:, 0]).double().cpu().numpy()


def acceptance_history(acceptance_lengths: Sequence[int], window: int = HISTORY_WINDOW) -> float:
    """Return `hist`: the mean of the last `window` acceptance lengths (bonus token included); 0.0 when there is none.

    0.0 cannot be taken for a measured value, since every round commits at least one token.
    """
    recent = acceptance_lengths[-window:]
    return sum(recent) / len(recent) if len(recent) > 0 else 0.0


def _check_budgets(budgets: Sequence[int]) -> None:
    for budget in budgets:
        if budget < 0:
            raise PolicyError(f"a budget must be at least 0 nodes, not {budget}")
