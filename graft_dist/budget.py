"""Budgets: how many draft nodes a round verifies for each slot.

Owns the state a choice may look at, how its parts are computed, and the budget policies. A policy is asked twice per
round: for an upper bound before anything is drafted, and for the budget proper once the trees are there.

`UtilityBudget` weighs what nodes are expected to bring against what they cost. What they bring is a gain model's
business: `PowerGain` knows the state alone (the paper's SABA, mended), `AcceptanceGain` adds up each node's chance of
being accepted. Fitting both is not this file's.

Dimension letters: S slots, D draft depth, K candidates per depth, H hidden size, N nodes of a tree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from graft_dist.cost_curve import BatchCostCurve, CostCurve
from graft_dist.counter_random import hash_counters
from graft_dist.draft_tree import DraftTree
from graft_dist.errors import PolicyError

FloatArray = npt.NDArray[np.float64]

HISTORY_WINDOW = 8
"""Rounds that the acceptance history looks back on."""

_GAIN_MEMORY = 32  # trees after which expected gains are mostly forgotten
_MIN_TREES = 8  # trees that must have been seen before rounds go without a draft

_LEAST_NORM = 1e-8  # of a hidden state, so that a cosine is never a division by 0

NO_LIMIT = 2**31 - 1
"""A budget that never binds: the tree is limited by its depth, its candidates and the room left."""


@dataclass(frozen=True)
class DraftState:
    """What is known about one slot before its budget is chosen (section 6 of the GRAFT paper, arXiv 2608.20375)."""

    conf: float  # draft confidence, see `confidence`; 0 where nothing has been drafted yet
    degen: float  # representation degeneration, see `degeneration`; 0 where nothing has been drafted yet
    hist: float  # acceptance history, see `acceptance_history`; 0 before a sequence's first round
    context_length: int  # committed rows in the KV cache
    max_budget: int  # nodes there is room for
    sequence_key: int  # stable number of the sequence, for draws that must be reproducible
    round_index: int  # 0 in a sequence's first round


def sequence_key(sequence_id: str) -> int:
    """Return the 64-bit number that stands for a sequence in draws, the same when its rounds are replayed."""
    return int.from_bytes(hashlib.sha256(sequence_id.encode()).digest()[:8], "big")


class BudgetPolicy(Protocol):
    """Chooses how many nodes to verify. `states[i]` and `trees[i]` belong to the same slot."""

    @property
    def needs_state(self) -> bool:
        """Whether `choose` reads `conf` and `degen`, which cost the engine a little to compute."""
        ...

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return, before drafting, the most nodes each slot's tree may get; 0 means: do not draft for this slot.

        `conf` and `degen` are 0 in these states, for drafting has not happened yet.
        """
        ...

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the number of nodes to verify for each slot, at most `trees[i].num_nodes`."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """The same budget in every round (DDTree's rule), as far as there is room."""

    budget: int

    needs_state = False

    def __post_init__(self) -> None:
        _check_budgets([self.budget])

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return the budget, or the room left where that is smaller."""
        return [max(0, min(self.budget, state.max_budget)) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the whole trees: their limit was the budget."""
        return [min(tree.num_nodes, limit) for tree, limit in zip(trees, self.limits(states), strict=True)]


@dataclass(frozen=True)
class ExploringBudget:
    """A budget drawn anew for every round from a list, so that recorded rounds identify gain and cost by budget.

    The draw is a hash of (seed, sequence, round): a repeated run draws the same budgets, whatever shares the batch.
    """

    budgets: tuple[int, ...]
    seed: int

    needs_state = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(self.budgets))
        if not self.budgets:
            raise PolicyError("exploring needs at least one budget to draw from")
        _check_budgets(self.budgets)

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return each slot's draw, or the room left where that is smaller."""
        return [max(0, min(self._draw(state), state.max_budget)) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the whole trees: their limit was the draw."""
        return [min(tree.num_nodes, limit) for tree, limit in zip(trees, self.limits(states), strict=True)]

    def _draw(self, state: DraftState) -> int:
        number = hash_counters(self.seed, state.sequence_key, state.round_index)
        return self.budgets[number % len(self.budgets)]


class GainModel(Protocol):
    """Expects what each further node of a tree brings."""

    @property
    def needs_state(self) -> bool:
        """Whether `marginals` reads `conf` and `degen`."""
        ...

    def marginals(self, tree: DraftTree, state: DraftState) -> FloatArray:
        """Return the accepted tokens expected of each node [N], given that all nodes before it are verified."""
        ...


@dataclass(frozen=True)
class PowerGain:
    """`G(B) = 1 + a(s) B^beta(s)`: a round's tokens by its budget, from the state alone.

    As the paper prints it, without the 1, a is a factor of the whole utility and drops out of its argmax: the budget is
    the same in every state. The bonus token, which comes whatever B, is what makes the state matter.
    `a = exp(u . [1, conf, degen, hist])` and `beta = sigmoid(w . [1, conf, degen, hist])`.
    """

    a_weights: tuple[float, float, float, float]  # u
    beta_weights: tuple[float, float, float, float]  # w
    first_hist: float = 2.0  # stands for `hist` in a sequence's first round

    needs_state = True

    def a_and_beta(self, state: DraftState) -> tuple[float, float]:
        """Return (a, beta) of a state."""
        hist = state.hist if state.hist > 0 else self.first_hist
        inputs = np.array([1.0, state.conf, state.degen, hist])
        a, beta = np.clip([inputs @ self.a_weights, inputs @ self.beta_weights], -20, 20)
        return float(np.exp(a)), float(1 / (1 + np.exp(-beta)))

    def marginals(self, tree: DraftTree, state: DraftState) -> FloatArray:
        """Return `a ((B + 1)^beta - B^beta)` for B = 0 .. N - 1: never rising, since beta is below 1."""
        a, beta = self.a_and_beta(state)
        return a * np.diff(np.arange(tree.num_nodes + 1.0) ** beta)


class Calibration(Protocol):
    """Maps path scores to the chance that the path's last node is accepted."""

    @property
    def needs_state(self) -> bool:
        """Whether `probabilities` reads `conf` and `degen`."""
        ...

    def probabilities(self, scores: npt.NDArray[np.float32], state: DraftState) -> FloatArray:
        """Return probabilities [N] of path scores [N]; a higher score never has the lower probability."""
        ...


@dataclass(frozen=True)
class RawProbabilities:
    """Path scores taken for logarithms of probabilities, as they come."""

    needs_state = False

    def probabilities(self, scores: npt.NDArray[np.float32], state: DraftState) -> FloatArray:
        """Return exp(score), at most 1."""
        return np.exp(np.minimum(scores.astype(np.float64), 0.0))


@dataclass(frozen=True)
class PiecewiseCalibration:
    """Probabilities by path score: linear between the points, constant beyond them."""

    scores: tuple[float, ...]  # rising
    chances: tuple[float, ...]  # between 0 and 1, never falling
    _points: tuple[FloatArray, FloatArray] = field(init=False, repr=False, compare=False)  # both, as arrays

    needs_state = False

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.chances) or not self.scores:
            raise PolicyError(f"a calibration has {len(self.scores)} scores and {len(self.chances)} chances")
        if np.any(np.diff(self.scores) <= 0) or np.any(np.diff(self.chances) < 0):
            raise PolicyError("the scores of a calibration must rise and its chances must not fall")
        if not all(0 <= chance <= 1 for chance in self.chances):
            raise PolicyError(f"the chances of a calibration must lie between 0 and 1, not {self.chances}")
        object.__setattr__(self, "_points", (np.array(self.scores), np.array(self.chances)))

    def probabilities(self, scores: npt.NDArray[np.float32], state: DraftState) -> FloatArray:
        """Return the curve at `scores`."""
        return self.at(scores.astype(np.float64))

    def at(self, scores: FloatArray) -> FloatArray:
        """Return the curve at `scores`, whatever the state."""
        return np.interp(scores, *self._points)


