"""Edge scorers: what an edge of the draft tree, from a parent to a candidate child, is worth.

Owns the interface the engine calls once per round for all slots, the scorer that trusts the drafter alone, and the
target-distilled edge scorer (TDES) of GRAFT (arXiv 2608.20375): its network, its vocabulary tables and the compiled
scoring step. Does not build trees (`draft_tree.py`) or fit weights (`learning/tdes.py`).

Letters: S slots, D draft depth, K candidates per depth, P parent rows (1 or K), V vocabulary, E embedding size, H the
drafter's hidden size, h width of the scorer, G size of a projected token, R rank of the gate.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import nn

from graft_dist.errors import PolicyError

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt16Array = npt.NDArray[np.uint16]

Reading = Literal["sum", "conditional"]
"""How f enters an edge's score.

sum: `S(v) = log q_d(c) + f(p, c, d)`, as the paper prints it.
conditional: `S(v) = log softmax over the parent's candidates of (log q_d + f) [c] + log coverage_d`, where coverage_d
    is the candidates' mass under q_d: the logarithm of a probability, so that exp of a path's score estimates the
    chance that its last node is accepted.
"""

_LEAST_LOG_Q = np.float32(-30.0)
"""Where log-probabilities are cut before they are weighed: a weight of 0 must not meet minus infinity."""

_TABLE_ROWS = 8192  # vocabulary rows projected at a time


class EdgeScorer(Protocol):
    """Scores every edge a round's trees may use."""

    @property
    def needs_hidden(self) -> bool:
        """Whether `score` reads the drafter's hidden states."""
        ...

    def score(
        self,
        root_tokens: Int64Array,
        candidate_ids: Int32Array,
        log_probs: Float32Array,
        hidden: torch.Tensor | None = None,
    ) -> Float32Array:
        """Return edge scores float32 [S, D, P, K] for S slots, D depths and K candidates, with P == 1 or P == K.

        Args:
            root_tokens: int64 [S], the last committed token of each slot.
            candidate_ids: int32 [S, D, K], distinct within a depth.
            log_probs: float32 [S, D, K], the drafter's log-probabilities of the candidates over what it may propose.
            hidden: [S, D, H] the drafter's hidden states, on any device; only needed where `needs_hidden` is true.

        Entry [s, d, p, c] is the score of candidate c of depth d+1 under candidate p of depth d (under the root at
        d == 0: row 0). P == 1 means that a child's score does not depend on its parent.
        """
        ...


class MarginalScorer:
    """DDTree's scorer (arXiv 2604.12989): an edge is worth the drafter's marginal log-probability of its child.

    `S(v) = log q_d(c)`, whatever the parent; the sum along a path is the log-probability the drafter gives the path.
    """

    needs_hidden = False

    def score(
        self,
        root_tokens: Int64Array,
        candidate_ids: Int32Array,
        log_probs: Float32Array,
        hidden: torch.Tensor | None = None,
    ) -> Float32Array:
        """Return `log_probs` as float32 [S, D, 1, K]: one row of scores shared by all parents."""
        return np.asarray(log_probs, dtype=np.float32)[:, :, None, :]


@dataclass(frozen=True, kw_only=True)
class TdesConfig:
    """The shape of a TDES network; with `gate_rank` 0 it is the paper's."""

    embedding_size: int
    """E: size of the target's token embeddings."""
    draft_depth: int
    """D: deepest depth that can be scored."""
    width: int = 64
    """h: size of the hidden layer; two numbers per token and unit are kept in the vocabulary tables."""
    projection_size: int = 64
    """G: size of the projections g_p and g_c of a token."""
    depth_size: int = 16
    """Size of the depth embedding e_d."""
    gate_rank: int = 0
    """R: rank of the term `<A(e_p) * H(h_d), B(e_c)>`, which sees the drafter's hidden state; 0: no such term."""
    hidden_size: int = 0
    """H: size of the hidden states given to the gate; 0 without a gate."""
    embedding_rms: float = 1.0
    """Root mean square of the target's embedding table; token embeddings enter divided by it."""
    hidden_rms: float = 1.0
    """Root mean square of the hidden states; they enter divided by it."""
    reliance: bool = False
    """Whether f also weighs the drafter's own log-probability: by depth, and by how likely the parent was."""

    def __post_init__(self) -> None:
        for name in ("embedding_size", "draft_depth", "width", "projection_size", "depth_size"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} of an edge scorer is {getattr(self, name)}; it must be at least 1")
        if self.gate_rank < 0 or (self.gate_rank > 0) != (self.hidden_size > 0):
            raise PolicyError(
                f"an edge scorer has gate_rank {self.gate_rank} and hidden_size {self.hidden_size}; both must be 0 (no "
                "gate) or both above 0"
            )
        if not (self.embedding_rms > 0 and self.hidden_rms > 0):
            raise PolicyError(
                f"embedding_rms and hidden_rms must be above 0, not {self.embedding_rms} and {self.hidden_rms}"
            )


