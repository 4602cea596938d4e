"""The draft tree, its best-first construction and its ancestor mask.

Owns the layout every other module relies on: node 0 is the root (the last committed token), `parents[0] == -1`,
parents precede their children, nodes stay in the order in which they were added, and a budget counts nodes *without*
the root. Does not know where scores come from (`edge_scorer.py`) or what happens to a tree after verification.

Dimension letters: D draft depth, K candidates per depth, P parent rows (1 or K), S slots, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

MAX_NODES = 4096
"""Most nodes that a tree of the engine's can have, whatever the policy asks for."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A rooted tree of proposed tokens, in the order in which its nodes were added.

    All arrays have `num_nodes + 1` entries; entry 0 is the root.
    """

    tokens: Int32Array  # token id of each node; the root's is the last committed token
    parents: Int32Array  # index of each node's parent, always smaller than its own; -1 at the root
    depths: Int32Array  # 0 at the root
    scores: Float32Array  # path score: sum of the edge scores from the root; 0 at the root
    ranks: Int32Array  # index of the node among the candidates of its depth; -1 at the root

    @property
    def num_nodes(self) -> int:
        """Number of drafted nodes, the root not counted."""
        return len(self.tokens) - 1

    def take(self, budget: int) -> DraftTree:
        """Return the tree of the first `budget` nodes: what `build_tree` would have made of a smaller budget."""
        if budget < 0:
            raise ValueError(f"budget must be at least 0, not {budget}")
        if budget >= self.num_nodes:
            return self
        end = budget + 1
        return DraftTree(self.tokens[:end], self.parents[:end], self.depths[:end], self.scores[:end], self.ranks[:end])

    def child(self, node: int, token: int) -> int | None:
        """Return the index of the child of `node` that carries `token`, or None."""
        index = int(_find_child(self.tokens, self.parents, node, token))
        return None if index < 0 else index

    def follow(self, token_ids: Sequence[int] | Int32Array) -> list[int]:
        """Return the nodes that these tokens lead through, from a child of the root on, as deep as the tree goes."""
        nodes = np.zeros((1, len(token_ids)), np.int32)
        wanted = np.array(token_ids, np.int32).reshape(nodes.shape)
        _follow_all(self.tokens[None], self.parents[None], np.array([self.num_nodes], np.int32), wanted, nodes)
        return nodes[nodes > 0].tolist()

    def path(self, node: int) -> list[int]:
        """Return the node indices from the root (excluded) down to `node` (included)."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]


def root_tree(root_token: int) -> DraftTree:
    """Return a tree that holds only the root: what plain decoding verifies."""
    zero = np.zeros(1, np.int32)
    none = np.full(1, -1, np.int32)
    return DraftTree(np.array([root_token], np.int32), none, zero, np.zeros(1, np.float32), none)


