"""What a learning run reports where its choice is an unusual one."""

from __future__ import annotations

from typing import Any

import pytest

from graft_dist.replay import ALL_TASKS
from graft_dist.trial import Comparison, Interval
from jobs.budget_candidate import CADDTREE, Candidate, fixed, fixed_candidates
from jobs.training_report import Choice, Report


def report(chosen: Candidate, max_budget: int = 64) -> Report:
    best = fixed("marginal", 8)
    nothing: Any = None
    choice = Choice(chosen, best, [chosen, best], [], {}, {})
    rivals = [name for name in (best.name, CADDTREE) if name != chosen.name]
    same = Interval(1.0, 1.0, 1.0), Interval(0.0, 0.0, 0.0)
    comparisons = [Comparison(chosen.name, name, ALL_TASKS, 1.25, 1.125, 1.5, *same) for name in rivals]
    return Report(choice, [], nothing, [], comparisons, max_budget)


def test_the_headline_of_a_run_that_finds_nothing_better_than_ddtree() -> None:
    assert report(fixed("marginal", 8)).headline.endswith("DDTree, which nothing that was learned beats")
    assert "1.250 (1.125 to 1.500) times" in report(fixed("tdes", 8)).headline


@pytest.mark.parametrize(("max_budget", "tried", "reported"), [(3, [3], [3]), (5, [4, 5], [5]), (9, [4, 6, 8, 9], [8])])
def test_reported_budgets_are_tried_however_small_the_largest_is(
    max_budget: int, tried: list[int], reported: list[int]
) -> None:
    assert [candidate.fixed_budget for candidate in fixed_candidates("tdes", max_budget)] == tried
    assert report(fixed("tdes", 3), max_budget).budgets == reported
