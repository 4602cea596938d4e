"""What a round costs by its budget: a curve given in a file, or fitted to recorded timings.

Owns the rule between the measured points: the plain round (budget 0) stands alone, since drafting is a step; between
two points the curve is linear, below the smallest drafted budget flat. Beyond the largest it goes on with the last
slope, or with that of all drafted points where it is steeper: noise can make the last two equal, and then any number of
further nodes would be free. One drafted point alone goes on as it rises from the plain round. Medians that fall as the
budget rises are noise: a fit pools them until the curve never falls. Three families are fitted: monotone, monotone and
convex, and the straight line of the GRAFT paper (arXiv 2608.20375). The context length enters as a price per committed
token, 0 unless it is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graft_dist.errors import PolicyError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds of a whole round by its number of verified nodes; refuses anything else with a PolicyError."""

    budgets: tuple[int, ...]  # rising; the first is 0, the plain round
    round_ms: tuple[float, ...]  # of one sequence; positive, never falling
    source: str  # where the numbers come from, for reports
    token_ms: float = 0.0  # milliseconds that each committed token of the context adds

    def __post_init__(self) -> None:
        if len(self.budgets) != len(self.round_ms) or len(self.budgets) < 2 or self.budgets[0] != 0:
            raise PolicyError(f"a cost curve needs milliseconds for budget 0 and one more, not for {self.budgets}")
        if any(right <= left for left, right in zip(self.budgets, self.budgets[1:], strict=False)):
            raise PolicyError(f"the budgets of a cost curve must rise, not go {self.budgets}")
        if not all(0 < ms < math.inf for ms in self.round_ms):
            raise PolicyError(f"the milliseconds of a cost curve must be above 0, not {self.round_ms}")
        if any(right < left for left, right in zip(self.round_ms, self.round_ms[1:], strict=False)):
            raise PolicyError(f"a cost curve must not fall as the budget rises, as {self.round_ms} does")
        if not 0 <= self.token_ms < math.inf:
            raise PolicyError(f"the milliseconds per token of context must be at least 0, not {self.token_ms}")

    def table(self, max_budget: int, context_length: float = 0.0) -> FloatArray:
        """Return the milliseconds of each budget 0 .. max_budget, float64 [max_budget + 1]."""
        budgets, drafted_ms = np.array(self.budgets[1:]), np.array(self.round_ms[1:])
        wanted = np.arange(max_budget + 1)
        table = np.interp(wanted, budgets, drafted_ms)
        if len(budgets) > 1:
            slope = max((drafted_ms[-1] - drafted_ms[at]) / (budgets[-1] - budgets[at]) for at in (-2, 0))
        else:
            slope = (drafted_ms[0] - self.round_ms[0]) / budgets[0]
        table += slope * np.maximum(wanted - budgets[-1], 0)
        table[0] = self.round_ms[0]
        return table + self.token_ms * context_length


@dataclass(frozen=True, kw_only=True)
class BatchCostCurve(CostCurve):
    """One sequence's curve, and that of a batch whose rounds were timed themselves.

    One sequence's times say what a number of rows costs, but not what a batch adds to it: a longer draft, and attention
    to several contexts. `budget.batch_costs` goes from one curve to the other as the slots fill up.
    """

    num_slots: int  # sequences of the batch, at least 2
    together: CostCurve  # of all of them, by rows, as `budget.batch_costs` reads it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_slots < 2:
            raise PolicyError(f"a batch has at least 2 sequences, not {self.num_slots}")


@dataclass(frozen=True)
class Timing:
    """Recorded rounds of one budget: medians over `num_rounds` rounds of one sequence's share."""

    budget: int  # nodes verified; 0 for rounds that were not drafted
    round_ms: float
    undrafted_ms: float  # verification and commit alone: what is left without a draft
    num_rounds: int


def read_cost_curve(path: Path) -> CostCurve:
    """Read a JSON object from budgets to milliseconds: `{"0": 46, "8": 60, "64": 116}`.

    Raises:
        PolicyError: a file that cannot be read or holds something else.
    """
    try:
        points = json.loads(path.read_text(encoding="utf-8"))
        pairs = sorted((int(budget), float(ms)) for budget, ms in points.items())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PolicyError(
            f'the cost file {path} is no JSON object such as {{"0": 46, "8": 60}} ({" ".join(str(error).split())})'
        ) from error
    return CostCurve(tuple(budget for budget, _ in pairs), tuple(ms for _, ms in pairs), f"the file {path}")