def build_tree(
    root_token: int,
    candidate_ids: Int32Array,
    edge_scores: Float32Array,
    budget: int,
    max_depth: int | None = None,
) -> DraftTree:
    """Grow a draft tree best path first until it holds `budget` nodes.

    A heap pops the best-scored path, adds it as a node, and pushes the node's next sibling and its first child
    (DDTree, arXiv 2604.12989). Adding a node never depends on the budget, so the tree for a smaller budget is a prefix
    of the tree for a larger one. With edge scores that are log-probabilities path scores never grow along the order.

    Args:
        root_token: the last committed token.
        candidate_ids: int32 [D, K], the candidate tokens of each depth, distinct within a depth.
        edge_scores: float32 [D, P, K]. With P == K, `[d, p, c]` scores candidate c of depth d+1 under candidate p of
            depth d; at d == 0 row 0 belongs to the root. With P == 1 all parents share the scores (DDTree).
            Need not be sorted. Edges scored -inf or NaN are never added.
        budget: largest number of nodes, the root not counted; 0 gives the bare root.
        max_depth: deepest depth allowed, or None for D.

    Returns:
        A tree with at most `budget` nodes; fewer when no candidate is left. Equal scores: the lower candidate index
        goes first, then the path that was pushed earlier.

    Raises:
        ValueError: shapes that do not fit, or a negative budget or depth.

    Example: D=2, K=2, scores log [[.6, .3], [.9, .1]], budget 3: node 1 = candidate 0 (.6), node 2 = its child 0
    (.54), node 3 = candidate 1 (.3).
    """
    ids = np.ascontiguousarray(candidate_ids, dtype=np.int32)
    scores = np.ascontiguousarray(edge_scores, dtype=np.float32)
    if ids.ndim != 2 or scores.ndim != 3 or scores.shape[::2] != ids.shape or scores.shape[1] not in (1, ids.shape[1]):
        raise ValueError(f"candidate_ids {ids.shape} and edge_scores {scores.shape} must be [D, K] and [D, 1 or K, K]")
    if budget < 0 or (max_depth is not None and max_depth < 0):
        raise ValueError(f"budget and max_depth must be at least 0, not {budget} and {max_depth}")
    depth_limit = ids.shape[0] if max_depth is None else min(max_depth, ids.shape[0])
    capacity = _capacity(ids.shape[1], depth_limit, budget)
    return DraftTree(*_grow(root_token, ids, scores, capacity, depth_limit))


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Trees of S rounds in padded arrays [S, B + 1]; entries beyond a tree's last node mean nothing."""

    tokens: Int32Array
    parents: Int32Array
    depths: Int32Array
    scores: Float32Array
    ranks: Int32Array
    num_nodes: Int32Array  # [S], the root not counted

    def tree(self, slot: int) -> DraftTree:
        """Return one tree; its arrays are views."""
        own = (slot, slice(int(self.num_nodes[slot]) + 1))
        return DraftTree(self.tokens[own], self.parents[own], self.depths[own], self.scores[own], self.ranks[own])

    def follow(self, token_ids: Int32Array) -> Int32Array:
        """`DraftTree.follow` for each slot: nodes [S, D] for tokens [S, D], 0 from where a tree does not hold them."""
        nodes = np.zeros_like(token_ids)
        _follow_all(self.tokens, self.parents, self.num_nodes, token_ids, nodes)
        return nodes


def build_trees(
    root_tokens: npt.NDArray[np.int64],
    candidate_ids: Int32Array,
    edge_scores: Float32Array,
    budget: int,
    depth_limits: Int32Array,
) -> TreeBatch:
    """Build the trees of S rounds in one compiled call: `build_tree` for each slot, with its own depth limit.

    Args:
        root_tokens: int64 [S].
        candidate_ids: int32 [S, D, K].
        edge_scores: float32 [S, D, P, K], P == 1 or P == K.
        budget: largest number of nodes of each tree.
        depth_limits: int32 [S], the deepest depth allowed in each tree.

    Raises:
        ValueError: shapes that do not fit, or a negative budget or depth.
    """
    # Writeable, for read-only arrays would be another type to compile for.
    ids = np.require(candidate_ids, np.int32, ["C", "W"])
    scores = np.require(edge_scores, np.float32, ["C", "W"])
    limits = np.require(depth_limits, np.int32, ["C", "W"])
    num_slots, depth, width = ids.shape
    if scores.shape not in ((num_slots, depth, 1, width), (num_slots, depth, width, width)):
        raise ValueError(f"edge_scores {scores.shape} must be [S, D, 1 or K, K] for candidate_ids {ids.shape}")
    if not len(root_tokens) == len(limits) == num_slots:
        raise ValueError(f"{len(root_tokens)} roots and {len(limits)} depth limits do not fit {num_slots} slots")
    if budget < 0 or np.any(limits < 0):
        raise ValueError(f"budget and depth limits must be at least 0, not {budget} and {limits.min(initial=0)}")
    shape = (num_slots, _capacity(width, depth, budget) + 1)
    tokens, parents, depths, ranks = (np.zeros(shape, np.int32) for _ in range(4))
    batch = TreeBatch(tokens, parents, depths, np.zeros(shape, np.float32), ranks, np.zeros(num_slots, np.int32))
    roots = np.require(root_tokens, np.int64, ["C", "W"])
    _grow_all(
        roots, ids, scores, np.minimum(limits, depth),
        batch.tokens, batch.parents, batch.depths, batch.scores, batch.ranks, batch.num_nodes,
    )  # fmt: skip
    return batch


