"""Trees: construction against plain-Python references, the layout's properties, masks."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_dist.draft_tree import DraftTree, ancestor_mask, ancestor_masks, build_tree, root_tree

ROOT = 7


def edge_row(edges: np.ndarray, depth: int, rank: int) -> np.ndarray:
    """The scores of the children of the node with this depth and rank."""
    return edges[depth, rank if edges.shape[1] > 1 and depth > 0 else 0]


def grow_by_frontier(edges: np.ndarray, budget: int, depth_limit: int) -> list[tuple[int, ...]]:
    """Paths (of ranks) in order, by looking at every child of every node each time. For scores without ties."""
    tree: dict[tuple[int, ...], float] = {(): 0.0}
    while len(tree) <= budget:
        offers = {}
        for path, score in tree.items():
            if len(path) < depth_limit:
                row = edge_row(edges, len(path), path[-1] if path else -1)
                children = {(*path, c): score + float(edge) for c, edge in enumerate(row) if edge > -math.inf}
                offers.update({child: total for child, total in children.items() if child not in tree})
        if not offers:
            break
        best = max(offers, key=lambda path: offers[path])
        tree[best] = offers[best]
    return list(tree)[1:]


def grow_by_heap(edges: np.ndarray, budget: int, depth_limit: int) -> list[tuple[int, ...]]:
    """Paths (of ranks) in order, with a heap over sorted child lists: the textbook algorithm, ties included."""
    heap: list[tuple[float, int, int, tuple[int, ...], float, int]] = []
    pushed = 0

    def push(parent: tuple[int, ...], parent_score: float, place: int) -> None:
        nonlocal pushed
        if len(parent) >= depth_limit:
            return
        row = edge_row(edges, len(parent), parent[-1] if parent else -1)
        order = sorted((c for c in range(len(row)) if row[c] > -math.inf), key=lambda c: (-row[c], c))
        if place < len(order):
            score = parent_score + float(row[order[place]])
            heapq.heappush(heap, (-score, order[place], pushed, (*parent, order[place]), parent_score, place))
            pushed += 1

    push((), 0.0, 0)
    added: list[tuple[int, ...]] = []
    while heap and len(added) < budget:
        negative_score, _, _, path, parent_score, place = heapq.heappop(heap)
        added.append(path)
        push(path[:-1], parent_score, place + 1)
        push(path, -negative_score, 0)
    return added


def rank_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.ranks[tree.path(node)].tolist()) for node in range(1, tree.num_nodes + 1)]


def candidates(rng: np.random.Generator, depth: int, num_candidates: int) -> np.ndarray:
    return np.stack([rng.choice(1000, num_candidates, replace=False) for _ in range(depth)]).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn, *, has_ties: bool = False) -> dict[str, Any]:
    depth = draw(st.integers(1, 5))
    num_candidates = draw(st.integers(1, 5))
    num_parents = draw(st.sampled_from([1, num_candidates]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if has_ties:
        edges = -rng.integers(0, 4, (depth, num_parents, num_candidates)).astype(np.float32)
    else:
        edges = np.log(rng.dirichlet(np.full(num_candidates + 1, 0.5), (depth, num_parents))[:, :, :-1] + 1e-9)
    edges[rng.random(edges.shape) < draw(st.sampled_from([0.0, 0.3]))] = -math.inf
    return {
        "candidate_ids": candidates(rng, depth, num_candidates),
        "edge_scores": edges.astype(np.float32),
        "budget": draw(st.integers(0, 60)),
        "max_depth": draw(st.sampled_from([None, 1, 2, 9])),
    }


def depth_limit(case: dict[str, Any]) -> int:
    depth = len(case["candidate_ids"])
    return depth if case["max_depth"] is None else min(depth, case["max_depth"])


@given(cases())
@settings(deadline=None, max_examples=150)
def test_equals_brute_force(case: dict[str, Any]) -> None:
    tree = build_tree(ROOT, **case)
    assert rank_paths(tree) == grow_by_frontier(case["edge_scores"], case["budget"], depth_limit(case))


@given(cases(has_ties=True))
@settings(deadline=None, max_examples=150)
def test_equals_the_textbook_heap_where_scores_tie(case: dict[str, Any]) -> None:
    tree = build_tree(ROOT, **case)
    assert rank_paths(tree) == grow_by_heap(case["edge_scores"], case["budget"], depth_limit(case))


@given(st.booleans().flatmap(lambda has_ties: cases(has_ties=has_ties)))
@settings(deadline=None, max_examples=150)
def test_layout(case: dict[str, Any]) -> None:
    tree = build_tree(ROOT, **case)
    assert tree.num_nodes <= case["budget"]
    for array in (tree.tokens, tree.parents, tree.depths, tree.ranks):
        assert array.dtype == np.int32 and array.shape == (tree.num_nodes + 1,)
    assert tree.scores.dtype == np.float32 and tree.scores.shape == (tree.num_nodes + 1,)
    root = (tree.tokens[0], tree.parents[0], tree.depths[0], tree.scores[0], tree.ranks[0])
    assert root == (ROOT, -1, 0, 0, -1)
    nodes = np.arange(1, tree.num_nodes + 1)
    assert (tree.parents[1:] < nodes).all() and (tree.parents[1:] >= 0).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert tree.depths.max() <= depth_limit(case)
    siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    for node in nodes.tolist():
        depth, rank, parent = tree.depths[node] - 1, tree.ranks[node], tree.parents[node]
        assert tree.tokens[node] == case["candidate_ids"][depth, rank]
        edge = edge_row(case["edge_scores"], depth, tree.ranks[parent])[rank]
        assert tree.scores[node] == pytest.approx(tree.scores[parent] + edge, rel=1e-5, abs=1e-5)
    assert (np.diff(tree.scores) <= 0).all()  # the edges are log-probabilities
    assert np.isfinite(tree.scores).all()


@given(cases(has_ties=True), st.integers(0, 60))
@settings(deadline=None)
def test_smaller_budgets_give_prefixes(case: dict[str, Any], smaller: int) -> None:
    large = build_tree(ROOT, **case)
    small = build_tree(ROOT, **{**case, "budget": min(smaller, case["budget"])})
    for name in ("tokens", "parents", "depths", "scores", "ranks"):
        np.testing.assert_array_equal(getattr(large.take(smaller), name), getattr(small, name))


def test_shared_scores_are_a_special_case() -> None:
    rng = np.random.default_rng(0)
    ids = candidates(rng, 4, 6)
    shared = np.log(rng.dirichlet(np.ones(6), (4, 1))).astype(np.float32)
    by_parent = np.repeat(shared, 6, axis=1)
    assert rank_paths(build_tree(ROOT, ids, shared, 50)) == rank_paths(build_tree(ROOT, ids, by_parent, 50))


def test_scores_that_grow_along_a_path() -> None:
    edges = np.array([[[1.0, 5.0]], [[3.0, 2.0]]], np.float32)
    tree = build_tree(ROOT, np.array([[10, 11], [20, 21]], np.int32), edges, 4)
    assert tree.tokens.tolist() == [ROOT, 11, 20, 21, 10]
    assert tree.scores.tolist() == [0, 5, 8, 7, 1]


def test_literal_case() -> None:
    ids = np.array([[10, 11], [20, 21]], np.int32)
    edges = np.log(np.array([[[0.6, 0.3]], [[0.9, 0.1]]], np.float32))
    tree = build_tree(ROOT, ids, edges, 5)
    assert tree.tokens.tolist() == [ROOT, 10, 20, 11, 20, 21]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 1]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    assert np.exp(tree.scores[1:]) == pytest.approx([0.6, 0.54, 0.3, 0.27, 0.06], rel=1e-5)
    assert tree.child(0, 11) == 3 and tree.child(3, 20) == 4 and tree.child(3, 21) is None
    assert tree.path(5) == [1, 5] and tree.path(0) == []
    assert [tree.follow(ids) for ids in ([11, 20], [10, 21, 20], [10, 99, 20], [20], [])] == [
        [3, 4],
        [1, 5],
        [1],
        [],
        [],
    ]
    assert tree.take(3).follow([11, 20]) == [3] and root_tree(ROOT).follow([10]) == []


def test_unsorted_candidates_under_each_parent() -> None:
    ids = np.array([[10, 11, 12], [20, 21, 22]], np.int32)
    edges = np.full((2, 3, 3), -9.0, np.float32)
    edges[0, 0] = [-2.0, -3.0, -1.0]
    edges[1, 2] = [-8.0, -0.25, -0.5]  # the children of candidate 2
    tree = build_tree(ROOT, ids, edges, 4)
    assert tree.tokens.tolist() == [ROOT, 12, 21, 22, 10]


def test_ties_prefer_the_lower_candidate_then_the_earlier_pushed() -> None:
    ids = np.array([[10, 11], [20, 21]], np.int32)
    tree = build_tree(ROOT, ids, np.zeros((2, 1, 2), np.float32), 6)
    # Candidate 0 of the root, then its child 0 (pushed after the sibling, but lower in candidate index), then ties of
    # candidate 1: the root's was pushed first.
    assert rank_paths(tree) == [(0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1)]


def test_dead_edges_are_never_added() -> None:
    ids = np.array([[10, 11], [20, 21]], np.int32)
    edges = np.array([[[-1.0, -math.inf]], [[math.nan, -2.0]]], np.float32)
    tree = build_tree(ROOT, ids, edges, 50)
    assert tree.tokens.tolist() == [ROOT, 10, 21]
    assert build_tree(ROOT, ids, np.full((2, 1, 2), -math.inf, np.float32), 50).num_nodes == 0


def test_budget_beyond_the_candidates() -> None:
    rng = np.random.default_rng(1)
    tree = build_tree(ROOT, candidates(rng, 3, 2), rng.normal(size=(3, 2, 2)).astype(np.float32), 2**31 - 1)
    assert tree.num_nodes == 2 + 4 + 8


def test_large_tree_equals_the_heap() -> None:
    rng = np.random.default_rng(2)
    edges = np.log(rng.dirichlet(np.full(32, 0.3), (15, 32)) + 1e-12).astype(np.float32)
    tree = build_tree(ROOT, candidates(rng, 15, 32), edges, 1024)
    assert rank_paths(tree) == grow_by_heap(edges, 1024, 15)


@pytest.mark.parametrize("budget", [0, 5])
def test_nothing_to_draft(budget: int) -> None:
    bare = build_tree(ROOT, np.zeros((0, 4), np.int32), np.zeros((0, 1, 4), np.float32), budget)
    assert bare.num_nodes == 0 and bare.tokens.tolist() == [ROOT]
    for name in ("tokens", "parents", "depths", "scores", "ranks"):
        np.testing.assert_array_equal(getattr(bare, name), getattr(root_tree(ROOT), name))
        assert getattr(bare, name).dtype == getattr(root_tree(ROOT), name).dtype


@pytest.mark.parametrize(
    "arguments",
    [
        {"edge_scores": np.zeros((2, 2, 3), np.float32)},
        {"edge_scores": np.zeros((1, 1, 3), np.float32)},
        {"candidate_ids": np.zeros(3, np.int32)},
        {"budget": -1},
        {"max_depth": -1},
    ],
)
def test_refuses_what_does_not_fit(arguments: dict[str, Any]) -> None:
    fit = {"candidate_ids": np.zeros((2, 3), np.int32), "edge_scores": np.zeros((2, 1, 3), np.float32), "budget": 4}
    build_tree(ROOT, **fit)
    with pytest.raises(ValueError, match=r"must be"):
        build_tree(ROOT, **{**fit, **arguments})


def test_take_refuses_negative_budgets() -> None:
    with pytest.raises(ValueError, match="-1"):
        root_tree(ROOT).take(-1)


def test_other_layouts_of_the_arrays() -> None:
    rng = np.random.default_rng(3)
    ids = candidates(rng, 3, 4)
    edges = rng.normal(size=(3, 4, 4)).astype(np.float32)
    expected = rank_paths(build_tree(ROOT, ids, edges, 20))
    read_only = edges.copy()
    read_only.flags.writeable = False
    for other in (np.asfortranarray(edges), edges.astype(np.float64), read_only):
        assert rank_paths(build_tree(ROOT, ids.astype(np.int64), other, 20)) == expected


def mask_by_walking(parents: np.ndarray) -> np.ndarray:
    mask = np.zeros((len(parents), len(parents)), bool)
    for row in range(len(parents)):
        node = row
        while node >= 0:
            mask[row, node] = True
            node = parents[node]
    return mask


@given(cases())
@settings(deadline=None)
def test_ancestor_mask_equals_walking_up(case: dict[str, Any]) -> None:
    tree = build_tree(ROOT, **case)
    np.testing.assert_array_equal(ancestor_mask(tree.parents), mask_by_walking(tree.parents))


def test_padded_masks() -> None:
    rng = np.random.default_rng(4)
    ids, edges = candidates(rng, 3, 4), rng.normal(size=(3, 4, 4)).astype(np.float32)
    trees = [build_tree(ROOT, ids, edges, budget) for budget in (0, 3, 9)]
    masks = ancestor_masks(trees, 10)
    assert masks.shape == (3, 10, 10) and masks.dtype == np.bool_
    for mask, tree in zip(masks, trees, strict=True):
        size = tree.num_nodes + 1
        np.testing.assert_array_equal(mask[:size, :size], mask_by_walking(tree.parents))
        assert not mask[:size, size:].any()
        for row in range(size, 10):
            assert np.flatnonzero(mask[row]).tolist() == [0, row]
    with pytest.raises(ValueError, match="10 rows does not fit 9"):
        ancestor_masks(trees, 9)
