"""The marginal scorer."""

from __future__ import annotations

import numpy as np

from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer


def test_marginal_scores_are_the_drafters_log_probabilities() -> None:
    rng = np.random.default_rng(0)
    log_probs = np.log(rng.dirichlet(np.ones(4), (2, 3))).astype(np.float32)
    candidate_ids = np.broadcast_to(np.arange(4, dtype=np.int32), (2, 3, 4))
    scorer: EdgeScorer = MarginalScorer()
    scores = scorer.score(np.array([5, 6], np.int64), candidate_ids, log_probs)
    assert scores.shape == (2, 3, 1, 4) and scores.dtype == np.float32
    np.testing.assert_array_equal(scores[:, :, 0], log_probs)


def test_path_scores_are_sums_of_marginals() -> None:
    log_probs = np.log(np.array([[[0.7, 0.2], [0.6, 0.3]]], np.float32))
    candidate_ids = np.array([[[1, 2], [3, 4]]], np.int32)
    scores = MarginalScorer().score(np.array([0], np.int64), candidate_ids, log_probs)
    tree = build_tree(0, candidate_ids[0], scores[0], 6)
    for node in range(1, 7):
        path = tree.path(node)
        expected = sum(log_probs[0, tree.depths[n] - 1, tree.ranks[n]] for n in path)
        assert np.isclose(tree.scores[node], expected)


def test_nothing_drafted() -> None:
    scores = MarginalScorer().score(np.array([0]), np.zeros((1, 0, 4), np.int32), np.zeros((1, 0, 4), np.float32))
    assert scores.shape == (1, 0, 1, 4)
