"""Budget policies and the state they may look at."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from graft_dist.budget import (
    NO_LIMIT,
    AcceptanceGain,
    BudgetPolicy,
    DraftState,
    ExploringBudget,
    FixedBudget,
    PiecewiseCalibration,
    PowerGain,
    RawProbabilities,
    UtilityBudget,
    acceptance_history,
    batch_costs,
    confidence,
    confidences,
    degeneration,
    degenerations,
    joint_budgets,
)
from graft_dist.cost_curve import BatchCostCurve, CostCurve, line
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


# ---- gains and utilities

CURVE = line(10.0, 12.0, 1.0, "hand")  # plain 10 ms; drafted 12 ms and 1 ms per node


def tree_scored(probs: list[float]) -> DraftTree:
    """A star of nodes with these path probabilities, in this order."""
    scores = np.log(np.array([1.0, *probs])).astype(np.float32)
    size = len(scores)
    return DraftTree(
        np.arange(size, dtype=np.int32),
        np.array([-1] + [0] * (size - 1), np.int32),
        np.array([0] + [1] * (size - 1), np.int32),
        scores,
        np.arange(-1, size - 1, dtype=np.int32),
    )


def marginal(**changes: object) -> UtilityBudget:
    return UtilityBudget(AcceptanceGain(), CURVE, **changes)  # type: ignore[arg-type]


def test_acceptance_gains_are_probabilities() -> None:
    tree = tree_scored([0.5, 0.25])
    np.testing.assert_allclose(AcceptanceGain().marginals(tree, STATE), [0.5, 0.25], rtol=1e-6)
    assert RawProbabilities().probabilities(np.array([0.7, -np.inf], np.float32), STATE).tolist() == [1.0, 0.0]
    calibration = PiecewiseCalibration((log(0.25), log(0.5)), (0.1, 0.3))
    gain = AcceptanceGain(calibration)
    np.testing.assert_allclose(
        gain.marginals(tree_scored([0.9, 0.5, 0.25, 0.01]), STATE), [0.3, 0.3, 0.1, 0.1], atol=1e-6
    )
    assert not gain.needs_state


def test_calibrations_that_are_none() -> None:
    for scores, chances in (((), ()), ((0.0,), (0.1, 0.2)), ((0.0, 0.0), (0.1, 0.2)), ((0.0, 1.0), (0.2, 0.1))):
        with pytest.raises(PolicyError):
            PiecewiseCalibration(scores, chances)
    with pytest.raises(PolicyError, match="between 0 and 1"):
        PiecewiseCalibration((0.0,), (1.5,))


def test_power_gain_by_hand() -> None:
    gain = PowerGain((log(2.0), 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))
    np.testing.assert_allclose(gain.marginals(tree_of(4), STATE), 2 * np.diff(np.sqrt(np.arange(5.0))))
    gain = PowerGain((0.0, 1.0, 2.0, 3.0), (0.0, 4.0, 0.0, 0.0))
    a, beta = gain.a_and_beta(replace(STATE, conf=0.5, degen=-0.25, hist=1.5))
    assert a == pytest.approx(exp(0.5 - 0.5 + 4.5)) and beta == pytest.approx(1 / (1 + exp(-2)))
    assert gain.a_and_beta(STATE) == gain.a_and_beta(replace(STATE, hist=2.0))  # the first round has no history
    assert gain.needs_state


def test_the_papers_gain_cannot_adapt_and_ours_does() -> None:
    """`a B^0.5 / C(B)` peaks at the same B whatever a is; with the bonus token it does not."""
    budgets = np.arange(1, 65)
    cost = 16 + 1.0 * budgets
    assert {int(budgets[np.argmax(a * np.sqrt(budgets) / cost)]) for a in (0.2, 1.0, 5.0)} == {16}
    chosen = []
    for a in (0.2, 1.0, 5.0):
        policy = UtilityBudget(PowerGain((log(a), 0, 0, 0), (0, 0, 0, 0)), line(10.0, 16.0, 1.0, "hand"))
        chosen.append(policy.choose([tree_of(64)], [STATE])[0])
    assert chosen[0] < chosen[1] < chosen[2] < 16


def test_budget_by_hand() -> None:
    # (1 + .9) / 13, (1 + .9 + .6) / 14, then .1 more for another millisecond does not pay.
    policy: BudgetPolicy = marginal()
    assert policy.limits([STATE, replace(STATE, max_budget=3)]) == [256, 3]
    assert policy.choose([tree_scored([0.9, 0.6, 0.1])], [STATE]) == [2]
    assert policy.choose([root_tree(0)], [STATE]) == [0]


def test_budget_zero_is_legal_when_even_one_node_does_not_pay() -> None:
    dear = CostCurve((0, 1, 2), (10.0, 12.0, 40.0), "hand")
    # With two slots a first node for each costs the step from 12 to 68 ms.
    policy = UtilityBudget(AcceptanceGain(), dear)
    assert policy.choose([tree_scored([0.2]), tree_scored([0.1])], [STATE] * 2) == [0, 0]


def test_the_price_form_buys_what_is_worth_its_time() -> None:
    policy = marginal(form="price")
    assert policy.price == pytest.approx(0.1)  # plain decoding's rate
    assert policy.choose([tree_scored([0.9, 0.6, 0.11, 0.09])], [STATE]) == [3]
    assert policy.price == pytest.approx((1 + 0.9 + 0.6 + 0.11) / 15)
    assert policy.choose([tree_scored([0.9, 0.6, 0.18, 0.16])], [STATE]) == [3]


@pytest.mark.parametrize("form", ["ratio", "price"])
def test_joint_budgets_are_the_best_of_all(form: str) -> None:
    """Under any curve, and for marginals in any order: a round costs what its largest tree costs."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        marginals = [rng.uniform(0, 1, size) for size in rng.integers(0, 5, 3)]
        costs = 10 + np.cumsum(rng.uniform(0, 4, 1 + max(map(len, marginals))))
        price = None if form == "ratio" else float(rng.uniform(0.01, 0.4))
        budgets, gain = joint_budgets(marginals, costs, price)

        def worth(choice: tuple[int, ...]) -> float:
            tokens = 3 + sum(own[:size].sum() for own, size in zip(marginals, choice, strict=True))  # noqa: B023
            ms = costs[max(choice)]  # noqa: B023
            return float(tokens / ms if price is None else tokens - price * ms)  # noqa: B023

        best = max(worth(choice) for choice in itertools.product(*(range(len(own) + 1) for own in marginals)))
        assert worth(tuple(budgets)) == pytest.approx(best)
        assert gain == pytest.approx(3 + sum(own[:size].sum() for own, size in zip(marginals, budgets, strict=True)))


