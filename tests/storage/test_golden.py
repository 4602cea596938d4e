"""Stores that older code wrote still read and take new units.

`golden/v1` and `golden/v2` were written by the project's own code of those schema versions, by the last commit before
each was raised: one unit of one sequence with two rounds of `records.make_round`. They are read as they are: nothing in
them is made anew when the code changes.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable

from storage import TrajectoryStore, UnitKey, connect, run_query
from storage.schema import PARTITION_FIELDS, ROUNDS, SCHEMA_VERSION, SEQUENCES
from tests.storage.records import DATASET, PROVENANCE, make_round, make_sequence

GOLDEN = Path(__file__).with_name("golden")
ADDED_SINCE = {1: ("source", "hidden"), 2: ("hidden",)}  # columns that the version did not have


@pytest.fixture(params=sorted(ADDED_SINCE))
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def root(version: int, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / f"v{version}", tmp_path / "store"))


def schema_versions(root: Path) -> set[str]:
    return {
        DeltaTable(root / table).metadata().configuration["graft.schemaVersion"] for table in ("sequences", "rounds")
    }


def rows(root: Path, table: str, order: str) -> list[dict[str, Any]]:
    with connect(root, threads=1) as connection:
        return connection.sql(f"SELECT * FROM {table} ORDER BY {order}").to_arrow_table().to_pylist()


def test_it_is_what_it_says(version: int, root: Path) -> None:
    assert schema_versions(root) == {str(version)} and version < SCHEMA_VERSION
    known = {field.name for table in ("sequences", "rounds") for field in DeltaTable(root / table).schema().fields}
    now = {*SEQUENCES.names, *ROUNDS.names, *(field.name for field in PARTITION_FIELDS)}
    assert now - known == set(ADDED_SINCE[version]) and known <= now


def test_it_reads_as_it_is(version: int, root: Path) -> None:
    (sequence,) = rows(root, "sequences", "ALL")
    first, second = rows(root, "rounds", "round_index")
    expected = make_round("u1.0", 0)
    assert first["candidate_ids"] == expected.candidate_ids.tolist() and first["accepted"] == [1]
    assert first["candidate_log_probs"] == expected.candidate_log_probs.tolist()
    assert (first["context_length"], second["context_length"], first["kind"]) == (10, 12, "decoded")
    assert sequence["output_token_ids"] == [4, 5, 6, 7] and sequence["schema_version"] == version
    assert all(row[name] is None for name in ADDED_SINCE[version] for row in (sequence, first, second) if name in row)
    (summed_up,) = run_query(root, "summary").to_pylist()
    assert (summed_up["num_sequences"], summed_up["num_rounds"], summed_up["mat"]) == (1, 2, 2.0)
    assert schema_versions(root) == {str(version)}  # reading changes nothing


def test_it_takes_new_units(version: int, root: Path) -> None:
    store = TrajectoryStore(root)
    assert store.begin("past", "tiny", DATASET) == 2  # the run goes on where it was
    seq = store.begin("served", "tiny", DATASET)
    assert schema_versions(root) == {str(SCHEMA_VERSION)}
    hidden = np.array([[0.5, 1.0], [2.0, -3.0]], np.float32)
    key = UnitKey(unit_id="u2", attempt="a2", run_id="served")
    traffic = dataclasses.replace(PROVENANCE, source="traffic")
    files = store.write_unit(key, traffic, [make_sequence("u2.0", 1)], [make_round("u2.0", 0, hidden=hidden)])
    key = UnitKey(unit_id="u1", attempt="a2", run_id="served")
    again = store.write_unit(key, traffic, [make_sequence("u1.0", 0)], [])
    done = store.commit([*files, *again], "served", seq)
    assert done.committed == ("u2",) and done.skipped == ("u1",)
    for _ in ("as written", "merged", "merged again"):
        sources = [row["source"] for row in rows(root, "sequences", "unit_id")]
        assert sources == [None if "source" in ADDED_SINCE[version] else "collect", "traffic"]
        found = rows(root, "rounds", "unit_id, round_index")
        assert [row["hidden"] for row in found] == [None, None, hidden.tolist()]
        assert [row["num_tokens"] for row in found] == [2, 2, 2]
        store.compact()
    assert store.forget(run_id="past") == 2 and len(rows(root, "rounds", "ALL")) == 1
