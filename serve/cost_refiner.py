"""`CostRefiner`: keeps the cost curve of the policy in force near what rounds really take.

A curve measured at start, or on another day, is off as soon as something else shares the machine or contexts grow. The
refiner watches rounds, and every so many moves the curve's points: those that were met to the times seen there, the
others by the same factor on average. A batch verifies more rows than the curve may have been measured for: it gets
points of its own, so that its times do not move the last point of one sequence's. Runs on the decode thread, between
rounds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from graft_dist.budget import UtilityBudget
from graft_dist.cost_curve import CostCurve, monotone_fit
from graft_dist.policy import DecodingPolicy
from serve.observer import StepReport, Submission

_EVERY = 256  # rounds between two refinements
_MIN_ROUNDS = 8  # rounds at a point that move it
_KEPT = 64  # last rounds kept for each point


class CostRefiner:
    """A `DecodeObserver`. `policy` returns what is in force; policies that weigh no costs are left alone."""

    def __init__(self, policy: Callable[[], DecodingPolicy]) -> None:
        self._policy = policy
        self._cost: CostCurve | None = None  # of the rounds kept
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._num_rounds = 0
        self.num_refined = 0

    def added(self, submission: Submission) -> bool:
        """Wants no records."""
        return False

    def stepped(self, report: StepReport) -> None:
        """Keep the round's time at the nearest point of the curve; refine it when it is time."""
        budget = self._policy().budget
        traces = [event.trace for event in report.events if event.trace is not None]
        if not traces or not isinstance(budget, UtilityBudget):
            return
        trace = traces[0]
        if budget.cost is not self._cost:
            self._begin(budget.cost)
        round_ms = (trace.draft_ns + trace.build_ns + trace.verify_ns + trace.commit_ns) / 1e6
        # The curve is one sequence's by its nodes, so by one row less than was verified, padding included (see
        # `batch_costs`).
        nodes = trace.batch_size * (1 + max(own.budget for own in traces)) - 1
        if trace.batch_rows == trace.batch_size:  # nothing but roots was verified
            if trace.draft_ns * 50 > trace.verify_ns:
                return  # a draft that was paid for and not used: no point of the curve
            if nodes > 0:  # several sequences without a draft, which is all that they lack of a point
                drafted, plain = budget.cost.table(1)[::-1]
                round_ms += float(drafted - plain)
        if nodes > budget.cost.budgets[-1]:
            self._cost = budget.cost = _with_points(budget.cost, nodes)
        self._times[self._point(budget.cost, nodes)].append(round_ms / self._expected(budget.cost, nodes))
        self._num_rounds += 1
        if self._num_rounds % _EVERY == 0:
            budget.cost = self._refined(budget.cost)
            self._begin(budget.cost)
            self.num_refined += 1

    def _begin(self, cost: CostCurve) -> None:
        self._cost = cost
        self._times.clear()

    def _point(self, cost: CostCurve, nodes: int) -> int:
        if nodes == 0:
            return 0
        return 1 + int(np.abs(np.array(cost.budgets[1:]) - nodes).argmin())

    def _expected(self, cost: CostCurve, nodes: int) -> float:
        return float(cost.table(max(1, nodes))[nodes])

    def _refined(self, cost: CostCurve) -> CostCurve:
        """The curve with each point at what was seen near it; never falling, as a curve has to be.

        What the contexts cost is part of what was seen, so it is not counted by their length any more.
        """
        factors = {point: float(np.median(times)) for point, times in self._times.items() if len(times) >= _MIN_ROUNDS}
        if not factors:
            return cost
        everywhere = float(np.median([time for times in self._times.values() for time in times]))
        moved = np.array([ms * factors.get(point, everywhere) for point, ms in enumerate(cost.round_ms)])
        weights = np.array([float(1 + len(self._times[point])) for point in range(len(moved))])
        drafted = monotone_fit(moved[1:], weights[1:])
        return replace(
            cost,
            round_ms=(min(float(moved[0]), float(drafted[0])), *drafted.tolist()),
            token_ms=0.0,
            source=f"{cost.source.removesuffix(', refined while running')}, refined while running",
        )


def _with_points(cost: CostCurve, nodes: int) -> CostCurve:
    """The same curve with further points, each at twice the budget of the one before, as far as `nodes`."""
    budgets = list(cost.budgets)
    while budgets[-1] < nodes:
        budgets.append(2 * budgets[-1])
    return replace(cost, budgets=tuple(budgets), round_ms=tuple(cost.table(budgets[-1])[budgets].tolist()))