def test_a_slot_takes_what_the_rows_of_the_largest_tree_leave_room_for() -> None:
    marginals = [np.array([0.1, 0.9]), np.array([0.5])]
    budgets, gain = joint_budgets(marginals, np.array([1.0, 1.0, 1.0]))
    assert budgets == [2, 1] and gain == pytest.approx(3.5)
    assert joint_budgets(marginals, np.array([1.0, 1.0, 9.0]))[0] == [1, 1]
    # Rows are there for all, but a node that brings nothing is not verified.
    assert joint_budgets([np.array([0.9, 0.8]), np.array([0.5, 0.0]), np.zeros(0)], np.ones(3))[0] == [2, 1, 0]


def test_costs_of_a_batch() -> None:
    assert batch_costs(CURVE, 1, 2)[0] == 10.0
    assert batch_costs(CURVE, 1, 2)[1].tolist() == [13, 13, 14]
    plain_ms, drafted_ms = batch_costs(CURVE, 4, 2)
    assert drafted_ms.tolist() == [15, 19, 23]  # four times one, two, three rows: the curve at 3, 7, 11
    assert plain_ms == 12.0
    assert [len(batch_costs(CURVE, *shape)[1]) for shape in ((1, 0), (1, 1), (3, 0), (3, 5))] == [1, 2, 1, 6]


def test_costs_of_a_batch_that_was_timed_itself() -> None:
    """Four slots: plain 20, roots with a draft 26, one node each 30, three nodes each 40."""
    together = CostCurve((0, 1, 3, 7, 15), (20.0, 26.0, 26.0, 30.0, 40.0), "timed")
    cost = BatchCostCurve(CURVE.budgets, CURVE.round_ms, "both", num_slots=4, together=together)
    plain_ms, drafted_ms = batch_costs(cost, 4, 3)
    assert plain_ms == 20.0 and drafted_ms.tolist() == [26, 30, 35, 40]
    assert batch_costs(cost, 1, 2)[0] == batch_costs(CURVE, 1, 2)[0]
    assert batch_costs(cost, 1, 2)[1].tolist() == batch_costs(CURVE, 1, 2)[1].tolist() == [13, 13, 14]
    plain_ms, drafted_ms = batch_costs(cost, 2, 1)  # a third of the way from one slot to four
    assert plain_ms == pytest.approx(10 + 10 / 3)
    assert drafted_ms.tolist() == pytest.approx([13 + 13 / 3, 13 + 17 / 3])
    assert batch_costs(cost, 8, 0)[1].tolist() == [30.0]  # more slots than were timed: by their rows
    with pytest.raises(PolicyError, match="at least 2 sequences, not 1"):
        replace(cost, num_slots=1)


def test_one_long_tree_is_not_paid_for_with_the_rows_of_all() -> None:
    """One of eight slots expects much: alone it takes six nodes, but in the batch each costs eight rows."""
    policy = UtilityBudget(AcceptanceGain(), line(10.0, 12.0, 1.0, "hand"))
    sure, hopeless = tree_scored([0.9] * 6), tree_scored([0.01] * 6)
    assert policy.choose([sure], [STATE]) == [6]
    assert policy.choose([sure, *[hopeless] * 7], [STATE] * 8) == [0] * 8
    assert policy.choose([sure] * 8, [STATE] * 8) == [6] * 8


