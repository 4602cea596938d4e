"""Fitting the budgets of GRAFT (arXiv 2608.20375, section on SABA) to recorded rounds: gain, calibration and cost.

Since trees are nested and the target's continuation does not depend on them, a replayed round shows its whole curve of
tokens by budget (`Observations`). From those: the parameters of `PowerGain`, and the chance that a node is accepted as
a monotone map of its path score and the round's state. Costs come from timed rounds alone.

Every fit is judged on rounds that it has not seen. Gains and calibrations are fitted crosswise for that: the caller
cuts the rounds into parts of different prompts, none of which the scorer was fitted on, and each part is judged by what
the others taught; what is kept at last is fitted to all parts. Rounds with a state or scores that are not finite, or
without a tree, are left out and counted.

Letters: S rounds, N nodes of a tree, D draft depth, B budget, M nodes over all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from graft_dist.budget import (
    Calibration,
    DraftState,
    PiecewiseCalibration,
    PowerGain,
    RawProbabilities,
    StateCalibration,
)
from graft_dist.cost_curve import CostCurve, convex_fit, line, line_fit, monotone_fit
from graft_dist.errors import PolicyError
from graft_dist.replay import RecordedRounds, Walk

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

GAIN_BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Budgets at which gain curves are compared; those above a round's own are left out."""

NUM_BINS = 20
_CURVE_POINTS = 48  # of a calibration: scores in groups of equal size
_MOST_NODES = 400_000  # nodes used for the weights of the state; a fixed stride drops the others
_FOLDS = 5
_TINY = 1e-6


# ---- what replayed rounds show


@dataclass(frozen=True, eq=False)
class Observations:
    """What S replayed rounds showed of one scorer's trees of up to N nodes."""

    conf: FloatArray  # [S]
    degen: FloatArray  # [S]
    hist: FloatArray  # [S], 0 in a sequence's first round and in dense rounds
    scores: FloatArray  # [S, N], path score of node n + 1; NaN beyond the tree
    is_accepted: BoolArray  # [S, N], node n + 1 lies on the path that the target took
    num_left: IntArray  # [S], tokens to the end of the answer, at least 1
    num_left_out: int  # rounds that were not used

    def __len__(self) -> int:
        return len(self.conf)

    @property
    def num_nodes(self) -> IntArray:
        """Nodes of each tree [S]."""
        return np.isfinite(self.scores).sum(axis=1)

    @property
    def tokens(self) -> FloatArray:
        """Tokens by budget 0 .. N, [S, N + 1]: a round's observed gain curve; flat beyond its tree."""
        accepted = np.concatenate([np.zeros((len(self), 1)), np.cumsum(self.is_accepted, axis=1)], axis=1)
        return np.minimum(1.0 + accepted, self.num_left[:, None])


def observe(rounds: RecordedRounds, walk: Walk, max_budget: int) -> Observations:
    """Read off what `replay.walk_rounds` found with trees of `max_budget` (N) nodes."""
    trees, num_nodes = walk.trees, walk.trees.num_nodes.astype(np.int64)
    scores = np.full((len(rounds), max_budget), np.nan)
    places = np.arange(1, trees.tokens.shape[1])  # fewer than N where no tree can have so many
    scores[:, : len(places)] = np.where(places <= num_nodes[:, None], trees.scores[:, 1:].astype(np.float64), np.nan)
    # Node 0 marks a depth that the tree does not hold; nodes beyond the answer's end bring nothing.
    depths = np.arange(walk.path_nodes.shape[1])
    held = np.where(depths < rounds.num_left[:, None], walk.path_nodes, 0)
    is_accepted = np.zeros((len(rounds), max_budget + 1), np.bool_)
    np.put_along_axis(is_accepted, held, True, axis=1)
    conf, degen, hist = (np.asarray(column, np.float64) for column in (rounds.conf, rounds.degen, rounds.hist))
    is_good = np.isfinite(conf + degen + hist) & (num_nodes > 0)
    return Observations(
        conf=conf[is_good],
        degen=degen[is_good],
        hist=hist[is_good],
        scores=scores[is_good],
        is_accepted=is_accepted[is_good, 1:],
        num_left=rounds.num_left[is_good].astype(np.int64),
        num_left_out=int((~is_good).sum()),
    )


def join_observations(parts: Sequence[Observations]) -> Observations:
    """Return the rounds of all parts, which must have trees of one budget, as one.

    Raises:
        PolicyError: no part, or parts of several budgets.
    """
    widths = {part.scores.shape[1] for part in parts}
    if len(widths) != 1:
        raise PolicyError(f"observations of one budget can be joined, not of {sorted(widths)}")
    columns = ("conf", "degen", "hist", "scores", "is_accepted", "num_left")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    return Observations(**joined, num_left_out=sum(part.num_left_out for part in parts))


