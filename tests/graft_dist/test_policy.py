"""Named decoding policies."""

from __future__ import annotations

import numpy as np
import pytest

from graft_dist.budget import DraftState, ExploringBudget, FixedBudget, UtilityBudget
from graft_dist.cost_curve import line
from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.errors import PolicyError
from graft_dist.policy import METHODS, DecodingPolicy, caddtree, chain, ddtree, exploring, plain, policy_for

STATE = DraftState(conf=0.0, degen=0.0, hist=0.0, context_length=10, max_budget=1000, sequence_key=1, round_index=0)


def grow(policy: DecodingPolicy, depth: int) -> list[int]:
    """The depths of the tree that a policy makes of a uniform draft."""
    k = policy.num_candidates
    ids = np.broadcast_to(np.arange(k, dtype=np.int32), (1, depth, k))
    scores = policy.scorer.score(np.zeros(1, np.int64), ids, np.full((1, depth, k), -1.0, np.float32))
    tree = build_tree(0, ids[0], scores[0], policy.budget.limits([STATE])[0], policy.max_depth)
    return tree.take(policy.budget.choose([tree], [STATE])[0]).depths.tolist()


def test_methods() -> None:
    assert grow(plain(), 7) == [0]
    assert grow(chain(), 7) == list(range(8))
    assert grow(chain(max_depth=3), 7) == [0, 1, 2, 3]
    assert len(grow(ddtree(12, num_candidates=4), 7)) == 13
    assert len(grow(exploring([5], seed=0), 7)) == 6


def test_policy_for_names() -> None:
    for method in METHODS:
        assert policy_for(method, budget=8, num_candidates=4).name == method
    assert policy_for("ddtree", budget=8, num_candidates=4).budget == FixedBudget(8)
    assert policy_for("ddtree", budget=8, num_candidates=4).num_candidates == 4
    assert policy_for("chain", budget=None, num_candidates=4).num_candidates == 1
    assert policy_for("chain", budget=2, num_candidates=4).max_depth == 2
    assert exploring([1, 2], seed=9).budget == ExploringBudget((1, 2), 9)


def test_caddtree_weighs_probabilities_against_cost() -> None:
    # Uniform drafts of probability 1/e: nodes bring .37 each at depth 1, then .14, while the line asks for more.
    cheap, dear = (caddtree(line(10.0, 12.0, node_ms, "hand"), num_candidates=4) for node_ms in (0.01, 3.0))
    assert len(grow(cheap, 2)) == 21
    assert grow(dear, 2) == [0, 1, 1, 1, 1]
    assert grow(caddtree(line(10.0, 12.0, 0.01, "hand"), max_budget=6, num_candidates=4), 2) == [0, 1, 1, 1, 1, 2, 2]
    policy = policy_for("caddtree", budget=9, num_candidates=4, cost=line(10.0, 12.0, 0.1, "hand"))
    assert isinstance(policy.budget, UtilityBudget) and policy.budget.max_budget == 9 and policy.num_candidates == 4
    with pytest.raises(PolicyError, match="'caddtree' needs a cost curve"):
        policy_for("caddtree", budget=9, num_candidates=4)


def test_refusals() -> None:
    with pytest.raises(PolicyError, match="plain, chain, ddtree"):
        policy_for("tree", budget=8, num_candidates=4)
    with pytest.raises(PolicyError, match="needs a budget"):
        policy_for("ddtree", budget=None, num_candidates=4)
    with pytest.raises(PolicyError, match="num_candidates"):
        ddtree(8, num_candidates=0)
    with pytest.raises(PolicyError, match="max_depth"):
        DecodingPolicy("odd", MarginalScorer(), FixedBudget(1), 1, max_depth=0)
