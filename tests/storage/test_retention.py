"""Deletion takes whole days or whole runs, and nothing else."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from graft_dist.errors import StoreError
from storage import TrajectoryStore, UnitKey, connect
from storage.retention import forget_days
from tests.storage.records import DATASET, PROVENANCE, make_round, make_sequence


def add(store: TrajectoryStore, run_id: str, unit_id: str, day: int) -> None:
    files = store.write_unit(
        UnitKey(unit_id=unit_id, attempt=f"a-{unit_id}", run_id=run_id),
        PROVENANCE,
        [make_sequence(f"{unit_id}.0", 2)],
        [make_round(f"{unit_id}.0", index) for index in range(2)],
        datetime(2026, 1, day, tzinfo=UTC),
    )
    store.commit(files, run_id, store.begin(run_id, "tiny", DATASET))


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    made = TrajectoryStore(tmp_path / "store")
    add(made, "old", "u1", 1)
    add(made, "old", "u2", 2)
    add(made, "new", "u3", 2)
    add(made, "new", "u4", 3)
    return made


def units(store: TrajectoryStore) -> dict[str, list[Any]]:
    with connect(store.path, threads=1) as connection:
        query = "SELECT DISTINCT unit_id FROM {} ORDER BY 1"
        return {
            table: [row[0] for row in connection.execute(query.format(table)).fetchall()]
            for table in ("sequences", "rounds")
        }


def both(*names: str) -> dict[str, list[Any]]:
    return {"sequences": list(names), "rounds": list(names)}


@pytest.mark.parametrize("compacts", [False, True])
def test_days_before_a_date_go(store: TrajectoryStore, compacts: bool) -> None:
    if compacts:
        store.compact()
    assert store.forget(before=date(2026, 1, 3), target="other") == 0
    assert store.forget(before=date(2026, 1, 2)) == 2
    assert units(store) == both("u2", "u3", "u4")
    assert store.forget(before=date(2026, 1, 2)) == 0
    store.forget(before=date(2026, 2, 1), target="tiny")
    assert units(store) == both()


@pytest.mark.parametrize("compacts", [False, True])
def test_a_run_goes_and_its_neighbours_in_merged_files_stay(store: TrajectoryStore, compacts: bool) -> None:
    if compacts:
        store.compact()
    store.forget(run_id="old")
    assert units(store) == both("u3", "u4")
    store.compact()
    assert units(store) == both("u3", "u4") and store.forget(run_id="old") == 0


def test_a_forgotten_run_can_be_made_again(store: TrajectoryStore) -> None:
    store.forget(run_id="old")
    assert units(store) == both("u3", "u4")
    add(store, "old", "u1", 4)
    assert units(store) == both("u1", "u3", "u4")


def test_earlier_versions_stay_readable_until_vacuum(store: TrajectoryStore) -> None:
    before = store.snapshot()
    store.forget(before=date(2026, 2, 1))
    with connect(store.path, snapshot=before) as connection:
        assert connection.sql("SELECT count(*) FROM rounds").fetchall() == [(8,)]
    store.vacuum(0)
    assert not list(store.path.glob("*/target=*/**/*.parquet"))


def test_cut_off_between_the_tables_nothing_dangles(store: TrajectoryStore) -> None:
    log = DeltaTable(store.path / "sequences")
    forget_days(log, store.root / "sequences", date(2026, 1, 3), None)
    assert units(store) == both("u4")  # rounds without sequences do not count
    store.forget(before=date(2026, 1, 3))
    assert units(store) == both("u4")


def test_of_two_at_once_one_changes_nothing(store: TrajectoryStore) -> None:
    late = DeltaTable(store.path / "sequences")
    store.forget(before=date(2026, 1, 2))
    with pytest.raises(StoreError, match="changed nothing"):
        forget_days(late, store.root / "sequences", date(2026, 1, 3), None)
    assert units(store) == both("u2", "u3", "u4")


@pytest.mark.parametrize(
    "what", [{}, {"before": date(2026, 1, 1), "run_id": "old"}, {"run_id": "old", "target": "tiny"}]
)
def test_what_to_forget_has_to_be_clear(store: TrajectoryStore, what: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either"):
        store.forget(**what)


def test_pinned_rows_outlive_vacuum_until_their_run_ends_or_is_given_up(store: TrajectoryStore) -> None:
    read = store.snapshot()
    store.pin("learning", read)
    store.pin("given-up", read)
    store.forget(before=date(2026, 1, 3))
    store.compact()
    store.vacuum(0)
    with connect(store.path, snapshot=read, threads=1) as connection:
        assert connection.sql("SELECT count(*) FROM rounds").fetchall() == [(8,)]
    store.unpin("learning")
    store.unpin("learning")
    assert store.vacuum(0) == []
    os.utime(store.path / "_pins" / "given-up.json", (1, 1))
    assert {path.rpartition("/")[2] for path in store.vacuum(0)} == {f"unit-u{n}-a-u{n}.parquet" for n in (1, 2, 3)}
    assert units(store) == both("u4")