def _known_hist(observed: Observations) -> tuple[FloatArray, float]:
    """`hist` with the mean of the known ones where there is none, and that mean (2.0 where none is known)."""
    is_known = observed.hist > 0
    first = float(observed.hist[is_known].mean()) if is_known.any() else 2.0
    return np.where(is_known, observed.hist, first), first


def _others(parts: Sequence[Observations]) -> list[Observations]:
    """For each part all the others together.

    Raises:
        PolicyError: fewer than two parts, or one without rounds.
    """
    if len(parts) < 2 or not all(len(part) for part in parts):
        sizes = ", ".join(str(len(part)) for part in parts) or "none"
        raise PolicyError(
            f"budgets are fitted crosswise to at least two parts with trees, and there are parts of {sizes} rounds"
        )
    return [join_observations([*parts[:at], *parts[at + 1 :]]) for at in range(len(parts))]


# ---- gain


@dataclass(frozen=True)
class GainFit:
    """`PowerGain` as it was fitted, judged crosswise by root mean square error in tokens."""

    gain: PowerGain  # fitted to all parts
    crossed: tuple[PowerGain, ...]  # for each part, fitted to the others
    error: float
    constant_error: float  # of the best a and beta that no state enters
    curve: tuple[tuple[int, float, float], ...]  # budget, mean tokens observed, mean tokens expected; crosswise
    num_rounds: int  # of all parts


def fit_gain(parts: Sequence[Observations]) -> GainFit:
    """Fit a(s) and beta(s) of `1 + a B^beta` to the observed curves by least squares over rounds and budgets.

    Raises:
        PolicyError: fewer than two parts, or one without rounds.
    """
    others, every = _others(parts), join_observations(parts)
    crossed = tuple(_fit_state_gain(other) for other in others)
    constant = [_fit_power(other, np.zeros((len(other), 3)), _known_hist(other)[1]) for other in others]
    budgets = _budgets_of(every)
    expected = np.concatenate([_expected(gain, part, budgets) for gain, part in zip(crossed, parts, strict=True)])
    flat = np.concatenate([_expected(gain, part, budgets) for gain, part in zip(constant, parts, strict=True)])
    curve = zip(
        budgets.tolist(), every.tokens[:, budgets].mean(axis=0).tolist(), expected.mean(axis=0).tolist(), strict=True
    )
    return GainFit(
        gain=_fit_state_gain(every),
        crossed=crossed,
        error=_gain_error(expected, every, budgets),
        constant_error=_gain_error(flat, every, budgets),
        curve=tuple(curve),
        num_rounds=len(every),
    )


def _fit_state_gain(observed: Observations) -> PowerGain:
    hist, first_hist = _known_hist(observed)
    return _fit_power(observed, np.stack([observed.conf, observed.degen, hist], axis=1), first_hist)


def _budgets_of(observed: Observations) -> IntArray:
    return np.array([budget for budget in GAIN_BUDGETS if budget <= observed.scores.shape[1]], np.int64)


def _fit_power(observed: Observations, states: FloatArray, first_hist: float) -> PowerGain:
    """Least squares over eight weights; the states enter standardised, so that their sizes do not matter."""
    budgets = _budgets_of(observed)
    mean, spread = states.mean(axis=0), states.std(axis=0)
    spread = np.where(spread > 1e-9, spread, np.inf)  # a state that never changes gets no weight
    inputs = torch.from_numpy(np.concatenate([np.ones((len(states), 1)), (states - mean) / spread], axis=1))
    wanted = torch.from_numpy(observed.tokens[:, budgets])
    is_shown = torch.from_numpy(budgets <= observed.num_nodes[:, None])
    log_budgets = torch.from_numpy(np.log(budgets.astype(np.float64)))
    weights = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        a, beta = _power_terms(inputs, weights)
        error = 1 + a * torch.exp(beta * log_budgets) - wanted
        # A little pull to zero: rounds that are all alike do not decide every weight.
        return (error.square() * is_shown).sum() / is_shown.sum() + 1e-6 * weights.square().sum()

    _minimise(loss, [weights])
    fitted = weights.detach().numpy()
    own = fitted[:, 1:] / spread
    plain = np.concatenate([fitted[:, :1] - (own @ mean)[:, None], own], axis=1)
    return PowerGain(_four(plain[0]), _four(plain[1]), first_hist)


