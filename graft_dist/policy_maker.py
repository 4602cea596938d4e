"""Decoding policies of named methods for a loaded target and drafter: what every command asks for by a method's name.

What a method needs besides its name is found here, once: the learned policy's scorer, and the cost of rounds, which is
the caller's, else the learned policy's own of this hardware, else measured; those of a batch are always measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from graft_dist.budget import FixedBudget, UtilityBudget
from graft_dist.cost_curve import BatchCostCurve, CostCurve
from graft_dist.cost_probe import measure_cost
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import EdgeScorer
from graft_dist.errors import PolicyError
from graft_dist.oracle import KnownAnswer
from graft_dist.policy import COSTED_METHODS, LEARNED_METHODS, DecodingPolicy, GraftPolicy, policy_for
from graft_dist.target import Target

_BATCH_LIMIT_S = 60.0
"""For measuring a batch, whose rounds are as many times longer as it has rows."""


class PolicyMaker:
    """Makes policies by method; each call gives a fresh one, with running averages of its own.

    Args:
        target: the loaded target.
        drafter: its drafter; None where only plain decoding is asked for.
        num_candidates: candidates per depth for methods that are not learned.
        learned: the learned policy; needed for `LEARNED_METHODS`, and refused here if it does not fit.
        cost: what rounds cost; None lets it be found when a method needs it.
        num_slots: sequences that will be decoded together.
        say: is told when costs are measured, which takes seconds.

    Raises:
        PolicyError: `learned` was fitted with another target or drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlashDrafter | None,
        num_candidates: int,
        *,
        learned: GraftPolicy | None = None,
        cost: CostCurve | None = None,
        num_slots: int = 1,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if learned is not None:
            # Plain decoding has no drafter, and needs none to be compared with methods that have one.
            learned.check(target.fingerprint, learned.drafter_fingerprint if drafter is None else drafter.fingerprint)
        self._target, self._drafter = target, drafter
        self._num_candidates, self._num_slots = num_candidates, num_slots
        self._learned, self._cost, self._say = learned, cost, say

    def make(self, method: str, budget: int | None) -> DecodingPolicy:
        """Return the policy of a method; `budget` as for `policy_for`, for "graft" the most nodes of a tree.

        Raises:
            PolicyError: an unknown method, or one that lacks something.
        """
        if method not in LEARNED_METHODS:
            cost = self.cost if method in COSTED_METHODS else None
            return policy_for(method, budget=budget, num_candidates=self._num_candidates, cost=cost)
        learned = self._known_policy(method)
        if method == "graft-fixed":
            if budget is None:
                raise PolicyError(f"method {method!r} needs a budget: the number of draft nodes to verify per round")
            return DecodingPolicy(method, self._scorer, FixedBudget(budget), learned.num_candidates)
        if budget is not None and learned.fixed_budget is None:
            learned = replace(learned, max_budget=budget)
        cost = None if learned.kind == "fixed" else self.cost
        return DecodingPolicy(method, self._scorer, learned.budget_policy(cost), learned.num_candidates)

    def oracle(self, answer: KnownAnswer, budget: int) -> DecodingPolicy:
        """The learned policy's trees of at most `budget` nodes, with budgets that know the answer. Raises as `make`.

        Every round is drafted: whether to rest is judged by past rounds, which know nothing of this answer.
        """
        learned = self._known_policy("oracle")
        chosen = UtilityBudget(answer, self.cost, budget, "price", may_rest=False)
        return DecodingPolicy("oracle", self._scorer, chosen, learned.num_candidates)

    @cached_property
    def cost(self) -> CostCurve:
        """What rounds cost here: given, known to the learned policy, or measured now."""
        if self._cost is not None:
            return self._cost
        if self._learned is not None and self._num_slots == 1:
            known = self._learned.cost_curve(self._target.dtype_name, self._target.device)
            if known is not None:
                return known
        if self._drafter is None:
            raise PolicyError("what rounds cost cannot be measured without a drafter")
        if self._num_slots > 1:
            return self._batch_cost(self._drafter)
        self._say("measuring what rounds cost on this machine, which no policy knows")
        return measure_cost(self._target, self._drafter, num_candidates=self._num_candidates)

    def _batch_cost(self, drafter: DFlashDrafter) -> BatchCostCurve:
        """Both ends measured one after the other: a policy's curve is of another day, and of contexts of its own."""
        self._say(f"measuring what rounds of one sequence and of {self._num_slots} cost on this machine")
        alone = measure_cost(self._target, drafter, num_candidates=self._num_candidates)
        together = measure_cost(
            self._target,
            drafter,
            num_candidates=self._num_candidates,
            limit_s=_BATCH_LIMIT_S,
            num_slots=self._num_slots,
        )
        source = f"{alone.source}; {together.source}"
        return BatchCostCurve(alone.budgets, alone.round_ms, source, num_slots=self._num_slots, together=together)

    @cached_property
    def _scorer(self) -> EdgeScorer:
        """Scorers have no running state, so that all policies share the tables."""
        assert self._learned is not None
        return self._learned.scorer(self._target.embedding_weight)

    def _known_policy(self, method: str) -> GraftPolicy:
        if self._learned is None:
            raise PolicyError(f"method {method!r} needs a learned policy")
        return self._learned
