"""Edge scorers: the drafter's marginals, and TDES against its formula written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import (
    EdgeScorer,
    MarginalScorer,
    Reading,
    TdesConfig,
    TdesNetwork,
    TdesScorer,
    fold_projection,
    root_mean_square,
)
from graft_dist.errors import PolicyError

VOCAB, SIZE, HIDDEN = 50, 12, 6
PLAIN = TdesConfig(embedding_size=SIZE, draft_depth=4, width=8, projection_size=5, depth_size=3)
GATED = replace(PLAIN, gate_rank=3, hidden_size=HIDDEN, hidden_rms=1.5, embedding_rms=0.8)
RELYING = replace(PLAIN, reliance=True)
CONFIGS = pytest.mark.parametrize("config", [PLAIN, GATED, RELYING], ids=["plain", "gated", "relying"])
READINGS = pytest.mark.parametrize("reading", ["sum", "conditional"])


def draft(num_slots: int, depth: int, width: int, seed: int = 0) -> tuple[Any, Any, Any, torch.Tensor]:
    """Roots [S], distinct candidates [S, D, K], their log-probabilities, and hidden states [S, D, H]."""
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (num_slots, depth, 1)), axis=2)[..., :width]
    logits = rng.normal(0, 2, (num_slots, depth, VOCAB))
    log_probs = -np.sort(-(logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))), axis=2)[..., :width]
    hidden = torch.from_numpy(rng.normal(0, 1, (num_slots, depth, HIDDEN))).float()
    return rng.integers(0, VOCAB, num_slots), ids, log_probs.astype(np.float32), hidden


def embeddings() -> torch.Tensor:
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(5))


def trained(config: TdesConfig, seed: int = 1) -> TdesNetwork:
    """A network whose f is not 0."""
    network = TdesNetwork(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ("weight", "offset", "log_scale", "gate_child", "bias", "reliance", "parent_reliance"):
            parameter = getattr(network, name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return network


def by_hand(
    network: TdesNetwork, parent: int, child: int, depth: int, hidden: torch.Tensor, log_q: tuple[float, float]
) -> float:
    """f of one edge as the paper prints it, with one matrix W over the concatenation."""
    config, own = network.config, {name: value.detach() for name, value in network.named_parameters()}
    e_p, e_c = (embeddings()[token] / config.embedding_rms for token in (parent, child))
    whole = torch.cat([own["mix_parent"], own["mix_child"], own["mix_depth"]], dim=1)
    parts = torch.cat([own["project_parent"] @ e_p, own["project_child"] @ e_c, own["depth_embedding"][depth]])
    inner = own["weight"] @ torch.relu(whole @ parts + own["bias"]) + own["offset"]
    if config.gate_rank:
        gate = (own["gate_parent"] @ e_p) * (own["gate_hidden"] @ (hidden / config.hidden_rms))
        inner = inner + gate @ (own["gate_child"] @ e_c)
    weighed = 0.0
    if config.reliance:
        weighed = float(own["reliance"][depth] + own["parent_reliance"][depth] * log_q[0]) * log_q[1]
    return float(own["log_scale"].exp() * inner) + weighed


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


@CONFIGS
@READINGS
def test_a_new_network_gives_exactly_ddtrees_trees(config: TdesConfig, reading: Reading) -> None:
    roots, ids, log_probs, hidden = draft(num_slots=20, depth=4, width=6)
    log_probs[3, :, 1] = log_probs[3, :, 2]  # ties must fall the same way
    scorer: EdgeScorer = TdesScorer(TdesNetwork(config), embeddings(), reading)
    scores = scorer.score(roots, ids, log_probs, hidden)
    marginals = MarginalScorer().score(roots, ids, log_probs)
    for slot in range(20):
        ours, theirs = (build_tree(0, ids[slot], table[slot], 40) for table in (scores, marginals))
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.parents.tolist() == theirs.parents.tolist()
        np.testing.assert_array_equal(ours.scores, theirs.scores)


@CONFIGS
def test_scores_follow_the_formula(config: TdesConfig) -> None:
    roots, ids, log_probs, hidden = draft(num_slots=3, depth=4, width=5)
    network = trained(config)
    sums = TdesScorer(network, embeddings(), "sum").score(roots, ids, log_probs, hidden)
    conditionals = TdesScorer(network, embeddings(), "conditional").score(roots, ids, log_probs, hidden)
    assert sums.shape == conditionals.shape == (3, 4, 5, 5) and sums.dtype == conditionals.dtype == np.float32
    for slot, at in np.ndindex(3, 4):
        parents = [roots[slot]] if at == 0 else ids[slot, at - 1]
        for row, parent in enumerate(parents):
            above = 0.0 if at == 0 else float(log_probs[slot, at - 1, row])
            edges = zip(ids[slot, at].tolist(), log_probs[slot, at].tolist(), strict=True)
            f = np.array(
                [by_hand(network, int(parent), child, at, hidden[slot, at], (above, own)) for child, own in edges]
            )
            log_q = log_probs[slot, at].astype(np.float64)
            np.testing.assert_allclose(sums[slot, at, row], log_q + f, atol=5e-3)
            expected = log_q + f - np.log(np.exp(log_q + f).sum()) + np.log(np.exp(log_q).sum())
            np.testing.assert_allclose(conditionals[slot, at, row], expected, atol=5e-3)
    assert (sums[:, 0, 1:] == 0).all() and (conditionals[:, 0, 1:] == 0).all()
    assert np.abs(sums[:, 1:] - log_probs[:, 1:, None]).max() > 0.5


@CONFIGS
def test_conditional_scores_are_probabilities_of_the_candidates(config: TdesConfig) -> None:
    roots, ids, log_probs, hidden = draft(num_slots=4, depth=4, width=6, seed=3)
    network = trained(config)
    with torch.no_grad():
        network.log_scale.fill_(4.0)  # far apart: f of tens
    scores = TdesScorer(network, embeddings(), "conditional").score(roots, ids, log_probs, hidden)
    coverage = np.exp(log_probs).sum(axis=2)
    masses = np.exp(scores[:, 1:]).sum(axis=3)
    np.testing.assert_allclose(masses, np.broadcast_to(coverage[:, 1:, None], masses.shape), rtol=1e-4)
    tree = build_tree(0, ids[0], scores[0], 64)
    assert (np.diff(tree.scores) <= 1e-5).all(), "paths never gain along the order"


@CONFIGS
def test_compiled_scores_are_the_networks(config: TdesConfig) -> None:
    """Training and decoding compute the same f."""
    roots, ids, log_probs, hidden = draft(num_slots=2, depth=4, width=5, seed=9)
    network = trained(config)
    scores = TdesScorer(network, embeddings(), "sum").score(roots, ids, log_probs, hidden)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        f = network(
            network.token_tables(embeddings()),
            tokens[:, :-1, :, None],
            tokens[:, 1:, None, :],
            torch.arange(1, 4)[None, :, None, None],
            hidden[:, 1:, None, None],
            tuple(torch.from_numpy(part) for part in (log_probs[:, :-1, :, None], log_probs[:, 1:, None, :])),
        )
    np.testing.assert_allclose(scores[:, 1:] - log_probs[:, 1:, None], f, atol=5e-3)


def test_slots_are_scored_alone() -> None:
    roots, ids, log_probs, hidden = draft(num_slots=5, depth=3, width=4)
    scorer = TdesScorer(trained(GATED), embeddings())
    whole = scorer.score(roots, ids, log_probs, hidden)
    for slot in range(5):
        own = slice(slot, slot + 1)
        np.testing.assert_allclose(
            whole[own], scorer.score(roots[own], ids[own], log_probs[own], hidden[own]), atol=1e-5
        )


def test_impossible_candidates_meet_weights_of_zero() -> None:
    """Minus infinity times an untrained reliance must not become NaN."""
    roots, ids, log_probs, _ = draft(num_slots=2, depth=3, width=4)
    log_probs[:, 1, 3] = -np.inf
    scores = TdesScorer(TdesNetwork(RELYING), embeddings(), "sum").score(roots, ids, log_probs)
    assert not np.isnan(scores).any()
    np.testing.assert_array_equal(scores[:, 1, :, 3], np.full((2, 4), -np.inf))


def test_extreme_scores_stay_finite() -> None:
    roots, ids, log_probs, hidden = draft(num_slots=2, depth=3, width=4)
    network = trained(PLAIN)
    with torch.no_grad():
        network.log_scale.fill_(7.0)
    scores = TdesScorer(network, embeddings()).score(roots, ids, log_probs - 60, hidden)
    assert np.isfinite(scores).all()
    assert scores.max() <= 0


def test_a_recorded_projection_is_folded_into_the_gate() -> None:
    projection = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2)) / 4
    network = trained(GATED)
    roots, ids, log_probs, _ = draft(num_slots=2, depth=3, width=4)
    hidden = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(3))
    small = TdesScorer(network, embeddings()).score(roots, ids, log_probs, hidden @ projection)
    whole = TdesScorer(fold_projection(network, projection), embeddings())
    np.testing.assert_allclose(whole.score(roots, ids, log_probs, hidden), small, atol=1e-4)
    with pytest.raises(PolicyError, match="projection to 6 numbers"):
        fold_projection(trained(PLAIN), projection)


@pytest.mark.parametrize("scorer", [MarginalScorer(), TdesScorer(trained(PLAIN), embeddings())])
def test_nothing_drafted(scorer: EdgeScorer) -> None:
    scores = scorer.score(np.array([0]), np.zeros((1, 0, 4), np.int32), np.zeros((1, 0, 4), np.float32))
    assert scores.shape[:2] == (1, 0) and scores.shape[3] == 4


def test_what_does_not_fit_is_refused() -> None:
    roots, ids, log_probs, _ = draft(num_slots=1, depth=5, width=4)
    with pytest.raises(PolicyError, match="knows 4 depths, the drafter proposes 5"):
        TdesScorer(TdesNetwork(PLAIN), embeddings()).score(roots, ids, log_probs)
    with pytest.raises(PolicyError, match="choose one without a gate"):
        TdesScorer(TdesNetwork(GATED), embeddings()).score(roots, ids[:, :4], log_probs[:, :4])
    with pytest.raises(PolicyError, match="weighs the drafter's log-probabilities"):
        nothing = torch.zeros(1, dtype=torch.int64)
        TdesNetwork(RELYING)(TdesNetwork(RELYING).token_tables(embeddings()), nothing, nothing, nothing)
    with pytest.raises(PolicyError, match="embeddings of 12 numbers, the target's have 11"):
        TdesScorer(TdesNetwork(PLAIN), embeddings()[:, 1:])
    with pytest.raises(PolicyError, match="sum, conditional"):
        TdesScorer(TdesNetwork(PLAIN), embeddings(), "product")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="width"):
        replace(PLAIN, width=0)
    with pytest.raises(PolicyError, match="gate_rank 3"):
        replace(PLAIN, gate_rank=3)
    with pytest.raises(PolicyError, match="rms"):
        replace(PLAIN, embedding_rms=0.0)


def test_root_mean_square() -> None:
    assert root_mean_square(torch.tensor([[3.0, 4.0], [0.0, 0.0]])) == pytest.approx(2.5)