def _four(row: FloatArray) -> tuple[float, float, float, float]:
    return float(row[0]), float(row[1]), float(row[2]), float(row[3])


def _power_terms(inputs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a and beta of each round, [S, 1] each."""
    shown = (inputs @ weights.T).clamp(-20, 20)
    return shown[:, :1].exp(), shown[:, 1:].sigmoid()


def _expected(gain: PowerGain, observed: Observations, budgets: IntArray) -> FloatArray:
    """The gain model's tokens [S, budgets]."""
    hist = np.where(observed.hist > 0, observed.hist, gain.first_hist)
    inputs = np.stack([np.ones(len(observed)), observed.conf, observed.degen, hist], axis=1)
    a, beta = (np.clip(inputs @ np.array(weights), -20, 20) for weights in (gain.a_weights, gain.beta_weights))
    return 1 + np.exp(a)[:, None] * budgets ** (1 / (1 + np.exp(-beta)))[:, None]


def _gain_error(expected: FloatArray, observed: Observations, budgets: IntArray) -> float:
    is_shown = budgets <= observed.num_nodes[:, None]
    return float(np.sqrt(((expected - observed.tokens[:, budgets]) ** 2)[is_shown].mean()))


# ---- calibration


@dataclass(frozen=True)
class ReliabilityBin:
    """Nodes of similar predicted chance."""

    predicted: float  # mean
    observed: float  # share that was accepted
    num_nodes: int


@dataclass(frozen=True)
class CalibrationFit:
    """One calibration, judged crosswise."""

    name: str  # raw, piecewise or state
    calibration: Calibration  # fitted to all parts
    crossed: tuple[Calibration, ...]  # for each part, fitted to the others
    log_loss: float  # mean over nodes, in nats
    error: float  # expected calibration error: mean over nodes of their bin's |predicted - observed|
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True)
class CalibrationFits:
    """All calibrations that were tried."""

    fits: tuple[CalibrationFit, ...]
    num_rounds: int  # of all parts
    num_left_out: int

    @property
    def best(self) -> CalibrationFit:
        """The one with the lowest log loss; the simpler one of equals."""
        return min(self.fits, key=lambda fit: fit.log_loss)


def fit_calibrations(parts: Sequence[Observations]) -> CalibrationFits:
    """Fit and judge: the scores as they come, a curve over the score, and one over the score shifted by the state.

    Raises:
        PolicyError: fewer than two parts, or one without rounds.
    """
    others, every = _others(parts), join_observations(parts)
    tried: Mapping[str, Callable[[Observations], Calibration]] = {
        "raw": lambda observed: RawProbabilities(),
        "piecewise": fit_piecewise,
        "state": fit_state,
    }
    fits = []
    for name, fit in tried.items():
        crossed = tuple(fit(other) for other in others)
        judged = [node_chances(calibration, part) for calibration, part in zip(crossed, parts, strict=True)]
        fits.append(CalibrationFit(name, fit(every), crossed, *_judge(np.concatenate(judged), every)))
    return CalibrationFits(tuple(fits), len(every), every.num_left_out)


def fit_piecewise(observed: Observations) -> PiecewiseCalibration:
    """Fit chances that rise with the path score alone (isotonic regression over groups of equal size)."""
    is_node = np.isfinite(observed.scores)
    scores, chances = _curve(observed.scores[is_node], observed.is_accepted[is_node])
    return PiecewiseCalibration(scores, chances)


def fit_state(observed: Observations) -> StateCalibration:
    """Fit how the state shifts path scores, then the curve over the shifted ones.

    The shift comes from a logistic regression of acceptance on the score and the state: the state's weights over the
    score's. Where the score does not help (weight of 0 or less) there is no shift.
    """
    hist, first_hist = _known_hist(observed)
    states = np.stack([observed.conf, observed.degen, hist], axis=1)
    is_node = np.isfinite(observed.scores)
    rows = np.nonzero(is_node)[0]
    weights = _logistic_weights(observed.scores[is_node], states[rows], observed.is_accepted[is_node])
    shifted = observed.scores + (states @ weights)[:, None]
    scores, chances = _curve(shifted[is_node], observed.is_accepted[is_node])
    return StateCalibration((float(weights[0]), float(weights[1]), float(weights[2])), scores, chances, first_hist)


def _judge(chances: FloatArray, observed: Observations) -> tuple[float, float, tuple[ReliabilityBin, ...]]:
    """Log loss, error and bins of the chances [S, N] that every node was given; see `CalibrationFit`."""
    is_node = np.isfinite(observed.scores)
    given, accepted = chances[is_node], observed.is_accepted[is_node].astype(np.float64)
    kept = np.clip(given, _TINY, 1 - _TINY)
    log_loss = float(-(accepted * np.log(kept) + (1 - accepted) * np.log1p(-kept)).mean())
    bins = reliability(given, accepted)
    off = sum(one.num_nodes * abs(one.predicted - one.observed) for one in bins) / len(given)
    return log_loss, float(off), bins