def ancestor_mask(parents: Int32Array) -> BoolArray:
    """Return bool [n+1, n+1]: entry [i, j] is True when node i sees node j (its ancestors and itself)."""
    size = len(parents)
    mask = np.zeros((size, size), np.bool_)
    _fill_ancestors(np.ascontiguousarray(parents, dtype=np.int32), mask)
    return mask


def ancestor_masks(trees: Sequence[DraftTree], num_rows: int) -> BoolArray:
    """Return the ancestor masks of several trees, padded to bool [S, R, R] with R = `num_rows`.

    A padding row sees the root and itself, so that no row of an attention mask is empty; nothing sees a padding row.

    Raises:
        ValueError: a tree has more than `num_rows` rows (its root included).
    """
    masks = np.zeros((len(trees), num_rows, num_rows), np.bool_)
    for slot, tree in enumerate(trees):
        if tree.num_nodes + 1 > num_rows:
            raise ValueError(f"a tree of {tree.num_nodes + 1} rows does not fit {num_rows} rows")
        _fill_ancestors(tree.parents, masks[slot])
    return masks


def _capacity(num_candidates: int, depth: int, budget: int) -> int:
    """Return the smaller of `budget` and the number of paths there are, so that arrays are never larger than needed."""
    total = 0
    paths = 1
    for _ in range(depth):
        paths *= num_candidates
        total += paths
        if total >= budget or paths == 0:
            break
    return min(total, budget)


@njit(cache=True)
def _find_child(tokens: Int32Array, parents: Int32Array, node: int, token: int) -> int:
    for index in range(node + 1, len(tokens)):
        if parents[index] == node and tokens[index] == token:
            return index
    return -1


@njit(cache=True)
def _follow_all(
    tokens: Int32Array, parents: Int32Array, num_nodes: Int32Array, wanted: Int32Array, nodes: Int32Array
) -> None:
    """Fill `nodes` [S, D], all 0 so far; children stand behind their parents, so a tree is passed through once."""
    for slot in range(len(wanted)):
        end, node = num_nodes[slot] + 1, 0
        for depth in range(wanted.shape[1]):
            node = _find_child(tokens[slot, :end], parents[slot, :end], node, wanted[slot, depth])
            if node < 0:
                break
            nodes[slot, depth] = node


@njit(cache=True)
def _fill_ancestors(parents: Int32Array, mask: BoolArray) -> None:
    """Write the ancestor mask of a tree into `mask` [R, R], all False so far; rows beyond the tree are padding."""
    num_rows = len(parents)
    mask[0, 0] = True
    for row in range(1, num_rows):
        # Parents precede children, so the parent's row is complete.
        for column in range(row):
            mask[row, column] = mask[parents[row], column]
        mask[row, row] = True
    for row in range(num_rows, len(mask)):
        mask[row, 0] = True
        mask[row, row] = True


@njit(cache=True)
def _next_candidate(scores: Float32Array, last_score: float, last_candidate: int) -> int:
    """Return the candidate that follows (last_score, last_candidate) by falling score, then rising index; -1 if none.

    Few children of a parent are ever asked for, so one scan of K per child is cheaper than sorting each child list.
    """
    best = -1
    best_score = np.float32(-np.inf)
    for candidate in range(len(scores)):
        score = scores[candidate]
        # A comparison with NaN is false, and nothing exceeds -inf by equalling it: neither is ever returned.
        if score > best_score and (score < last_score or (score == last_score and candidate > last_candidate)):
            best = candidate
            best_score = score
    return best


@njit(cache=True)
def _goes_before(a: int, b: int, scores: Float64Array, ranks: Int32Array) -> bool:
    if scores[a] != scores[b]:
        return scores[a] > scores[b]
    if ranks[a] != ranks[b]:
        return ranks[a] < ranks[b]
    return a < b  # entries are numbered as they are pushed


@njit(cache=True)
def _heap_push(heap: Int32Array, size: int, entry: int, scores: Float64Array, ranks: Int32Array) -> None:
    """Add `entry` to a heap of `size` entries."""
    position = size
    while position > 0:
        above = (position - 1) // 2
        if not _goes_before(entry, heap[above], scores, ranks):
            break
        heap[position] = heap[above]
        position = above
    heap[position] = entry


