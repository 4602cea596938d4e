"""`ActivePolicy`: what decodes at the moment, whole and immutable, so that a swap is one assignment.

Per request another method may be asked for; sequences with different methods share rounds through `MethodSwitch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from graft_dist.budget import DraftState, sequence_key
from graft_dist.draft_tree import DraftTree
from graft_dist.policy import DecodingPolicy
from graft_dist.rounds import Float32Array, Int32Array


@dataclass(frozen=True)
class ActivePolicy:
    """The policy of an application, and the methods that single requests may choose instead."""

    label: str  # what people see: `v7`, `folder-0123abcd`, `ddtree`
    version: int | None  # in the registry
    fingerprint: str | None  # of the saved policy; None for one that was measured here
    policy: DecodingPolicy
    methods: Mapping[str, DecodingPolicy] = field(default_factory=dict)

    def chosen(self, method: str | None) -> DecodingPolicy:
        """What decodes a request that asked for `method`, or for none."""
        return self.policy if method is None else self.methods.get(method, self.policy)


class MethodSwitch:
    """Scorer and budget policy in one: gives every sequence of a batch what its own method gives.

    Budgets are joint among the sequences of one method. Belongs to one engine; `limits` is asked first in every round,
    in the order in which `score` and `choose` then get the slots.
    """

    def __init__(self, active: ActivePolicy) -> None:
        self._active = active
        self._chosen: dict[int, DecodingPolicy] = {}  # by sequence key, for those that chose
        self._slots: list[tuple[DecodingPolicy, list[int]]] = []  # of the round under way
        everyone = [active.policy, *active.methods.values()]
        self.needs_hidden = any(policy.scorer.needs_hidden for policy in everyone)
        self.needs_state = any(policy.budget.needs_state for policy in everyone)
        depths = [policy.max_depth for policy in everyone]
        self._num_candidates = max(policy.num_candidates for policy in everyone)
        self._max_depth = None if None in depths else max(depth for depth in depths if depth is not None)

    @property
    def policy(self) -> DecodingPolicy:
        """What the engine shall use: the application's policy itself while no sequence has chosen another.

        Made anew each time: were it kept here, the two would hold each other, and with them an old policy's tables,
        until Python looks for such circles, which in a process of so many objects it seldom does.
        """
        if not self._chosen:
            return self._active.policy
        return DecodingPolicy(self._active.policy.name, self, self, self._num_candidates, self._max_depth)

    def choose_method(self, sequence_id: str, method: str) -> None:
        """Decode a sequence with another method than the application's; one that is not there changes nothing."""
        policy = self._active.methods.get(method)
        if policy is not None:
            self._chosen[sequence_key(sequence_id)] = policy

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended."""
        self._chosen.pop(sequence_key(sequence_id), None)

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Each method's limits for its own slots."""
        groups: dict[int, tuple[DecodingPolicy, list[int]]] = {}
        for slot, state in enumerate(states):
            policy = self._chosen.get(state.sequence_key, self._active.policy)
            groups.setdefault(id(policy), (policy, []))[1].append(slot)
        self._slots = list(groups.values())
        limits = [0] * len(states)
        for policy, slots in self._slots:
            for slot, limit in zip(slots, policy.budget.limits([states[slot] for slot in slots]), strict=True):
                limits[slot] = limit
        return limits

    def score(
        self,
        root_tokens: np.ndarray,
        candidate_ids: Int32Array,
        log_probs: Float32Array,
        hidden: torch.Tensor | None = None,
    ) -> Float32Array:
        """Each method's scores for its own slots, all in the shape of the richest of them."""
        parts: list[tuple[list[int], Float32Array]] = []
        for policy, slots in self._slots:
            own_hidden = hidden[slots] if hidden is not None and policy.scorer.needs_hidden else None
            part = policy.scorer.score(root_tokens[slots], candidate_ids[slots], log_probs[slots], own_hidden)
            parts.append((slots, part))
        shape = np.broadcast_shapes(*(part.shape[1:] for _, part in parts))
        scores = np.empty((len(root_tokens), *shape), np.float32)
        for slots, part in parts:
            scores[slots] = part
        return scores

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Each method's budgets for its own slots."""
        budgets = [0] * len(trees)
        for policy, slots in self._slots:
            chosen = policy.budget.choose([trees[slot] for slot in slots], [states[slot] for slot in slots])
            for slot, budget in zip(slots, chosen, strict=True):
                budgets[slot] = budget
        return budgets
