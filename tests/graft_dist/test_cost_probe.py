"""Costs measured by decoding, and which cost a command's policies get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graft_dist.budget import FixedBudget, UtilityBudget, batch_costs
from graft_dist.cost_curve import BatchCostCurve, CostCurve
from graft_dist.cost_probe import cost_of, measure_cost, probe_rounds
from graft_dist.errors import PolicyError
from graft_dist.hardware import describe_hardware
from graft_dist.policy import GraftPolicy
from graft_dist.policy_maker import PolicyMaker
from graft_dist.target import Target
from tests.conftest import FakeDrafter
from tests.graft_dist.policies import CURVE, make_policy, random_network

GIVEN = CostCurve((0, 1, 9), (5.0, 6.0, 7.0), "given")


def test_a_measured_curve_has_the_budgets_asked_for(tiny_llama: Target) -> None:
    curve = measure_cost(tiny_llama, FakeDrafter(tiny_llama), budgets=(1, 4, 12), num_candidates=8, num_rounds=2)
    assert curve.budgets == (0, 1, 4, 12)
    assert describe_hardware("float32", tiny_llama.device) in curve.source
    assert "medians of 8 rounds at 4 budgets" in curve.source
    hurried = measure_cost(tiny_llama, FakeDrafter(tiny_llama), budgets=(1, 4), num_candidates=8, limit_s=0.0)
    assert hurried.budgets == (0, 1, 4) and "medians of 3 rounds at 3 budgets" in hurried.source


def test_a_chain_gives_the_sizes_it_has_and_long_measurements_start_again(tiny_llama: Target) -> None:
    drafter = FakeDrafter(tiny_llama, block_size=4)
    curve = measure_cost(tiny_llama, drafter, budgets=(1, 8), num_candidates=1, num_rounds=3)
    assert curve.budgets == (0, 1, 3)
    long = measure_cost(tiny_llama, drafter, budgets=(1, 3), num_candidates=1, num_rounds=12)
    assert long.budgets == (0, 1, 3) and "medians of 36 rounds" in long.source
    short = Target(tiny_llama.spec, tiny_llama.model, tiny_llama.tokenizer)
    short.max_position_embeddings = 12
    assert measure_cost(short, FakeDrafter(short), budgets=(1, 2), num_candidates=2, num_rounds=6).budgets == (0, 1, 2)


def test_a_batch_is_timed_with_all_its_sequences(tiny_llama: Target) -> None:
    drafter = FakeDrafter(tiny_llama)
    for num_slots in (2, 3):
        records = probe_rounds(
            tiny_llama, drafter, [[1, 2, 3], [4, 5], [6]], budgets=(1, 4), num_candidates=8, num_rounds=20,
            limit_s=60.0, num_slots=num_slots,
        )  # fmt: skip
        assert len(records) == 60 and {record.batch_size for record in records} == {num_slots}
        assert {record.batch_rows for record in records} == {num_slots * (1 + budget) for budget in (0, 1, 4)}
        curve = cost_of(records, "here")
        assert curve is not None and f"60 rounds of {num_slots} sequences at 3 budgets" in curve.source
        assert curve.budgets == tuple(sorted({0, 1, num_slots - 1, 2 * num_slots - 1, 5 * num_slots - 1}))


def test_a_batchs_curve_gives_back_its_medians(tiny_llama: Target) -> None:
    """Read for as many slots, it has the plain round's time, the draft's with the roots alone, and the trees'."""
    [record] = probe_rounds(
        tiny_llama, FakeDrafter(tiny_llama), [[1, 2]], budgets=(1, 2), num_candidates=4, num_rounds=1, limit_s=60.0,
        num_slots=3,
    )[:1]  # fmt: skip
    times = {0: (0.0, 20e6), 1: (5e6, 24e6), 4: (5e6, 35e6)}
    rounds = [
        replace(record, budget=budget, draft_ns=int(draft_ns), build_ns=0, verify_ns=int(verify_ns), commit_ns=0)
        for budget, (draft_ns, verify_ns) in times.items()
    ]
    curve = cost_of(rounds, "here")
    assert curve is not None
    plain_ms, drafted_ms = batch_costs(curve, 3, 4)
    assert plain_ms == pytest.approx(20.0)
    assert drafted_ms[[0, 1, 4]].tolist() == pytest.approx([25.0, 29.0, 40.0])