@njit(cache=True)
def _heap_pop(heap: Int32Array, size: int, scores: Float64Array, ranks: Int32Array) -> int:
    """Remove and return the first entry of a heap of `size` entries."""
    top = heap[0]
    last = size - 1
    moved = heap[last]
    position = 0
    while 2 * position + 1 < last:
        below = 2 * position + 1
        if below + 1 < last and _goes_before(heap[below + 1], heap[below], scores, ranks):
            below += 1
        if not _goes_before(heap[below], moved, scores, ranks):
            break
        heap[position] = heap[below]
        position = below
    heap[position] = moved
    return top


@njit(cache=True)
def _grow(
    root_token: int, candidate_ids: Int32Array, edge_scores: Float32Array, budget: int, depth_limit: int
) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array, Int32Array]:
    """Return (tokens, parents, depths, scores, ranks) of the tree; see `build_tree`."""
    tokens = np.full(budget + 1, root_token, np.int32)
    parents = np.full(budget + 1, -1, np.int32)
    depths = np.zeros(budget + 1, np.int32)
    ranks = np.full(budget + 1, -1, np.int32)
    path_scores = np.zeros(budget + 1, np.float64)  # double: a float32 sum would order deep paths by its rounding

    # An entry is a path waiting in the heap: one candidate under one node of the tree. At most two are pushed per node.
    entry_parents = np.empty(2 * budget + 1, np.int32)
    entry_ranks = np.empty(2 * budget + 1, np.int32)
    entry_scores = np.empty(2 * budget + 1, np.float64)
    heap = np.empty(2 * budget + 1, np.int32)
    num_entries = 0
    heap_size = 0

    node = 0  # the node added last
    while True:
        # Push the node's next sibling (under its parent), then its first child (under itself); the root has no sibling.
        for parent in (parents[node], np.int32(node)):
            if parent < 0 or depths[parent] >= depth_limit:
                continue
            is_shared = parent == 0 or edge_scores.shape[1] == 1
            scores = edge_scores[depths[parent], 0 if is_shared else ranks[parent]]
            after = ranks[node] if parent != node else -1
            candidate = _next_candidate(scores, np.inf if after < 0 else scores[after], after)
            if candidate >= 0:
                entry_parents[num_entries] = parent
                entry_ranks[num_entries] = candidate
                entry_scores[num_entries] = path_scores[parent] + scores[candidate]
                _heap_push(heap, heap_size, num_entries, entry_scores, entry_ranks)
                num_entries += 1
                heap_size += 1
        if node == budget or heap_size == 0:
            break
        entry = _heap_pop(heap, heap_size, entry_scores, entry_ranks)
        heap_size -= 1
        node += 1
        parents[node] = entry_parents[entry]
        ranks[node] = entry_ranks[entry]
        depths[node] = depths[parents[node]] + 1
        tokens[node] = candidate_ids[depths[node] - 1, ranks[node]]
        path_scores[node] = entry_scores[entry]

    end = node + 1
    return tokens[:end], parents[:end], depths[:end], path_scores[:end].astype(np.float32), ranks[:end]


@njit(cache=True)
def _grow_all(  # noqa: PLR0913 - inputs and outputs of a compiled loop
    root_tokens: npt.NDArray[np.int64],
    candidate_ids: Int32Array,
    edge_scores: Float32Array,
    depth_limits: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    depths: Int32Array,
    path_scores: Float32Array,
    ranks: Int32Array,
    num_nodes: Int32Array,
) -> None:
    """Grow one tree per slot, of at most as many nodes as a row of `tokens` [S, B + 1] has room for.

    Stands in this file because the cache of compiled code notices changes of a function's own file only.
    """
    budget = tokens.shape[1] - 1
    for slot in range(len(root_tokens)):
        grown = _grow(root_tokens[slot], candidate_ids[slot], edge_scores[slot], budget, int(depth_limits[slot]))
        end = len(grown[0])
        tokens[slot, :end] = grown[0]
        parents[slot, :end] = grown[1]
        depths[slot, :end] = grown[2]
        path_scores[slot, :end] = grown[3]
        ranks[slot, :end] = grown[4]
        num_nodes[slot] = end - 1