@dataclass(frozen=True)
class StateCalibration:
    """Probabilities by path score and state: a curve over `score + weights . [conf, degen, hist]`.

    A path score is shifted by what the state says, then read off the curve as `PiecewiseCalibration` does; so the
    chance never falls with the score, nor against the sign of its weight with any part of the state.
    """

    weights: tuple[float, float, float]  # of conf, degen and hist
    scores: tuple[float, ...]  # shifted scores, rising
    chances: tuple[float, ...]  # between 0 and 1, never falling
    first_hist: float = 2.0  # stands for `hist` in a sequence's first round
    _curve: PiecewiseCalibration = field(init=False, repr=False, compare=False)

    needs_state = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_curve", PiecewiseCalibration(self.scores, self.chances))  # the same rules

    def probabilities(self, scores: npt.NDArray[np.float32], state: DraftState) -> FloatArray:
        """Return the curve at the shifted `scores`."""
        hist = state.hist if state.hist > 0 else self.first_hist
        of_conf, of_degen, of_hist = self.weights
        shift = of_conf * state.conf + of_degen * state.degen + of_hist * hist
        return self._curve.at(scores.astype(np.float64) + shift)


@dataclass(frozen=True)
class AcceptanceGain:
    """`G(B) = 1 + sum of the first B nodes' acceptance probabilities`; with raw ones this is CaDDTree's."""

    calibration: Calibration = field(default_factory=RawProbabilities)

    @property
    def needs_state(self) -> bool:
        """What the calibration says."""
        return self.calibration.needs_state

    def marginals(self, tree: DraftTree, state: DraftState) -> FloatArray:
        """Return each node's probability [N]: a path brings one token more for each node of it that is accepted."""
        return self.calibration.probabilities(tree.scores[1:], state)