def fit_cost_curve(timings: Sequence[Timing], where: str) -> CostCurve | None:
    """Return the monotone curve through recorded timings, or None with fewer than two drafted budgets.

    Where no plain round was recorded, it is taken to cost what verification and commit do at the smallest budget.
    `where` names the hardware in `source`.
    """
    drafted = sorted((timing for timing in timings if timing.budget > 0), key=lambda timing: timing.budget)
    if len(drafted) < 2:
        return None
    plain = [timing for timing in timings if timing.budget == 0]
    counts = np.array([timing.num_rounds for timing in drafted], np.float64)
    drafted_ms = monotone_fit(np.array([timing.round_ms for timing in drafted]), counts)
    plain_ms = plain[0].round_ms if plain else drafted[0].undrafted_ms
    plain_source = f"plain rounds from {plain[0].num_rounds}" if plain else "plain rounds as without their draft"
    source = (
        f"monotone fit of {counts.sum():.0f} recorded rounds at {len(drafted)} budgets, {plain_source} ({where}), "
        "linear between budgets"
    )
    return CostCurve(
        (0, *(timing.budget for timing in drafted)), (min(plain_ms, float(drafted_ms[0])), *drafted_ms.tolist()), source
    )


def monotone_fit(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the never falling sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_total, last_length = blocks.pop()
            mean = (last_mean * last_total + mean * total) / (last_total + total)
            total, length = last_total + total, last_length + length
        blocks.append((mean, total, length))
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])


def line(plain_ms: float, fixed_ms: float, node_ms: float, source: str) -> CostCurve:
    """Return the paper's cost model, `fixed_ms + node_ms * B`, beside a plain round."""
    return CostCurve((0, 1, 2), (plain_ms, fixed_ms + node_ms, fixed_ms + 2 * node_ms), source)


def line_fit(budgets: FloatArray, values: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Return (fixed, per node), both at least 0, of the line nearest to `values` in weighted squares."""
    fixed, per_node = _nonnegative_fit(np.stack([np.ones(len(budgets)), budgets], axis=1), values, weights)
    return float(fixed), float(per_node)


def convex_fit(budgets: FloatArray, values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the convex, never falling sequence at `budgets` (rising) nearest to `values` >= 0 in weighted squares.

    Such a sequence is a constant plus hinges `max(B - b, 0)` at the budgets b before the last, each times at least 0.
    """
    hinges = np.maximum(budgets[:, None] - budgets[None, :-1], 0)
    basis = np.concatenate([np.ones((len(budgets), 1)), hinges], axis=1)
    return basis @ _nonnegative_fit(basis, values, weights)


def _nonnegative_fit(basis: FloatArray, values: FloatArray, weights: FloatArray) -> FloatArray:
    """Least squares with coefficients of at least 0 (Lawson and Hanson, 1974)."""
    scale = np.maximum(basis.max(axis=0), 1e-12)
    matrix = basis / scale * np.sqrt(weights)[:, None]
    wanted = values * np.sqrt(weights)
    found, is_free = np.zeros(basis.shape[1]), np.zeros(basis.shape[1], np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ wanted).max(initial=0)))
    for _ in range(10 * basis.shape[1]):
        pull = np.where(is_free, -np.inf, matrix.T @ (wanted - matrix @ found))
        if pull.max() <= tolerance:
            break
        is_free[int(pull.argmax())] = True
        while True:
            trial = np.zeros_like(found)
            trial[is_free] = np.linalg.lstsq(matrix[:, is_free], wanted, rcond=None)[0]
            falls = is_free & (trial <= 0)
            if not falls.any():
                break
            # Go towards the trial until the first coefficient reaches 0, and hold that one.
            step = (found[falls] / np.maximum(found[falls] - trial[falls], 1e-300)).min()
            found = found + step * (trial - found)
            is_free &= found > 1e-14
            found[~is_free] = 0.0
        found = trial
    return found / scale