@dataclass(frozen=True, eq=False)
class TokenTables:
    """What a TDES network makes of V tokens, each alone; rows are looked up by an edge's parent and child."""

    parent: torch.Tensor
    """[V, h] W_p g_p(e_v)."""
    child: torch.Tensor
    """[V, h] W_c g_c(e_v)."""
    gate_parent: torch.Tensor
    """[V, R] A(e_v)."""
    gate_child: torch.Tensor
    """[V, R] B(e_v)."""


class TdesNetwork(nn.Module):
    """f(p, c, d) = s * (w . relu(W [g_p(e_p); g_c(e_c); e_d] + b) + b0 + <A(e_p) * H(h_d), B(e_c)>), s > 0 learned.

    W is kept in its three blocks, so that everything a token contributes depends on its id alone (`token_tables`).
    The last term is there with `gate_rank` above 0 only. With `reliance`, f also holds
    `(r_d + t_d log q_{d-1}(p)) log q_d(c)`: deep marginals, and those below an unlikely parent, can be trusted less.
    A new network has w = 0, b0 = 0, B = 0, r = 0 and t = 0: f is 0 for every edge, and trees are DDTree's.
    """

    def __init__(self, config: TdesConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) / math.sqrt(max(columns, 1)))

        size, rank = config.projection_size, config.gate_rank
        self.project_parent = drawn(size, config.embedding_size)  # g_p
        self.project_child = drawn(size, config.embedding_size)  # g_c
        self.depth_embedding = drawn(config.draft_depth, config.depth_size)  # e_d
        self.mix_parent = drawn(config.width, size)  # W's block of the parent
        self.mix_child = drawn(config.width, size)
        self.mix_depth = drawn(config.width, config.depth_size)
        self.bias = nn.Parameter(torch.zeros(config.width))  # b
        self.weight = nn.Parameter(torch.zeros(config.width))  # w
        self.offset = nn.Parameter(torch.zeros(()))  # b0
        self.log_scale = nn.Parameter(torch.zeros(()))  # log s
        self.gate_parent = drawn(rank, config.embedding_size)  # A
        self.gate_hidden = drawn(rank, config.hidden_size)  # H
        self.gate_child = nn.Parameter(torch.zeros(rank, config.embedding_size))  # B
        num_reliances = config.draft_depth if config.reliance else 0
        self.reliance = nn.Parameter(torch.zeros(num_reliances))  # r
        self.parent_reliance = nn.Parameter(torch.zeros(num_reliances))  # t

    def token_tables(self, embeddings: torch.Tensor) -> TokenTables:
        """Project the embeddings [V, E] of some tokens, or of the whole vocabulary."""
        tokens = embeddings.to(self.weight.dtype) / self.config.embedding_rms
        return TokenTables(
            parent=tokens @ self.project_parent.T @ self.mix_parent.T,
            child=tokens @ self.project_child.T @ self.mix_child.T,
            gate_parent=tokens @ self.gate_parent.T,
            gate_child=tokens @ self.gate_child.T,
        )

    def depth_terms(self) -> torch.Tensor:
        """Return W_d e_d + b for each depth, [D, h]."""
        return self.depth_embedding @ self.mix_depth.T + self.bias

    def forward(
        self,
        tables: TokenTables,
        parents: torch.Tensor,
        children: torch.Tensor,
        depths: torch.Tensor,
        hidden: torch.Tensor | None = None,
        log_q: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return f of edges.

        `parents` and `children` are rows of `tables`, `depths` counts from 0 (the root's children); all int64, of
        shapes that broadcast to [..], the shape of the result. `hidden` is [.., H] at each edge's depth; `log_q` are
        the drafter's log-probabilities of each edge's parent (0 at the root) and child, which `reliance` needs.
        """
        mixed = tables.parent[parents] + tables.child[children] + self.depth_terms()[depths]
        inner = torch.relu(mixed) @ self.weight + self.offset
        if self.config.gate_rank > 0:
            gate = tables.gate_parent[parents] * (
                _known(hidden).to(self.weight.dtype) / self.config.hidden_rms @ self.gate_hidden.T
            )
            inner = inner + (gate * tables.gate_child[children]).sum(dim=-1)
        f = self.log_scale.exp() * inner
        if self.config.reliance:
            if log_q is None:
                raise PolicyError("this edge scorer weighs the drafter's log-probabilities, and there are none")
            of_parent, of_child = (values.clamp(min=float(_LEAST_LOG_Q)) for values in log_q)
            f = f + (self.reliance[depths] + self.parent_reliance[depths] * of_parent) * of_child
        return f


class TdesScorer:
    """A trained TDES network as the engine uses it: vocabulary tables in half precision, one compiled step per round.

    For a vocabulary of 152k and h = 64 the two tables take 39 MB.

    Args:
        network: the weights.
        embeddings: [V, E] the target's token embeddings.
        reading: how f enters the score, see `Reading`.
    """

    def __init__(self, network: TdesNetwork, embeddings: torch.Tensor, reading: Reading = "conditional") -> None:
        config = network.config
        if reading not in get_args(Reading):
            raise PolicyError(
                f"unknown reading {reading!r} of edge scores: choose one of {', '.join(get_args(Reading))}"
            )
        if embeddings.shape[1] != config.embedding_size:
            raise PolicyError(
                f"the edge scorer was made for token embeddings of {config.embedding_size} numbers, the target's have "
                f"{embeddings.shape[1]}"
            )
        self.config = config
        self.reading: Reading = reading
        self.needs_hidden = config.gate_rank > 0
        with torch.no_grad():
            scale = float(network.log_scale.exp())
            self._tables = _vocabulary_tables(network, embeddings)
            self._weights = (
                network.depth_terms().float().cpu().numpy(),
                (scale * network.weight).float().cpu().numpy(),
                np.float32(scale * float(network.offset)),
                network.reliance.float().cpu().numpy(),
                network.parent_reliance.float().cpu().numpy(),
            )
            gate_hidden = (scale / config.hidden_rms * network.gate_hidden).float().contiguous()
            # On the device of the embeddings, where the drafter's hidden states are too.
            self._gate_hidden = gate_hidden.to(embeddings.device)
            self._gate_weights = gate_hidden.cpu().numpy()

    def score(
        self,
        root_tokens: Int64Array,
        candidate_ids: Int32Array,
        log_probs: Float32Array,
        hidden: torch.Tensor | None = None,
    ) -> Float32Array:
        """Return edge scores float32 [S, D, K, K]; see `EdgeScorer.score`. At d == 0 the rows but row 0 are 0."""
        num_slots, depth, width = candidate_ids.shape
        if depth > self.config.draft_depth:
            raise PolicyError(f"the edge scorer knows {self.config.draft_depth} depths, the drafter proposes {depth}")
        scores = np.zeros((num_slots, depth, width, width), np.float32)
        if scores.size == 0:
            return scores
        if self.needs_hidden:
            state = self._gate_state(_known(hidden), (num_slots, depth, self.config.hidden_size))
        else:
            state = np.zeros((num_slots, depth, 0), np.float32)
        # Writeable and contiguous, for other arrays would be other types to compile for.
        _score_edges(
            np.require(root_tokens, np.int64, ["C", "W"]),
            np.require(candidate_ids, np.int32, ["C", "W"]),
            np.require(log_probs, np.float32, ["C", "W"]),
            state,
            self._tables,
            self._weights,
            self.reading == "conditional",
            scores,
        )
        return scores

    def _gate_state(self, hidden: torch.Tensor, shape: tuple[int, int, int]) -> Float32Array:
        """Return s * H(h_d), float32 [S, D, R], of hidden states [S, D, H]."""
        if tuple(hidden.shape) != shape:
            raise PolicyError(f"the edge scorer reads hidden states {list(shape)}, and was given {list(hidden.shape)}")
        if hidden.device.type == "cpu":
            # In one thread: waking torch's other threads for so little costs more than it saves, and far more on a
            # busy machine.
            return _project(np.require(hidden.float().numpy(), None, ["C", "W"]), self._gate_weights)
        state: Float32Array = (hidden.float() @ self._gate_hidden.T).cpu().numpy()
        return state


def root_mean_square(values: torch.Tensor) -> float:
    """Return the root mean square of all entries: the size by which a network's inputs are divided."""
    return float(values.float().square().mean().sqrt())


def fold_projection(network: TdesNetwork, projection: torch.Tensor) -> TdesNetwork:
    """Return a network for hidden states [.., H], made of one that was fitted on `hidden @ projection` [.., H'].

    Recorded rounds keep hidden states projected to few numbers; decoding has them whole. `projection` is [H, H'].
    """
    config = network.config
    if config.gate_rank == 0 or projection.shape[1] != config.hidden_size:
        raise PolicyError(f"a projection to {projection.shape[1]} numbers does not fit a gate for {config.hidden_size}")
    whole = TdesNetwork(replace(config, hidden_size=projection.shape[0]))
    weights = network.state_dict()
    whole.load_state_dict({**weights, "gate_hidden": weights["gate_hidden"] @ projection.float().T})
    return whole


def unfold_projection(network: TdesNetwork, projection: torch.Tensor) -> TdesNetwork:
    """Undo `fold_projection` for a projection [H, H'] with orthonormal columns: a network for projected hidden states.

    What the gate reads outside the projection's span, if it was not fitted through it, is lost.
    """
    config = network.config
    if config.gate_rank == 0 or projection.shape[0] != config.hidden_size:
        raise PolicyError(f"a projection of {projection.shape[0]} numbers does not fit a gate for {config.hidden_size}")
    small = TdesNetwork(replace(config, hidden_size=projection.shape[1]))
    weights = network.state_dict()
    small.load_state_dict({**weights, "gate_hidden": weights["gate_hidden"] @ projection.float()})
    return small


def hidden_projection(drafter_fingerprint: str, hidden_size: int, num_hidden: int) -> torch.Tensor:
    """Return the projection [H, H'] through which a drafter's hidden states are recorded: orthonormal columns.

    A function of the drafter alone, so that rounds of all runs with one drafter can be learned from together.

    Raises:
        PolicyError: `num_hidden` (H') is not between 1 and `hidden_size`.
    """
    if not 1 <= num_hidden <= hidden_size:
        raise PolicyError(f"hidden states of {hidden_size} numbers cannot be projected to {num_hidden}")
    seed = int.from_bytes(hashlib.sha256(drafter_fingerprint.encode()).digest()[:8], "big")
    # numpy's generator and float64: the same numbers with every version and on every machine, to rounding.
    drawn = np.random.default_rng(seed).standard_normal((hidden_size, num_hidden))
    columns, triangle = np.linalg.qr(drawn)
    return torch.from_numpy((columns * np.sign(np.diag(triangle))).astype(np.float32))


def _known(hidden: torch.Tensor | None) -> torch.Tensor:
    if hidden is None:
        raise PolicyError(
            "this edge scorer reads the drafter's hidden states, and there are none: choose one without a gate"
        )
    return hidden


def _vocabulary_tables(
    network: TdesNetwork, embeddings: torch.Tensor
) -> tuple[UInt16Array, UInt16Array, UInt16Array, UInt16Array]:
    """Return the four tables of `TokenTables` for the whole vocabulary, in that order: the bits of float16 numbers."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for rows in embeddings.split(_TABLE_ROWS):
        tables = network.token_tables(rows.to(network.weight.device))
        columns = (tables.parent, tables.child, tables.gate_parent, tables.gate_child)
        parts.append(tuple(column.half().cpu() for column in columns))
    whole = [torch.cat(column) for column in zip(*parts, strict=True)]
    if not all(bool(table.isfinite().all()) for table in whole):
        raise PolicyError("the edge scorer's tables hold numbers that are not finite, or too large for float16")
    parent, child, gate_parent, gate_child = (table.numpy().view(np.uint16) for table in whole)
    return parent, child, gate_parent, gate_child


@njit(cache=True)
def _project(hidden: Float32Array, weights: Float32Array) -> Float32Array:
    """Return hidden [S, D, H] @ weights [R, H] transposed, as float32 [S, D, R]."""
    num_slots, depth, _ = hidden.shape
    rank = len(weights)
    projected = np.empty((num_slots, depth, rank), np.float32)
    for slot in range(num_slots):
        for at in range(depth):
            for place in range(rank):
                projected[slot, at, place] = _dot(hidden[slot, at], weights, place)
    return projected


@njit(cache=True)
def _load(table: UInt16Array, token: int | np.int64, row: Float32Array) -> None:
    """Copy a token's row of float16 numbers, given as bits [V, n], to `row` [n].

    Sign, exponent and fraction go to their places in a float32; the exponents' biases differ by 112. Exact, but for
    infinities and NaN, which no table holds.
    """
    if not 0 <= token < len(table):
        raise IndexError("a token is not in the edge scorer's vocabulary")
    bits = row.view(np.int32)
    for unit in range(len(row)):
        half = np.int32(table[token, unit])
        bits[unit] = ((half & 0x8000) << 16) | ((half & 0x7FFF) << 13)
    for unit in range(len(row)):
        row[unit] *= np.float32(2.0**112)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _mixed_dot(weight: Float32Array, base: Float32Array, rows: Float32Array, row: int) -> np.float32:
    """Return weight . relu(base + rows[row]); sums may be reordered, so that they run in vector registers.

    A row by its number, not as an array of its own: to make one costs as much as the sum.
    """
    total = np.float32(0.0)
    for unit in range(len(weight)):
        mixed = base[unit] + rows[row, unit]
        total += weight[unit] * (mixed if mixed > 0 else np.float32(0.0))
    return total


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(left: Float32Array, rows: Float32Array, row: int) -> np.float32:
    """Return left . rows[row], as `_mixed_dot` sums."""
    total = np.float32(0.0)
    for place in range(len(left)):
        total += left[place] * rows[row, place]
    return total


@njit(cache=True)
def _normalise(scores: Float32Array, log_probs: Float32Array, probs: Float32Array) -> None:
    """Turn f [K] of one parent's edges into conditional scores, in place.

    `log softmax(log q + f) + log coverage = log q + f - log(sum of q exp(f) / sum of q)`. In this form f = 0 gives
    log q to the last bit, since both sums run over the same numbers: `probs`, which are q but for a factor.
    """
    highest = scores.max()
    tilted, plain = np.float32(0.0), np.float32(0.0)
    for candidate in range(len(scores)):
        tilted += probs[candidate] * np.exp(scores[candidate] - highest)
        plain += probs[candidate]
    shift = highest + np.log(max(tilted, np.float32(1e-37)) / plain)
    for candidate in range(len(scores)):
        scores[candidate] = log_probs[candidate] + (scores[candidate] - shift)


@njit(cache=True)
def _add_reliance(scores: Float32Array, trust: np.float32, log_probs: Float32Array) -> None:
    """Add trust * log q of every candidate [K] to one parent's edges [K]."""
    for candidate in range(len(scores)):
        scores[candidate] += trust * max(log_probs[candidate], _LEAST_LOG_Q)


@njit(cache=True)
def _score_edges(
    root_tokens: Int64Array,
    candidate_ids: Int32Array,
    log_probs: Float32Array,
    state: Float32Array,
    tables: tuple[UInt16Array, UInt16Array, UInt16Array, UInt16Array],
    weights: tuple[Float32Array, Float32Array, np.float32, Float32Array, Float32Array],
    is_conditional: bool,
    scores: Float32Array,
) -> None:
    """Fill `scores` [S, D, K, K], all 0 so far, for candidates [S, D, K] and gate states [S, D, R].

    `weights` are W_d e_d + b [D, h], s * w [h], s * b0, and r and t [D], or [0] without reliance. What a token
    contributes is read from the `tables`, once for each depth it stands at.
    """
    parent_table, child_table, gate_parent_table, gate_child_table = tables
    depth_terms, weight, offset, reliance, parent_reliance = weights
    num_slots, depth, num_candidates = candidate_ids.shape
    width, rank = len(weight), state.shape[2]
    children = np.empty((num_candidates, width), np.float32)
    gate_children = np.empty((num_candidates, rank), np.float32)
    base, gate = np.empty(width, np.float32), np.empty(rank, np.float32)
    probs = np.empty(num_candidates, np.float32)
    for slot in range(num_slots):
        for at in range(depth):
            row_log_probs = log_probs[slot, at]
            most_likely = row_log_probs.max()
            for child in range(num_candidates):
                _load(child_table, candidate_ids[slot, at, child], children[child])
                _load(gate_child_table, candidate_ids[slot, at, child], gate_children[child])
                probs[child] = np.exp(row_log_probs[child] - most_likely)
            for parent in range(1 if at == 0 else num_candidates):
                token = root_tokens[slot] if at == 0 else np.int64(candidate_ids[slot, at - 1, parent])
                _load(parent_table, token, base)
                _load(gate_parent_table, token, gate)
                base += depth_terms[at]
                gate *= state[slot, at]
                row = scores[slot, at, parent]
                for child in range(num_candidates):
                    row[child] = offset + _mixed_dot(weight, base, children, child) + _dot(gate, gate_children, child)
                if len(reliance) > 0:
                    of_parent = np.float32(0.0) if at == 0 else max(log_probs[slot, at - 1, parent], _LEAST_LOG_Q)
                    _add_reliance(row, reliance[at] + parent_reliance[at] * of_parent, row_log_probs)
                if is_conditional:
                    _normalise(row, row_log_probs, probs)
                else:
                    row += row_log_probs