Form = Literal["ratio", "price"]
"""What a round's budget maximises.

ratio: expected tokens / milliseconds of this round.
price: expected tokens - price * milliseconds, where the price is the long-run rate of tokens per millisecond. Tokens
    per second over many rounds are a ratio of sums, not a mean of ratios; this form maximises them.
"""


@dataclass
class UtilityBudget:
    """Verifies the nodes that pay: joint budgets of all slots by what they bring, under a measured cost curve.

    One pass verifies all slots, each with as many rows as the largest tree has: its size is chosen so that the utility
    of the whole batch peaks, for trees of all sizes at once, so that this is the optimum under any curve.

    Whether to draft at all must be decided before anything is known of the round, so it is judged by the gains of the
    rounds so far: when the best such budget is slower than a plain round of the same batch, nothing is drafted
    (`may_rest`), except in every `probe_every`-th round, to see whether that still holds. Each such probe whose own
    trees do not pay either doubles the rounds until the next, up to `probe_seldom`.

    The object carries running averages: it belongs to one engine, or to one replay.
    """

    gain: GainModel
    cost: CostCurve
    max_budget: int = 256  # nodes of a tree, at most
    form: Form = "ratio"
    may_rest: bool = True  # whether rounds may go without a draft; otherwise each is drafted, as far as there is room
    probe_every: int = 32
    probe_seldom: int = 512
    horizon: int = 256  # rounds over which the price forgets

    _gains: FloatArray = field(init=False, repr=False)  # [max_budget], fading sum of past trees' marginals ...
    _num_gains: float = field(default=0.0, init=False, repr=False)  # ... and of ones
    _num_trees: int = field(default=0, init=False, repr=False)
    _tokens: float = field(default=0.0, init=False, repr=False)  # expected tokens of past rounds ...
    _ms: float = field(default=0.0, init=False, repr=False)  # ... and their milliseconds, both fading
    _num_rested: int = field(default=0, init=False, repr=False)  # rounds since the last draft
    _probe_after: int = field(default=0, init=False, repr=False)  # of them, one more of which is a probe
    _is_probe: bool = field(default=False, init=False, repr=False)  # whether the round under way is one

    def __post_init__(self) -> None:
        _check_budgets([self.max_budget])
        if self.form not in ("ratio", "price"):
            raise PolicyError(f"unknown form {self.form!r} of a utility: choose ratio or price")
        if self.probe_every < 1 or self.horizon < 1:
            raise PolicyError(f"probe_every and horizon must be at least 1, not {self.probe_every} and {self.horizon}")
        if self.probe_seldom < self.probe_every:
            raise PolicyError(f"probe_seldom {self.probe_seldom} is below probe_every {self.probe_every}")
        self._probe_after = self.probe_every
        self._gains = np.zeros(self.max_budget)

    @property
    def needs_state(self) -> bool:
        """What the gain model says."""
        return self.gain.needs_state

    @property
    def price(self) -> float:
        """Tokens per millisecond in the long run: plain decoding's rate until rounds have been seen."""
        return self._tokens / self._ms if self._ms > 0 else 1.0 / self.cost.round_ms[0]

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        """Return the room for each slot's tree, or 0 for all where drafting does not pay."""
        self._is_probe = False
        if self.may_rest and self._num_trees >= _MIN_TREES:
            plain_ms, drafted_ms = self._costs(states)
            expected = len(states) * (1.0 + np.cumsum(self._gains) / self._num_gains)
            if (expected / drafted_ms[1:]).max(initial=0.0) > len(states) / plain_ms:
                self._probe_after = self.probe_every
            elif self._num_rested + 1 < self._probe_after:
                self._num_rested += 1
                self._remember_rate(float(len(states)), plain_ms)
                return [0] * len(states)
            else:
                self._is_probe = True
        self._num_rested = 0
        return [max(0, min(self.max_budget, state.max_budget)) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        """Return the joint budgets of the batch. The draft is paid for by now, so it counts for budget 0 as well."""
        if not any(tree.num_nodes for tree in trees):
            return [0] * len(trees)
        marginals = [
            self.gain.marginals(tree, state)[: self.max_budget] for tree, state in zip(trees, states, strict=True)
        ]
        plain_ms, drafted_ms = self._costs(states)
        price = self.price if self.form == "price" else None
        budgets, gain = joint_budgets(marginals, drafted_ms, price)
        self._remember_gains(marginals)
        self._remember_rate(gain, float(drafted_ms[max(budgets)]))
        if self._is_probe:
            seems_to_pay = gain * plain_ms > len(states) * drafted_ms[max(budgets)]
            self._probe_after = self.probe_every if seems_to_pay else min(2 * self._probe_after, self.probe_seldom)
        return budgets

    def _costs(self, states: Sequence[DraftState]) -> tuple[float, FloatArray]:
        plain_ms, drafted_ms = batch_costs(self.cost, len(states), self.max_budget)
        context_ms = self.cost.token_ms * sum(state.context_length for state in states)
        return plain_ms + context_ms, drafted_ms + context_ms

    def _remember_gains(self, marginals: Sequence[FloatArray]) -> None:
        fade = 1.0 - 1.0 / _GAIN_MEMORY
        for own in marginals:
            if len(own) == 0:
                continue  # no room for a tree: says nothing about the next
            self._gains *= fade
            self._gains[: len(own)] += own
            self._num_gains = fade * self._num_gains + 1.0
            self._num_trees += 1

    def _remember_rate(self, tokens: float, ms: float) -> None:
        fade = 1.0 - 1.0 / self.horizon
        self._tokens = fade * self._tokens + tokens
        self._ms = fade * self._ms + ms


def joint_budgets(
    marginals: Sequence[FloatArray], costs: FloatArray, price: float | None = None
) -> tuple[list[int], float]:
    """Return the budgets of S slots that together are worth most, and the tokens expected of them.

    Every slot's rows are padded to those of the largest tree, so that a node up to its size costs nothing more: for
    each size the best budgets are the trees up to it, as far as they bring something, and the best size is looked for.

    Args:
        marginals: for each slot what each node of its tree brings, in the tree's order.
        costs: milliseconds of the batch's round by the nodes of its largest tree, at least as many as that has.
        price: tokens per millisecond, for `tokens - price * costs`; None for `tokens / costs`.
    """
    brought = np.zeros((len(marginals), 1 + max(len(own) for own in marginals)))  # by budget
    for slot, own in enumerate(marginals):
        brought[slot, 1 : 1 + len(own)] = own
    np.cumsum(brought, axis=1, out=brought)
    gains = len(marginals) + brought.sum(axis=0)
    spent = costs[: len(gains)]
    best = int(np.argmax(gains / spent if price is None else gains - price * spent))
    return brought[:, : best + 1].argmax(axis=1).tolist(), float(gains[best])


@lru_cache(maxsize=256)
def batch_costs(cost: CostCurve, num_slots: int, max_budget: int) -> tuple[float, FloatArray]:
    """Return milliseconds of a round of S slots: plain, and drafted by the nodes of the largest tree [B + 1].

    The curve is one sequence's by its nodes, so one row less than was verified; S slots verify S times the rows of the
    largest tree, root included. A plain round saves the draft: the curve's step between budget 0 and 1. Where a batch
    was timed itself, fewer slots lie between it and one sequence on a straight line.
    """
    if num_slots == 1 or not isinstance(cost, BatchCostCurve):
        return _row_costs(cost, num_slots, max_budget)
    share = min(1.0, (num_slots - 1) / (cost.num_slots - 1))
    alone_ms, alone_drafted_ms = _row_costs(cost, 1, max_budget)
    plain_ms, drafted_ms = _row_costs(cost.together, max(num_slots, cost.num_slots), max_budget)
    drafted_ms = (1.0 - share) * alone_drafted_ms + share * drafted_ms
    drafted_ms.setflags(write=False)
    return (1.0 - share) * alone_ms + share * plain_ms, drafted_ms


def _row_costs(cost: CostCurve, num_slots: int, max_budget: int) -> tuple[float, FloatArray]:
    table = cost.table(max(1, num_slots * (1 + max_budget) - 1))
    drafted_ms = table[num_slots - 1 :: num_slots][: 1 + max_budget].copy()
    if num_slots == 1:
        drafted_ms[0] = table[1]  # drafted, and the root verified alone
    drafted_ms.setflags(write=False)
    return float(drafted_ms[0] - (table[1] - table[0])), drafted_ms


def confidence(top1_log_probs: npt.NDArray[np.floating]) -> float:
    """Return `conf = mean over d of q_d(top-1)` from the top-1 log-probabilities [D]; 0.0 when D is 0."""
    return float(confidences(np.asarray(top1_log_probs)[None, :, None])[0])


def confidences(log_probs: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the draft confidence of each slot, float64 [S], from the candidates' log-probabilities [S, D, K]."""
    num_slots, depth, num_candidates = log_probs.shape
    if depth * num_candidates == 0:
        return np.zeros(num_slots)
    return np.exp(log_probs.max(axis=2).astype(np.float64)).mean(axis=1)


def degeneration(hidden: torch.Tensor | npt.NDArray[np.floating]) -> float:
    """Return the representation degeneration of one slot from the drafter's hidden states [D, H].

    `r_d = cos(h_d, h_{d+1})` for d = 1..D-1 and `degen = mean_d r_d + (r_{D-1} - r_1)`; 0.0 when D < 2.
    """
    return float(degenerations(torch.as_tensor(hidden)[None])[0])


def degenerations(hidden: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return `degeneration` of each slot, float64 [S], from hidden states [S, D, H] on any device, in any dtype."""
    if hidden.shape[1] < 2:
        return np.zeros(hidden.shape[0])
    states = hidden.float()
    if hidden.device.type == "cpu":  # compiled: for so few rows torch's calls take many times as long as the sums
        return _degenerations(np.require(states.numpy(), None, ["C", "W"]))
    norms = states.square().sum(dim=-1).sqrt().clamp_min(_LEAST_NORM)
    cosines = (states[:, :-1] * states[:, 1:]).sum(dim=-1) / (norms[:, :-1] * norms[:, 1:])
    return (cosines.mean(dim=1) + cosines[:, -1] - cosines[:, 0]).double().cpu().numpy()


@njit(cache=True)
def _degenerations(hidden: npt.NDArray[np.float32]) -> FloatArray:
    """Return `degeneration` of each slot, from hidden states [S, D, H] with D of at least 2."""
    num_slots, depth, _ = hidden.shape
    found = np.empty(num_slots, np.float64)
    for slot in range(num_slots):
        total = first = cosine = 0.0
        norm = max(math.sqrt(_inner(hidden[slot, 0], hidden[slot, 0])), _LEAST_NORM)
        for at in range(1, depth):
            last_norm, norm = norm, max(math.sqrt(_inner(hidden[slot, at], hidden[slot, at])), _LEAST_NORM)
            cosine = float(_inner(hidden[slot, at - 1], hidden[slot, at])) / (last_norm * norm)
            total += cosine
            if at == 1:
                first = cosine
        found[slot] = total / (depth - 1) + cosine - first
    return found


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _inner(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> np.float32:
    """Return left . right; sums may be reordered, so that they run in vector registers."""
    total = np.float32(0.0)
    for unit in range(len(left)):
        total += left[unit] * right[unit]
    return total


def acceptance_history(acceptance_lengths: Sequence[int], window: int = HISTORY_WINDOW) -> float:
    """Return `hist`: the mean of the last `window` acceptance lengths (bonus token included); 0.0 when there is none.

    0.0 cannot be taken for a measured value, since every round commits at least one token.
    """
    recent = acceptance_lengths[-window:]
    return sum(recent) / len(recent) if len(recent) > 0 else 0.0


def _check_budgets(budgets: Sequence[int]) -> None:
    for budget in budgets:
        if budget < 0:
            raise PolicyError(f"a budget must be at least 0 nodes, not {budget}")
