"""Decoding policies: which scorer and which budget a round uses.

All decoding methods are one round loop with another pair of these two. Owns the named methods; scorers and budgets
themselves live in `edge_scorer.py` and `budget.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft_dist.budget import NO_LIMIT, BudgetPolicy, ExploringBudget, FixedBudget
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer
from graft_dist.errors import PolicyError

METHODS = ("plain", "chain", "ddtree")
"""The methods `policy_for` knows."""


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


def exploring(budgets: Sequence[int], seed: int, num_candidates: int = 16) -> DecodingPolicy:
    """DDTree's trees with a budget drawn per round from `budgets`: for collecting rounds, not for speed."""
    return DecodingPolicy("exploring", MarginalScorer(), ExploringBudget(tuple(budgets), seed), num_candidates)


def policy_for(method: str, *, budget: int | None, num_candidates: int) -> DecodingPolicy:
    """Return the policy of a named method.

    Args:
        method: one of `METHODS`.
        budget: nodes per round; `ddtree` needs it, `chain` takes it as its depth when given, `plain` ignores it.
        num_candidates: candidates per depth for `ddtree`.

    Raises:
        PolicyError: an unknown method, a missing budget, or impossible numbers.
    """
    if method == "plain":
        return plain()
    if method == "chain":
        return chain(max_depth=budget)
    if method == "ddtree":
        if budget is None:
            raise PolicyError("method 'ddtree' needs a budget: the number of draft nodes to verify per round")
        return ddtree(budget, num_candidates)
    raise PolicyError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