@pytest.mark.parametrize("budgets", [(), (0,), (4,), (-1, 2)])
def test_too_few_budgets_are_refused(budgets: tuple[int, ...], tiny_llama: Target) -> None:
    with pytest.raises(PolicyError, match="two budgets above 0"):
        measure_cost(tiny_llama, FakeDrafter(tiny_llama), budgets=budgets)


def fitting(target: Target, drafter: FakeDrafter, **changes: object) -> GraftPolicy:
    fingerprints = {"target_fingerprint": target.fingerprint, "drafter_fingerprint": drafter.fingerprint}
    return make_policy(random_network(target.hidden_size, drafter.draft_depth), **fingerprints, **changes)


def test_the_cost_is_the_given_one_else_the_policys_else_measured(tiny_llama: Target) -> None:
    drafter = FakeDrafter(tiny_llama)
    here = describe_hardware("float32", tiny_llama.device)
    knowing = fitting(tiny_llama, drafter, cost_curves={here: CURVE})
    said: list[str] = []
    makers = [
        PolicyMaker(tiny_llama, drafter, 8, learned=knowing, cost=GIVEN, say=said.append),
        PolicyMaker(tiny_llama, drafter, 8, learned=knowing, say=said.append),
    ]
    assert [maker.cost for maker in makers] == [GIVEN, CURVE]
    assert said == []
    maker = PolicyMaker(tiny_llama, drafter, 8, learned=fitting(tiny_llama, drafter), say=said.append)
    assert maker.cost.source.startswith("measured") and maker.cost is maker.cost
    assert len(said) == 1
    for method in ("caddtree", "graft"):
        budget = maker.make(method, 30).budget
        assert isinstance(budget, UtilityBudget) and budget.max_budget == 30 and budget.cost is maker.cost


def test_costs_of_a_batch_are_probed_with_it_whatever_a_policy_knows(tiny_llama: Target) -> None:
    drafter = FakeDrafter(tiny_llama)
    knowing = fitting(tiny_llama, drafter, cost_curves={describe_hardware("float32", tiny_llama.device): CURVE})
    said: list[str] = []
    maker = PolicyMaker(tiny_llama, drafter, 8, learned=knowing, num_slots=2, say=said.append)
    cost = maker.cost
    assert isinstance(cost, BatchCostCurve) and cost.num_slots == 2
    assert "of 2 sequences" in cost.together.source and cost.budgets[1] == 1
    assert said == ["measuring what rounds of one sequence and of 2 cost on this machine"]
    for method in ("caddtree", "graft"):
        budget = maker.make(method, 30).budget
        assert isinstance(budget, UtilityBudget) and budget.cost is cost
    assert PolicyMaker(tiny_llama, drafter, 8, cost=GIVEN, num_slots=2).cost is GIVEN


def test_each_policy_is_fresh_and_named_after_its_method(tiny_llama: Target) -> None:
    drafter = FakeDrafter(tiny_llama)
    maker = PolicyMaker(tiny_llama, drafter, 8, learned=fitting(tiny_llama, drafter), cost=GIVEN)
    first, second, fixed = maker.make("graft", None), maker.make("graft", None), maker.make("graft-fixed", 9)
    assert first.budget is not second.budget and first.scorer is second.scorer is fixed.scorer
    assert (first.name, fixed.name, fixed.budget, fixed.num_candidates) == ("graft", "graft-fixed", FixedBudget(9), 4)
    constant = fitting(tiny_llama, drafter, kind="fixed", gain=None, fixed_budget=3)
    assert PolicyMaker(tiny_llama, drafter, 8, learned=constant).make("graft", 20).budget == FixedBudget(3)
    assert maker.make("ddtree", 5).budget == FixedBudget(5)


def test_what_is_missing_is_said(tiny_llama: Target) -> None:
    drafter = FakeDrafter(tiny_llama)
    with pytest.raises(PolicyError, match="fitted with target tttttttttttt"):
        PolicyMaker(tiny_llama, drafter, 8, learned=make_policy(None))
    maker = PolicyMaker(tiny_llama, drafter, 8)
    with pytest.raises(PolicyError, match="'graft' needs a learned policy"):
        maker.make("graft", None)
    with pytest.raises(PolicyError, match="without a drafter"):
        PolicyMaker(tiny_llama, None, 8).make("caddtree", None)
    learned = PolicyMaker(tiny_llama, drafter, 8, learned=fitting(tiny_llama, drafter))
    with pytest.raises(PolicyError, match="'graft-fixed' needs a budget"):
        learned.make("graft-fixed", None)
