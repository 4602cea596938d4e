"""Fitting the edge scorer: losses and mining worked out by hand, gradients, resuming, and a preference to recover."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp, log, log1p
from typing import Any

import numpy as np
import pytest
import torch

from graft_dist.budget import FixedBudget
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer, Reading, TdesConfig, TdesNetwork, TdesScorer
from graft_dist.errors import PolicyError
from graft_dist.learning.tdes import (
    Fit,
    Lessons,
    TdesTrainer,
    TdesTraining,
    batch_terms,
    batches,
    edge_loss,
    fit,
    join_lessons,
    kl_loss,
    learning_rate,
    lessons_of,
    mean_kl,
    pair_loss,
    positive_weight,
)
from graft_dist.replay import RecordedRounds, ReplayRow, replay
from graft_dist.rounds import RoundRecord

VOCAB, SIZE, HIDDEN, DEPTH, WIDTH = 40, 16, 5, 3, 4
SUCCESSORS = np.random.default_rng(11).permutation(VOCAB)
SMALL = TdesConfig(embedding_size=SIZE, draft_depth=DEPTH, width=32, projection_size=16, depth_size=4)
GATED = replace(SMALL, gate_rank=4, hidden_size=HIDDEN)


def embeddings() -> torch.Tensor:
    return torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(5))


def record_of(**changes: Any) -> RoundRecord:
    """A decoded round, D = K = 2: root 4, candidates 5 6 and 7 8, tree 1: 5, 2: 5 7, 3: 6; the target goes 4 6 7."""
    fields: dict[str, Any] = {
        "sequence_id": "s", "round_index": 0, "context_length": 10, "root_token": 4,
        "candidate_ids": np.array([[5, 6], [7, 8]], np.int32),
        "candidate_log_probs": np.log(np.array([[0.6, 0.4], [0.8, 0.1]], np.float32)),
        "conf": 0.7, "degen": 0.0, "hist": 0.0, "budget": 3,
        "tree_tokens": np.array([4, 5, 7, 6], np.int32), "tree_parents": np.array([-1, 0, 1, 0], np.int32),
        "tree_depths": np.array([0, 1, 2, 1], np.int32), "target_tokens": np.array([6, 8, 2, 7], np.int32),
        "accepted": np.array([3], np.int32), "num_tokens": 2,
        "parent_logits": np.array([[0.0, log(3.0)], [log(9.0), 0.0]], np.float32),
        "parent_logsumexp": np.array([2.0, 3.0], np.float32),
        "draft_ns": 0, "build_ns": 0, "verify_ns": 0, "commit_ns": 0, "batch_size": 1, "batch_rows": 4,
    }  # fmt: skip
    return RoundRecord(**(fields | changes))


def dense_of(followed: list[int], **changes: Any) -> RoundRecord:
    """The same draft in a dense round."""
    nothing = np.zeros(0, np.int32)
    logits = np.array([[0.0, log(3.0)], [log(9.0), 0.0]], np.float32)[: len(followed)]
    fields: dict[str, Any] = {
        "kind": "dense", "followed": np.array(followed, np.int32), "tree_tokens": nothing, "tree_parents": nothing,
        "tree_depths": nothing, "target_tokens": nothing, "accepted": nothing, "num_tokens": 0, "budget": 0,
        "parent_logits": logits, "parent_logsumexp": logits[:, 0],
    }  # fmt: skip
    return record_of(**(fields | changes))


def pairs_in(lessons: Lessons) -> list[tuple[int, list[int], list[int]]]:
    """(depth, wanted edge, other edge) of each pair."""
    pairs = lessons.pairs
    edges = np.stack([pairs.parents, pairs.children], axis=2).tolist()
    return [(depth, *edge) for depth, edge in zip(pairs.depths.tolist(), edges, strict=True)]


def edges_in(lessons: Lessons) -> list[tuple[int, int, int, float]]:
    edges = lessons.edges
    columns = (edges.depths, edges.parents, edges.children, edges.labels)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- losses


def test_kl_by_hand() -> None:
    log_q, f = torch.tensor([[0.5, 0.25], [0.5, 0.5]]).log(), torch.tensor([[log(2.0), 0.0], [0.0, 0.0]])
    # The corrected drafts are (.8, .2) and (.5, .5).
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    expected = [0.5 * log(0.5 / 0.8) + 0.5 * log(0.5 / 0.2), log(2.0)]
    torch.testing.assert_close(kl_loss(log_q, f, target), torch.tensor(expected))
    assert kl_loss(log_q, f, torch.tensor([[0.8, 0.2], [0.5, 0.5]])).abs().max() < 1e-6


def test_pair_by_hand() -> None:
    found = pair_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]), margin=0.5)
    torch.testing.assert_close(found, torch.tensor([log1p(exp(-0.5)), log1p(exp(0.5))]))


def test_edge_by_hand() -> None:
    f, labels = torch.tensor([0.0, 0.0, log(3.0)]), torch.tensor([1.0, 0.0, 1.0])
    expected = torch.tensor([5 * log(2.0), log(2.0), -5 * log(0.75)])
    torch.testing.assert_close(edge_loss(f, labels, positive_weight=5.0), expected)


def test_the_drafters_own_probabilities_are_weighed_by_depth_and_parent() -> None:
    """Parents are the root and 6, whose log-probability is log .4; children are all candidates of the next depth."""
    network = TdesNetwork(TdesConfig(embedding_size=SIZE, draft_depth=2, reliance=True))
    with torch.no_grad():
        network.reliance.copy_(torch.tensor([0.5, 0.25]))
        network.parent_reliance.copy_(torch.tensor([9.0, 2.0]))  # the root is certain: 9 is never used
    lessons = lessons_of([record_of()])
    kl, pairs, edges = batch_terms(network, embeddings(), lessons, np.arange(1), TdesTraining(), 1.0)
    log_q = torch.tensor([[0.6, 0.4], [0.8, 0.1]]).log()
    weights = torch.tensor([[0.5], [0.25 + 2 * log(0.4)]])
    targets = torch.from_numpy(lessons.parents.targets[lessons.parents.is_accepted])
    torch.testing.assert_close(kl, kl_loss(log_q, weights * log_q, targets))
    assert len(pairs) == len(lessons.pairs.rounds)
    # Edges: 5 and 6 below the root, 7 below 5 (log .6).
    f = torch.tensor([0.5 * log(0.6), (0.25 + 2 * log(0.6)) * log(0.8), 0.5 * log(0.4)])
    torch.testing.assert_close(edges, edge_loss(f, torch.from_numpy(lessons.edges.labels), 1.0))


def test_gradients_of_the_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    f, log_q, target = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    f.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_loss(log_q, x, target.softmax(dim=-1)), f)
    assert torch.autograd.gradcheck(lambda x: pair_loss(x[:, 0], x[:, 1], 1.0), f)
    assert torch.autograd.gradcheck(lambda x: edge_loss(x, (target > 0).double(), 2.5), f)


@pytest.mark.parametrize("config", [SMALL, GATED], ids=["plain", "gated"])
def test_gradients_of_the_network(config: TdesConfig) -> None:
    """Moving each weight a little changes the whole loss as the gradient says."""
    hidden = np.random.default_rng(0).normal(size=(2, 2, HIDDEN)).astype(np.float32)
    lessons = lessons_of([record_of(), dense_of([6, 7])], hidden=hidden if config.gate_rank else None)
    network = TdesNetwork(config, seed=3).double()
    network.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    network.gate_child.data.normal_(generator=torch.Generator().manual_seed(1))
    training = TdesTraining(every_parent=True)

    def loss() -> torch.Tensor:
        terms = batch_terms(network, embeddings(), lessons, np.arange(2), training, 3.0)
        return torch.stack([term.sum() for term in terms]).sum()

    network.zero_grad()
    loss().backward()
    for name, parameter in network.named_parameters():
        if parameter.numel() == 0:
            continue
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        at = int(parameter.grad.abs().argmax())
        values, step = parameter.data.view(-1), 1e-4
        values[at] += step
        above = float(loss().detach())
        values[at] -= 2 * step
        below = float(loss().detach())
        values[at] += step
        assert (above - below) / (2 * step) == pytest.approx(float(parameter.grad.view(-1)[at]), rel=2e-2), name


# ---- what rounds teach


def test_a_decoded_round_by_hand() -> None:
    lessons = lessons_of([record_of()])
    parents = lessons.parents
    assert parents.tokens.tolist() == [4, 6, 5] and parents.depths.tolist() == [0, 1, 1]
    assert parents.is_accepted.tolist() == [True, True, False]
    np.testing.assert_allclose(parents.targets, [[0.25, 0.75], [0.9, 0.1], [0, 1]], atol=1e-6)
    assert edges_in(lessons) == [(0, 4, 5, 0.0), (1, 5, 7, 0.0), (0, 4, 6, 1.0)]
    # Mismatched: 7 is wanted after 6, and sits under 5. No other child of 6 was verified: the best candidate stands in.
    assert pairs_in(lessons) == [(1, [6, 7], [5, 7]), (1, [6, 7], [6, 8])]
    assert positive_weight(lessons.edges) == 2.0


def test_verified_rivals_are_the_negatives() -> None:
    tree = {
        "tree_tokens": np.array([4, 5, 7, 6, 8], np.int32), "tree_parents": np.array([-1, 0, 1, 0, 3], np.int32),
        "tree_depths": np.array([0, 1, 2, 1, 2], np.int32), "target_tokens": np.array([6, 8, 2, 7, 1], np.int32),
    }  # fmt: skip
    assert pairs_in(lessons_of([record_of(**tree)])) == [(1, [6, 7], [5, 7]), (1, [6, 7], [6, 8])]


def test_an_edge_is_no_rival_of_itself() -> None:
    """7 is wanted after 6 at depth 2, and sits under 6 of another parent and under 8."""
    tree = {
        "candidate_ids": np.array([[5, 6], [6, 8], [7, 9]], np.int32),
        "candidate_log_probs": np.log(np.array([[0.6, 0.4], [0.8, 0.1], [0.6, 0.3]], np.float32)),
        "tree_tokens": np.array([4, 5, 6, 7, 8, 7, 6, 6], np.int32),  # 5, 5 6, 5 6 7, 5 8, 5 8 7, 6, 6 6
        "tree_parents": np.array([-1, 0, 1, 2, 1, 4, 0, 6], np.int32),
        "tree_depths": np.array([0, 1, 2, 3, 2, 3, 1, 2], np.int32),
        "target_tokens": np.array([6, 8, 7, 2, 1, 2, 6, 7], np.int32),
        "accepted": np.array([6, 7], np.int32), "num_tokens": 3,
        "parent_logits": np.zeros((3, 2), np.float32), "parent_logsumexp": np.zeros(3, np.float32),
    }  # fmt: skip
    assert pairs_in(lessons_of([record_of(**tree)])) == [(2, [6, 7], [8, 7]), (2, [6, 7], [6, 9])]


@pytest.mark.parametrize(
    "changes",
    [
        {"target_tokens": np.array([6, 8, 2, 9], np.int32)},  # wanted by nobody
        {"target_tokens": np.array([9, 8, 2, 7], np.int32), "accepted": np.zeros(0, np.int32), "num_tokens": 1},
        {"num_tokens": 1},  # the sequence ended inside the path
    ],
)
def test_rounds_without_a_mismatch_give_no_pairs(changes: dict[str, Any]) -> None:
    assert pairs_in(lessons_of([record_of(**changes)])) == []


def test_a_dense_round_by_hand() -> None:
    # DDTree's first three nodes are 5, 5 7, 6: the same mismatch. What the target wants after 5 is not known.
    lessons = lessons_of([dense_of([6, 7])], dense_budget=3)
    assert lessons.parents.tokens.tolist() == [4, 6] and lessons.parents.is_accepted.all()
    np.testing.assert_allclose(lessons.parents.targets, [[0.25, 0.75], [0.9, 0.1]], atol=1e-6)
    assert edges_in(lessons) == [(0, 4, 5, 0.0), (0, 4, 6, 1.0)]
    assert pairs_in(lessons) == [(1, [6, 7], [5, 7]), (1, [6, 7], [6, 8])]
    # With room for all six nodes the path is in the tree.
    whole = lessons_of([dense_of([6, 7])], dense_budget=6)
    assert pairs_in(whole) == []
    assert sorted(edges_in(whole)) == [(0, 4, 5, 0.0), (0, 4, 6, 1.0), (1, 6, 7, 1.0), (1, 6, 8, 0.0)]


def test_a_dense_round_teaches_as_far_as_a_tree_could_go() -> None:
    lost = lessons_of([dense_of([9, 7])])
    assert lost.parents.tokens.tolist() == [4]
    assert [label for *_, label in edges_in(lost)] == [0.0, 0.0]
    assert lessons_of([dense_of([6])]).parents.tokens.tolist() == [4]


def test_lessons_join() -> None:
    records = [record_of(), dense_of([6, 7]), record_of(num_tokens=1), dense_of([5])]
    whole, joined = lessons_of(records), join_lessons([lessons_of(records[:1]), lessons_of(records[1:])])
    for name in ("parents", "edges", "pairs"):
        for field, column in vars(getattr(whole, name)).items():
            np.testing.assert_array_equal(column, getattr(getattr(joined, name), field))
    np.testing.assert_array_equal(whole.candidate_ids, joined.candidate_ids)


def test_lessons_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PolicyError, match="one shape"):
        lessons_of([])
    with pytest.raises(PolicyError, match="one shape"):
        lessons_of([record_of(candidate_ids=np.zeros((0, 2), np.int32))])
    with pytest.raises(PolicyError, match="hidden states"):
        lessons_of([record_of()], hidden=np.zeros((1, 3, 2), np.float32))
    with pytest.raises(PolicyError, match="no lessons"):
        join_lessons([])
    with pytest.raises(PolicyError, match="1 of 2 parts"):
        join_lessons([lessons_of([record_of()]), lessons_of([record_of()], hidden=np.zeros((1, 2, 5), np.float32))])
    lessons = lessons_of([record_of()])
    with pytest.raises(PolicyError, match="reads hidden states of 5 numbers, the training rounds have none"):
        TdesTrainer(TdesNetwork(GATED), embeddings(), lessons, lessons, TdesTraining())
    with pytest.raises(PolicyError, match="2 deep, the edge scorer knows 1"):
        fit(TdesNetwork(replace(SMALL, draft_depth=1)), embeddings(), lessons, lessons, TdesTraining())


def test_impossible_trainings_are_refused() -> None:
    for changes in ({"steps": 0}, {"kl_weight": -1.0}, {"learning_rate": 0.0}, {"decay_fraction": 2.0}):
        with pytest.raises(PolicyError):
            TdesTraining(**changes)


def test_every_parent_is_an_option() -> None:
    lessons, network = lessons_of([record_of()]), TdesNetwork(SMALL)
    for every_parent, count in ((False, 2), (True, 3)):
        terms = batch_terms(network, embeddings(), lessons, np.arange(1), TdesTraining(every_parent=every_parent), 1.0)
        assert [len(term) for term in terms] == [count, 2, 3]
    only_kl = TdesTraining(pair_weight=0.0, edge_weight=0.0)
    assert [len(term) for term in batch_terms(network, embeddings(), lessons, np.arange(1), only_kl, 1.0)] == [2, 0, 0]


def test_terms_of_a_batch_are_those_of_its_rounds() -> None:
    lessons = lessons_of([record_of(), dense_of([6, 7]), record_of(num_tokens=1), dense_of([5])])
    network = TdesNetwork(SMALL, seed=2)
    network.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    whole = batch_terms(network, embeddings(), lessons, np.array([0, 2, 3]), TdesTraining(), 2.0)
    singles = [batch_terms(network, embeddings(), lessons, np.array([at]), TdesTraining(), 2.0) for at in (0, 2, 3)]
    for term, parts in zip(whole, zip(*singles, strict=True), strict=True):
        torch.testing.assert_close(term, torch.cat(parts))


# ---- fitting


def synthetic_rounds(count: int, seed: int) -> tuple[list[RoundRecord], RecordedRounds]:
    """Dense rounds in which the target always continues with a token's one successor.

    The candidates of a depth are the successors of the depth before, in an order that says nothing; so the marginals
    cannot know which child belongs to which parent, and the pairs can.
    """
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        root, ids = int(rng.integers(VOCAB)), [rng.choice(VOCAB, WIDTH, replace=False)]
        ids[0][0] = ids[0][0] if SUCCESSORS[root] in ids[0] else SUCCESSORS[root]
        for _ in range(DEPTH - 1):
            ids.append(SUCCESSORS[rng.permutation(ids[-1])])
        order = [rng.permutation(row) for row in ids]
        followed = [int(rng.choice(ids[0]))]  # the first step is a surprise
        while len(followed) < DEPTH:
            followed.append(int(SUCCESSORS[followed[-1]]))
        candidates = np.array(order, np.int32)
        logits = np.where(candidates == np.array(followed)[:, None], 4.0, 0.0).astype(np.float32)
        log_probs = np.log(np.tile([0.4, 0.3, 0.2, 0.05], (DEPTH, 1))).astype(np.float32)
        records.append(
            dense_of(
                followed, root_token=root, candidate_ids=candidates, candidate_log_probs=log_probs, parent_logits=logits
            )
        )
    return records, as_rounds(records)


def as_rounds(records: list[RoundRecord]) -> RecordedRounds:
    number, zeros = len(records), np.zeros(len(records), np.float32)
    return RecordedRounds(
        groups=[("dense", "synthetic")] * number,
        unit_ids=["u"] * number,
        sequence_ids=["s"] * number,
        round_indices=np.zeros(number, np.int32),
        context_lengths=np.full(number, 10, np.int32),
        root_tokens=np.array([record.root_token for record in records], np.int64),
        candidate_ids=np.stack([record.candidate_ids for record in records]),
        log_probs=np.stack([record.candidate_log_probs for record in records]),
        followed=np.stack([record.followed for record in records]),
        num_left=np.full(number, 90, np.int32),
        rooms=np.full(number, 90, np.int32),
        conf=zeros,
        degen=zeros,
        hist=zeros,
    )


def replayed(rounds: RecordedRounds, scorer: EdgeScorer, budget: int = 8) -> ReplayRow:
    return replay([rounds], scorer, {"fixed": FixedBudget(budget)}, max_budget=budget).rows[0]


QUICK = TdesTraining(steps=300, rounds_per_step=32, evaluate_every=50, learning_rate=5e-3)


@pytest.mark.parametrize("reading", ["conditional", "sum"])
def test_a_known_preference_is_recovered(reading: Reading) -> None:
    records, _ = synthetic_rounds(400, seed=0)
    others, rounds = synthetic_rounds(150, seed=1)
    found = fit(TdesNetwork(SMALL), embeddings(), lessons_of(records, dense_budget=8), lessons_of(others), QUICK)
    assert found.best.held_out_kl < 0.6 * found.evaluations[0].held_out_kl
    assert found.best.held_out_kl == pytest.approx(mean_kl(found.network, embeddings(), lessons_of(others)))
    ddtree = replayed(rounds, MarginalScorer())
    ours = replayed(rounds, TdesScorer(found.network, embeddings(), reading))
    assert ours.mat > (1.25 if reading == "conditional" else 1.1) * ddtree.mat
    assert ours.mismatch_rate < ddtree.mismatch_rate
    f = TdesScorer(found.network, embeddings(), "sum")
    ids = np.tile(np.arange(VOCAB, dtype=np.int32), (1, DEPTH, 1))
    table = f.score(np.zeros(1, np.int64), ids, np.zeros(ids.shape, np.float32))[0, 1]
    assert (table.argmax(axis=1) == SUCCESSORS).mean() > 0.5, "among all 40, though only 4 ever competed"


def test_a_run_is_reproducible_and_resumable() -> None:
    records, _ = synthetic_rounds(60, seed=0)
    lessons, training = lessons_of(records), replace(QUICK, steps=30, evaluate_every=10, rounds_per_step=16)
    once = fit(TdesNetwork(SMALL), embeddings(), lessons, lessons, training)
    again = TdesTrainer(TdesNetwork(SMALL), embeddings(), lessons, lessons, training)
    again.advance()
    resumed = TdesTrainer(TdesNetwork(SMALL, seed=9), embeddings(), lessons, lessons, training)
    resumed.load_state(again.state())
    while not resumed.is_done:
        resumed.advance()
    assert resumed.result().evaluations == once.evaluations
    for name, value in once.network.state_dict().items():
        torch.testing.assert_close(resumed.result().network.state_dict()[name], value, rtol=0, atol=0)


class TwoWorkers:
    """Stands for a group of two: each worker is a thread, sums meet at a barrier."""

    def __init__(self) -> None:
        self.rank = threading.local()
        self.barrier = threading.Barrier(2, timeout=60)
        self.given: dict[int, list[torch.Tensor]] = {}

    def worker(self) -> tuple[int, int]:
        return self.rank.value, 2

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        self.given[self.rank.value] = [tensor.clone() for tensor in tensors]
        self.barrier.wait()
        sums = [left + right for left, right in zip(self.given[0], self.given[1], strict=True)]
        self.barrier.wait()
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total)


def test_two_workers_fit_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _ = synthetic_rounds(30, seed=0)
    lessons, training = lessons_of(records), replace(QUICK, steps=6, evaluate_every=3, rounds_per_step=15)
    alone = fit(TdesNetwork(SMALL), embeddings(), lessons, lessons, training)
    group = TwoWorkers()
    monkeypatch.setattr("graft_dist.learning.tdes.worker", group.worker)
    monkeypatch.setattr("graft_dist.learning.tdes.add_over_workers", group.add)

    def work(rank: int) -> Fit:
        group.rank.value = rank
        return fit(TdesNetwork(SMALL), embeddings(), lessons, lessons, training)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(work, range(2)))
    for found in both:
        assert found.best.held_out_kl == pytest.approx(alone.best.held_out_kl, rel=1e-3)
        for name, value in alone.network.state_dict().items():
            torch.testing.assert_close(found.network.state_dict()[name], value, rtol=1e-2, atol=1e-3)


def test_fitting_stops_early_and_keeps_the_best() -> None:
    records, _ = synthetic_rounds(40, seed=0)
    others, _ = synthetic_rounds(40, seed=1)
    for index, record in enumerate(others):  # held-out rounds that contradict the training rounds
        others[index] = replace(record, parent_logits=-record.parent_logits)
    training = replace(QUICK, evaluate_every=5, patience=2)
    seen: list[int] = []
    found = fit(
        TdesNetwork(SMALL), embeddings(), lessons_of(records), lessons_of(others), training,
        lambda look: seen.append(look.step),
    )  # fmt: skip
    assert seen == [5, 10]
    assert found.best.step == 0
    assert not found.network.weight.any()


def test_the_gate_learns_from_hidden_states() -> None:
    """The right child depends on a number in the hidden state, which only the gate sees."""
    rng = np.random.default_rng(0)
    hidden = rng.choice([-1.0, 1.0], (300, DEPTH, HIDDEN)).astype(np.float32)
    records = []
    for state in hidden:
        ids = np.array([[5, 6, 0, 1], [7, 8, 0, 1], [9, 10, 0, 1]], np.int32)
        followed = [int(row[0] if sign > 0 else row[1]) for row, sign in zip(ids, state[:, 0], strict=True)]
        logits = np.where(ids == np.array(followed)[:, None], 5.0, 0.0).astype(np.float32)
        log_probs = np.log(np.tile([0.4, 0.4, 0.1, 0.1], (DEPTH, 1))).astype(np.float32)
        records.append(dense_of(followed, candidate_ids=ids, candidate_log_probs=log_probs, parent_logits=logits))
    lessons, held_out = lessons_of(records[:200], hidden=hidden[:200]), lessons_of(records[200:], hidden=hidden[200:])
    gated, plain = (
        fit(TdesNetwork(config), embeddings(), lessons, held_out, replace(QUICK, steps=150)).best.held_out_kl
        for config in (GATED, SMALL)
    )
    assert gated < 0.3 * plain


def test_batches_are_a_function_of_the_step() -> None:
    training = TdesTraining(steps=9, rounds_per_step=4, seed=7)
    whole = list(batches(10, training, 0))
    assert len(whole) == 9 and all(len(rounds) == 4 for rounds in whole)
    assert len(set(np.concatenate(whole[:2]).tolist())) == 8  # an epoch gives each round once
    for first in (1, 2, 5):
        for left, right in zip(whole[first:], batches(10, training, first), strict=True):
            np.testing.assert_array_equal(left, right)
    assert len(next(batches(3, training, 0))) == 3
    assert not np.array_equal(whole[0], whole[2])


def test_learning_rate() -> None:
    training = TdesTraining(steps=100, learning_rate=1.0, decay_fraction=0.5)
    assert [learning_rate(step, training) for step in (0, 50, 75, 100)] == [1.0, 1.0, 0.5, 0.0]


def test_positive_weight_of_one_class() -> None:
    lessons = lessons_of([dense_of([9, 7])])
    assert positive_weight(lessons.edges) == 1.0