def node_chances(calibration: Calibration, observed: Observations) -> FloatArray:
    """Return the chance of every node [S, N]; NaN beyond a tree."""
    chances = np.full(observed.scores.shape, np.nan)
    states = zip(observed.conf.tolist(), observed.degen.tolist(), observed.hist.tolist(), strict=True)
    for row, (conf, degen, hist), size in zip(range(len(observed)), states, observed.num_nodes.tolist(), strict=True):
        state = DraftState(conf, degen, hist, context_length=0, max_budget=0, sequence_key=0, round_index=0)
        chances[row, :size] = calibration.probabilities(observed.scores[row, :size].astype(np.float32), state)
    return chances


def reliability(chances: FloatArray, accepted: FloatArray) -> tuple[ReliabilityBin, ...]:
    """Group nodes [M] by predicted chance, in `NUM_BINS` bins of equal width; empty bins are left out."""
    places = np.minimum((chances * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    counts, sums, wins = (
        np.bincount(places, weights, NUM_BINS) for weights in (np.ones(len(chances)), chances, accepted)
    )
    return tuple(
        ReliabilityBin(float(sums[at] / counts[at]), float(wins[at] / counts[at]), int(counts[at]))
        for at in np.flatnonzero(counts)
    )


def _curve(scores: FloatArray, accepted: BoolArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Points (score, chance) of a curve that never falls; equal scores always share a group."""
    order = np.argsort(scores, kind="stable")
    ordered, wins = scores[order], accepted[order].astype(np.float64)
    wanted = np.unique(np.linspace(0, len(ordered), _CURVE_POINTS + 1).astype(np.int64)[1:-1])
    edges = np.unique(np.searchsorted(ordered, ordered[wanted], "left")) if len(wanted) else wanted
    starts = np.unique(np.concatenate([[0], edges])).astype(np.int64)
    counts = np.diff(np.concatenate([starts, [len(ordered)]])).astype(np.float64)
    means = np.add.reduceat(ordered, starts) / counts
    chances = np.clip(monotone_fit(np.add.reduceat(wins, starts) / counts, counts), 0.0, 1.0)
    return tuple(means.tolist()), tuple(chances.tolist())


def _logistic_weights(scores: FloatArray, states: FloatArray, accepted: BoolArray) -> FloatArray:
    """What each part of the state [3] is worth in units of the path score."""
    step = max(1, len(scores) // _MOST_NODES)
    columns = np.concatenate([scores[::step, None], states[::step]], axis=1)
    mean, spread = columns.mean(axis=0), columns.std(axis=0)
    spread = np.where(spread > 1e-9, spread, np.inf)
    inputs = torch.from_numpy((columns - mean) / spread)
    labels = torch.from_numpy(accepted[::step].astype(np.float64))
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        logits = inputs @ weights + offset
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return entropy + 1e-6 * weights.square().sum()

    _minimise(loss, [weights, offset])
    own = weights.detach().numpy() / spread
    return own[1:] / own[0] if own[0] > 1e-3 else np.zeros(3)


def _minimise(loss: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> None:
    """Bring a smooth loss to its minimum in place."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


# ---- cost


@dataclass(frozen=True, eq=False)
class TimedRounds:
    """Rounds of one sequence at a time that were timed on one hardware."""

    budgets: IntArray  # [S], nodes verified; 0 for rounds that were not drafted
    round_ms: FloatArray  # [S], the whole round
    undrafted_ms: FloatArray  # [S], verification and commit alone
    context_lengths: IntArray  # [S]
    sequence_keys: npt.NDArray[np.uint64]  # [S], rounds of a sequence stay together when rounds are held out

    def __len__(self) -> int:
        return len(self.budgets)

    def take(self, rows: BoolArray) -> TimedRounds:
        """Return the rounds where `rows` [S] is true."""
        return TimedRounds(*(getattr(self, name)[rows] for name in TimedRounds.__dataclass_fields__))


@dataclass(frozen=True)
class CostFit:
    """One cost model; the error is the mean absolute one on held-out rounds, in milliseconds."""

    name: str  # line, convex or monotone; "+context" when the context length enters
    curve: CostCurve
    error_ms: float


@dataclass(frozen=True)
class CostFits:
    """All cost models that were tried on one hardware; their curves are fitted on all rounds."""

    hardware: str
    fits: tuple[CostFit, ...]
    num_rounds: int
    num_left_out: int
    run_ids: tuple[str, ...] = ()  # of the rounds, where they are a store's

    @property
    def best(self) -> CostFit:
        """The one that predicts held-out rounds best; of those within a thousandth of it, the simplest."""
        least = min(fit.error_ms for fit in self.fits)
        return next(fit for fit in self.fits if fit.error_ms <= 1.001 * least + 1e-9)


def fit_costs(timed: TimedRounds, hardware: str, min_rounds: int = 5) -> CostFits | None:
    """Fit a line, a convex and a monotone curve, each with and without the context length, and judge them.

    A fifth of the sequences is held out for judging. Medians by budget are fitted, so that single disturbed rounds do
    not count; budgets with fewer than `min_rounds` rounds are left out. None with fewer than two drafted budgets.
    """
    sound = np.isfinite(timed.round_ms) & (timed.round_ms > 0) & np.isfinite(timed.undrafted_ms)
    values, counts = np.unique(timed.budgets[sound], return_counts=True)
    rows = sound & np.isin(timed.budgets, values[counts >= min_rounds])
    used = timed.take(rows)
    is_held_out = used.sequence_keys % np.uint64(_FOLDS) == 0
    training, judged = used.take(~is_held_out), used.take(is_held_out)
    if min(len(set(part.budgets[part.budgets > 0].tolist())) for part in (training, used)) < 2 or len(judged) == 0:
        return None
    fits = []
    for with_context in (False, True):
        for family in ("line", "convex", "monotone"):  # simplest first
            error = _cost_error(_fit_cost(training, family, with_context, hardware), judged)
            name = family + ("+context" if with_context else "")
            fits.append(CostFit(name, _fit_cost(used, family, with_context, hardware), error))
    return CostFits(hardware, tuple(fits), len(used), int((~rows).sum()))


def _fit_cost(timed: TimedRounds, family: str, with_context: bool, hardware: str) -> CostCurve:
    token_ms = _context_slope(timed) if with_context else 0.0
    left_ms = timed.round_ms - token_ms * timed.context_lengths
    budgets = np.unique(timed.budgets[timed.budgets > 0])
    medians = np.array([np.median(left_ms[timed.budgets == budget]) for budget in budgets])
    weights = np.array([(timed.budgets == budget).sum() for budget in budgets], np.float64)
    is_plain = timed.budgets == 0
    if is_plain.any():
        plain_ms = float(np.median(left_ms[is_plain]))
    else:
        smallest = timed.budgets == budgets[0]
        plain_ms = float(np.median(timed.undrafted_ms[smallest] - token_ms * timed.context_lengths[smallest]))
    source = f"{family} fit of {len(timed)} recorded rounds at {len(budgets)} budgets ({hardware})"
    sizes = budgets.astype(np.float64)
    if family == "line":
        fixed_ms, node_ms = line_fit(sizes, medians, weights)
        return replace(line(min(plain_ms, fixed_ms + node_ms), fixed_ms, node_ms, source), token_ms=token_ms)
    fitted = monotone_fit(medians, weights) if family == "monotone" else convex_fit(sizes, medians, weights)
    # Rounding of a fit must not make a curve fall.
    drafted_ms = np.maximum.accumulate(fitted)
    first = min(plain_ms, float(drafted_ms[0]))
    return CostCurve((0, *budgets.tolist()), (first, *drafted_ms.tolist()), source, token_ms)


def _context_slope(timed: TimedRounds) -> float:
    """Milliseconds per committed token, at least 0, from deviations within each budget; outliers are clipped."""
    ms, tokens = timed.round_ms.copy(), timed.context_lengths.astype(np.float64)
    for budget in np.unique(timed.budgets):
        own = timed.budgets == budget
        ms[own] -= np.median(ms[own])
        tokens[own] -= tokens[own].mean()
    bound = 5 * float(np.median(np.abs(ms))) + _TINY
    ms = np.clip(ms, -bound, bound)
    spread = float((tokens**2).sum())
    # Never so much that a round without context would cost nothing.
    most = float(timed.round_ms.min()) / max(1.0, float(timed.context_lengths.max())) / 2
    return float(np.clip((ms * tokens).sum() / spread, 0.0, most)) if spread > 0 else 0.0


def _cost_error(curve: CostCurve, timed: TimedRounds) -> float:
    table = curve.table(int(timed.budgets.max()))
    expected = table[timed.budgets] + curve.token_ms * timed.context_lengths
    return float(np.abs(expected - timed.round_ms).mean())
