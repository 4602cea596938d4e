"""Decoding policies: which scorer and which budget a round uses.

All decoding methods are one round loop with another pair of these two. Owns the named methods; scorers and budgets
themselves live in `edge_scorer.py` and `budget.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft_dist.budget import NO_LIMIT, AcceptanceGain, BudgetPolicy, ExploringBudget, FixedBudget, UtilityBudget
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer
from graft_dist.errors import PolicyError

METHODS = ("plain", "chain", "ddtree")
"""The methods that need nothing measured."""

COSTED_METHODS = ("caddtree",)
"""The methods that need a cost curve."""


@dataclass(frozen=True)
class DecodingPolicy:
    """How the trees of a round are scored and how large they get. Never changes what text comes out, only how fast."""

    name: str  # what reports and records call it
    scorer: EdgeScorer  # gives every edge its score
    budget: BudgetPolicy  # gives every slot its number of nodes
    num_candidates: int  # top candidates per depth that the drafter hands over
    max_depth: int | None = None  # deepest depth of a tree; None: the drafter's draft depth

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise PolicyError(f"num_candidates must be at least 1, not {self.num_candidates}")
        if self.max_depth is not None and self.max_depth < 1:
            raise PolicyError(f"max_depth must be at least 1 (or None for the draft depth), not {self.max_depth}")


def plain() -> DecodingPolicy:
    """Decode without a draft: budget 0, one token per round."""
    return DecodingPolicy("plain", MarginalScorer(), FixedBudget(0), num_candidates=1)


def chain(max_depth: int | None = None) -> DecodingPolicy:
    """DFlash's chain (arXiv 2602.06036): the top candidate of each depth, as deep as drafted or as `max_depth`."""
    budget = FixedBudget(NO_LIMIT if max_depth is None else max_depth)
    return DecodingPolicy("chain", MarginalScorer(), budget, num_candidates=1, max_depth=max_depth)


def ddtree(budget: int, num_candidates: int = 16) -> DecodingPolicy:
    """DDTree (arXiv 2604.12989): the `budget` best paths under the drafter's marginals, `S = sum of log q_d(c)`."""
    return DecodingPolicy("ddtree", MarginalScorer(), FixedBudget(budget), num_candidates)


def caddtree(cost: CostCurve, max_budget: int = 256, num_candidates: int = 16) -> DecodingPolicy:
    """CaDDTree: DDTree's trees, cut where the drafter's own probabilities no longer pay for a node.

    Every round is drafted: not drafting where it never pays is not part of that method.
    """
    budget = UtilityBudget(AcceptanceGain(), cost, max_budget, may_rest=False)
    return DecodingPolicy("caddtree", MarginalScorer(), budget, num_candidates)


def exploring(budgets: Sequence[int], seed: int, num_candidates: int = 16) -> DecodingPolicy:
    """DDTree's trees with a budget drawn per round from `budgets`: for collecting rounds, not for speed."""
    return DecodingPolicy("exploring", MarginalScorer(), ExploringBudget(tuple(budgets), seed), num_candidates)


def policy_for(
    method: str, *, budget: int | None, num_candidates: int, cost: CostCurve | None = None
) -> DecodingPolicy:
    """Return the policy of a named method.

    Args:
        method: one of `METHODS` or `COSTED_METHODS`.
        budget: nodes per round; `ddtree` needs it, `chain` takes it as its depth when given, `caddtree` as the most
            nodes, `plain` ignores it.
        num_candidates: candidates per depth for `ddtree` and `caddtree`.
        cost: what rounds cost on this hardware; `caddtree` needs it.

    Raises:
        PolicyError: an unknown method, a missing budget or cost curve, or impossible numbers.
    """
    if method == "plain":
        return plain()
    if method == "chain":
        return chain(max_depth=budget)
    if method == "ddtree":
        if budget is None:
            raise PolicyError("method 'ddtree' needs a budget: the number of draft nodes to verify per round")
        return ddtree(budget, num_candidates)
    if method == "caddtree":
        if cost is None:
            raise PolicyError("method 'caddtree' needs a cost curve: the milliseconds of a round by its budget")
        return (
            caddtree(cost, num_candidates=num_candidates) if budget is None else caddtree(cost, budget, num_candidates)
        )
    raise PolicyError(f"unknown method {method!r}: choose one of {', '.join((*METHODS, *COSTED_METHODS))}")
