"""An export is a whole plain tree, replaced in one step."""

import duckdb
import pytest

from graft_dist.errors import StoreError
from storage import TrajectoryStore, connect
from tests.storage.records import DATASET, write_unit


@pytest.fixture
def store(tmp_path):
    made = TrajectoryStore(tmp_path / "store")
    made.begin("run", "tiny", DATASET)
    return made


def count(folder, table):
    return duckdb.sql(f"SELECT count(*) FROM read_parquet('{folder}/{table}/*/*/*.parquet')").fetchall()[0][0]


def test_an_export_holds_the_rows_that_count_and_only_those(store, tmp_path):
    store.commit([*write_unit(store, "u1", "a1"), *write_unit(store, "u2", "a1")], "run", 1)
    store.compact()
    write_unit(store, "u3", "never-committed")
    dest = store.export(tmp_path / "out")
    assert dest == tmp_path / "out"
    assert count(dest, "sequences") == 4 and count(dest, "rounds") == 12
    assert len(list(dest.rglob("*.parquet"))) == 2
    columns = "sequence_id, round_index, candidate_ids, accepted, target, date"
    exported = duckdb.sql(
        f"SELECT {columns} FROM read_parquet('{dest}/rounds/*/*/*.parquet', hive_partitioning=true) ORDER BY ALL"
    ).fetchall()
    with connect(store.path) as connection:
        assert exported == connection.sql(f"SELECT {columns} FROM rounds ORDER BY ALL").fetchall()


def test_a_new_export_replaces_the_old_one(store, tmp_path):
    store.commit(write_unit(store, "u1", "a1"), "run", 1)
    store.export(tmp_path / "out")
    store.commit(write_unit(store, "u2", "a1"), "run", 2)
    store.export(tmp_path / "out")
    assert count(tmp_path / "out", "rounds") == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_a_failed_export_leaves_the_old_one(store, tmp_path, monkeypatch):
    store.commit(write_unit(store, "u1", "a1"), "run", 1)
    store.export(tmp_path / "out")
    store.commit(write_unit(store, "u2", "a1"), "run", 2)

    def stop(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("storage.export._exchange", stop)
    with pytest.raises(KeyboardInterrupt):
        store.export(tmp_path / "out")
    assert count(tmp_path / "out", "rounds") == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_an_empty_store_exports_empty_folders(store, tmp_path):
    dest = store.export(tmp_path / "out")
    assert (dest / "rounds").is_dir() and list(dest.rglob("*.parquet")) == []


def test_foreign_folders_are_left_alone(store, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(StoreError, match="is no earlier export"):
        store.export(tmp_path / "mine")
    with pytest.raises(StoreError, match="there is no trajectory store"):
        TrajectoryStore(tmp_path / "nothing").export(tmp_path / "out")