def test_context_is_paid_for() -> None:
    """A long context makes every round dear, so that more nodes are worth it."""
    policy = UtilityBudget(AcceptanceGain(), replace(CURVE, token_ms=0.1))
    tree = tree_scored([0.9, 0.6, 0.1])
    assert policy.choose([tree], [replace(STATE, context_length=0)]) == [2]
    assert policy.choose([tree], [replace(STATE, context_length=2000)]) == [3]


def test_drafting_rests_where_it_does_not_pay_and_is_tried_again() -> None:
    saturated = line(10.0, 30.0, 5.0, "hand")
    policy = UtilityBudget(AcceptanceGain(), saturated, probe_every=4, probe_seldom=8)
    drafted = []
    for _ in range(28):
        limit = policy.limits([STATE])[0]
        drafted.append(limit > 0)
        if limit:
            policy.choose([tree_scored([0.9, 0.5])], [STATE])
    assert drafted[:8] == [True] * 8, "a few trees must be seen first"
    assert drafted[8:12] == [False, False, False, True]
    assert drafted[12:] == [*[False] * 7, True] * 2, "ever more seldom while probes say no, up to a limit"
    eager = UtilityBudget(AcceptanceGain(), saturated, may_rest=False)
    for _ in range(12):
        assert eager.limits([STATE]) == [256]
        eager.choose([tree_scored([0.9, 0.5])], [STATE])


def test_hopeless_drafts_are_hardly_tried() -> None:
    policy = UtilityBudget(AcceptanceGain(), line(10.0, 30.0, 5.0, "hand"))
    drafted = []
    for number in range(4096):
        if policy.limits([STATE])[0]:
            drafted.append(number)
            policy.choose([tree_scored([0.9, 0.5])], [STATE])
    assert np.diff(drafted[7:]).tolist() == [32, 64, 128, 256, *[512] * 7]


def test_a_probe_that_would_have_paid_brings_the_next_one_forward() -> None:
    """Good trees are not enough yet against the memory of bad ones, but they are looked for as often as at first."""
    policy = UtilityBudget(AcceptanceGain(), line(10.0, 12.0, 1.0, "hand"), probe_every=4)
    for _ in range(50):
        policy.choose([tree_scored([0.01])], [STATE])
    waits = []
    for probs in ([0.01], [0.01], [0.01], [0.9, 0.8], [0.01], [0.01]):
        waits.append(next(number for number in itertools.count(1) if policy.limits([STATE])[0]))
        policy.choose([tree_scored(probs)], [STATE])
    assert waits == [4, 8, 16, 32, 4, 8]


def test_resting_depends_on_the_batch() -> None:
    """One slot's drafts pay, sixteen slots saturate the hardware."""
    policy = UtilityBudget(AcceptanceGain(), CostCurve((0, 1, 15, 16), (10.0, 12.0, 12.0, 30.0), "hand"))
    for _ in range(8):
        policy.choose([tree_scored([0.9, 0.5])], [STATE])
    assert policy.limits([STATE]) == [256]
    assert policy.limits([STATE] * 16) == [0] * 16
    assert policy.limits([STATE]) == [256]


def test_impossible_utilities_are_refused() -> None:
    for changes, words in (
        ({"max_budget": -1}, "-1"),
        ({"form": "sum"}, "ratio or price"),
        ({"horizon": 0}, "horizon"),
        ({"probe_every": 1000}, "probe_seldom 512 is below probe_every 1000"),
    ):
        with pytest.raises(PolicyError, match=words):
            marginal(**changes)


def test_greedy_stop_is_the_optimum_for_convex_costs() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        probs = -np.sort(-rng.uniform(0, 1, 20))
        costs = 10 + np.cumsum(np.sort(rng.uniform(0, 2, 21)))
        gains = 1 + np.concatenate([[0.0], np.cumsum(probs)])
        stop = next((b for b in range(20) if gains[b + 1] / costs[b + 1] <= gains[b] / costs[b]), 20)
        assert joint_budgets([probs], costs)[0] == [stop]


def test_sqrt_gain_matches_the_closed_form() -> None:
    """`argmax (1 + a sqrt(B)) / (c + v B)` solves `a c = 2 v sqrt(B) + a v B`."""
    a, fixed, node = 1.5, 40.0, 0.5
    root = (-2 * node + sqrt(4 * node**2 + 4 * a * node * a * fixed)) / (2 * a * node)
    policy = UtilityBudget(PowerGain((log(a), 0, 0, 0), (0, 0, 0, 0)), line(10.0, fixed, node, "hand"))
    assert abs(policy.choose([tree_of(200)], [STATE])[0] - root**2) <= 1


def test_better_times_are_noticed() -> None:
    """After a hard stretch, probes find that drafting pays again."""
    policy = UtilityBudget(AcceptanceGain(), line(10.0, 12.0, 1.0, "hand"), probe_every=4)
    for _ in range(50):
        policy.choose([tree_scored([0.01])], [STATE])
    assert policy.limits([STATE]) == [0]
    drafted = 0
    for _ in range(200):
        if policy.limits([STATE])[0]:
            drafted += 1
            policy.choose([tree_scored([0.9, 0.8, 0.7])], [STATE])
    assert drafted > 100
