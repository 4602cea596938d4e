"""Budget policies and the state they may look at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from graft_dist.budget import (
    NO_LIMIT,
    BudgetPolicy,
    DraftState,
    ExploringBudget,
    FixedBudget,
    acceptance_history,
    confidence,
    confidences,
    degeneration,
    degenerations,
)
from graft_dist.draft_tree import DraftTree, build_tree, root_tree
from graft_dist.errors import PolicyError

STATE = DraftState(conf=0.0, degen=0.0, hist=0.0, context_length=10, max_budget=1000, sequence_key=1, round_index=0)


def tree_of(num_nodes: int) -> DraftTree:
    return build_tree(0, np.arange(num_nodes, dtype=np.int32)[None], np.zeros((1, 1, num_nodes), np.float32), num_nodes)


def test_fixed_budget_is_bounded_by_room_and_tree() -> None:
    policy: BudgetPolicy = FixedBudget(16)
    states = [STATE, replace(STATE, max_budget=5), replace(STATE, max_budget=0)]
    assert policy.limits(states) == [16, 5, 0]
    assert policy.choose([tree_of(16), tree_of(3), root_tree(0)], states) == [16, 3, 0]
    assert policy.choose([tree_of(40)], states[:1]) == [16]
    assert not policy.needs_state


def test_unlimited_budget() -> None:
    assert FixedBudget(NO_LIMIT).choose([tree_of(7)], [STATE]) == [7]


def test_exploring_draws_by_sequence_and_round() -> None:
    policy: BudgetPolicy = ExploringBudget((0, 4, 8, 16), seed=3)
    states = [replace(STATE, sequence_key=key, round_index=index) for key in range(100) for index in range(100)]
    drawn = policy.limits(states)
    assert drawn == policy.limits(states)
    assert drawn[5:6] == policy.limits(states[5:6])  # whatever shares the batch
    counts = Counter(drawn)
    assert set(counts) == {0, 4, 8, 16}
    assert all(2300 < count < 2700 for count in counts.values())
    assert drawn != ExploringBudget((0, 4, 8, 16), seed=4).limits(states)
    rows = np.array(drawn).reshape(100, 100)
    assert len({tuple(row) for row in rows}) == 100  # sequences do not draw alike
    trees = [tree_of(16) for _ in states[:20]]
    assert policy.choose(trees, states[:20]) == drawn[:20]


def test_exploring_is_bounded_by_room() -> None:
    assert ExploringBudget((8,), seed=0).limits([replace(STATE, max_budget=3)]) == [3]


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(PolicyError, match="-1"):
        FixedBudget(-1)
    with pytest.raises(PolicyError, match="-2"):
        ExploringBudget((4, -2), seed=0)
    with pytest.raises(PolicyError, match="at least one"):
        ExploringBudget((), seed=0)


def test_confidence_is_the_mean_top_probability() -> None:
    probs = np.array([[0.9, 0.1], [0.5, 0.3], [0.2, 0.4]])
    assert confidence(np.log(probs.max(axis=1)).astype(np.float32)) == pytest.approx((0.9 + 0.5 + 0.4) / 3)
    np.testing.assert_allclose(confidences(np.log(np.stack([probs, probs / 2]))), [0.6, 0.3])
    assert confidence(np.zeros(0)) == 0.0


def test_degeneration_by_hand() -> None:
    hidden = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])
    r = [np.sqrt(0.5), 1.0, -1.0]
    expected = np.mean(r) + (r[-1] - r[0])
    assert degeneration(hidden) == pytest.approx(expected, abs=1e-6)
    assert degeneration(torch.tensor(hidden, dtype=torch.bfloat16)) == pytest.approx(expected, abs=1e-2)
    batch = degenerations(torch.tensor(np.stack([hidden, hidden[::-1].copy()])))
    assert batch == pytest.approx([expected, np.mean(r) + (r[0] - r[-1])], abs=1e-6)
    assert degeneration(hidden[:1]) == 0.0
    assert degeneration(hidden[:2]) == pytest.approx(r[0])


def test_history_looks_back_on_a_window() -> None:
    assert acceptance_history([]) == 0.0
    assert acceptance_history([3]) == 3.0
    assert acceptance_history([9, 9, 1, 2, 3], window=3) == 2.0
    assert acceptance_history([100] + [2] * 8) == 2.0
