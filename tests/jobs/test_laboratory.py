"""Which recorded rounds say what rounds cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft_dist.cost_curve import CostCurve
from graft_dist.errors import StoreError
from graft_dist.policy import CADDTREE_BUDGET
from jobs.budget_candidate import CADDTREE, baselines
from jobs.laboratory import recorded_costs
from jobs.learning_data import decoded_rounds
from storage import TrajectoryStore, UnitKey
from storage.learning_rounds import RoundShape
from tests.storage.records import DATASET, PROVENANCE, make_round, make_sequence


def store_of(root: Path, num_alone: int, num_shared: int, hardware: str = "cpu") -> Any:
    """A data set of 25 sequences, each with so many rounds alone and in pairs at each of two budgets."""
    rounds = []
    for number in range(25):
        name = f"s{number}"
        rounds.append(make_round(name, 0))  # the drafter reads the prompt
        sizes = [(1, 3)] * num_alone + [(1, 5)] * num_alone + [(2, 6)] * num_shared + [(2, 10)] * num_shared
        rounds += [
            make_round(name, index, batch_size=size, batch_rows=rows) for index, (size, rows) in enumerate(sizes, 1)
        ]
    sequences = [make_sequence(f"s{number}", 1 + 2 * (num_alone + num_shared)) for number in range(25)]
    store = TrajectoryStore(root)
    run_id = f"run-{hardware}"
    turn = store.begin(run_id, "tiny", DATASET)
    key = UnitKey(unit_id=f"u-{hardware}", attempt="a", run_id=run_id)
    store.commit(store.write_unit(key, replace(PROVENANCE, hardware=hardware), sequences, rounds), run_id, turn)
    return SimpleNamespace(snapshot=None, drafter_fingerprint="d-1", shape=RoundShape(2, 3))


def test_a_few_rounds_alone_do_not_speak_for_a_batch(tmp_path: Path) -> None:
    data = store_of(tmp_path / "batch", num_alone=1, num_shared=2)
    (costs,) = recorded_costs(data, str(tmp_path / "batch"), "tiny")
    assert costs.hardware == "cpu, share of 2 sequences"
    # Where there are no others, they are better than nothing.
    data = store_of(tmp_path / "few", num_alone=1, num_shared=0)
    (costs,) = recorded_costs(data, str(tmp_path / "few"), "tiny")
    assert (costs.hardware, costs.num_rounds) == ("cpu", 50)


def test_rounds_come_in_one_order_however_many_cores_read_them(tmp_path: Path) -> None:
    for number in range(12):
        data = store_of(tmp_path, num_alone=8, num_shared=8, hardware=f"box-{number}")
    data.snapshot = TrajectoryStore(tmp_path).snapshot()
    data.shape = RoundShape(2, 3, 0)
    data.splits = {"test": [SimpleNamespace(prompt_id=f"prompt-s{number}") for number in range(25)]}
    orders = [
        [
            (*key, index)
            for rounds in decoded_rounds(data, str(tmp_path), "tiny", "test")
            for key, index in zip(rounds.keys, rounds.round_indices.tolist(), strict=True)
        ]
        for _ in range(3)
    ]
    assert len(orders[0]) == 12 * 25 * 33 and orders.count(orders[0]) == 3


def test_every_hardware_has_costs_of_its_own(tmp_path: Path) -> None:
    store_of(tmp_path, num_alone=2, num_shared=0, hardware="slow")
    store_of(tmp_path, num_alone=0, num_shared=2, hardware="busy")
    data = store_of(tmp_path, num_alone=3, num_shared=0, hardware="fast")
    costs = recorded_costs(data, str(tmp_path), "tiny")
    # Shares of batches are nobody's costs but the first's.
    assert [(each.hardware, each.num_rounds) for each in costs] == [("fast", 150), ("slow", 100)]
    assert [each.run_ids for each in costs] == [("run-fast",), ("run-slow",)]


def test_the_hardware_with_most_rounds_alone_goes_first_even_with_few(tmp_path: Path) -> None:
    store_of(tmp_path, num_alone=0, num_shared=2, hardware="busy")
    data = store_of(tmp_path, num_alone=1, num_shared=0, hardware="few")
    (costs,) = recorded_costs(data, str(tmp_path), "tiny")
    assert (costs.hardware, costs.num_rounds) == ("few", 50)


def test_rounds_that_tell_no_cost_are_refused(tmp_path: Path) -> None:
    data = store_of(tmp_path, num_alone=0, num_shared=0)
    with pytest.raises(StoreError, match="too few budgets"):
        recorded_costs(data, str(tmp_path), "tiny")


def test_caddtree_keeps_its_own_cap() -> None:
    caddtree = next(candidate for candidate in baselines() if candidate.name == CADDTREE)
    arm = caddtree.arm(CostCurve((0, 1, 2), (5.0, 6.0, 6.1), "hand"), 16)
    assert arm.max_budget == CADDTREE_BUDGET
    assert arm.new_budget().limits([SimpleNamespace(max_budget=300)]) == [CADDTREE_BUDGET]  # type: ignore[list-item]
