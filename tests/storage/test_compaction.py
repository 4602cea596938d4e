"""Compaction changes files, never rows, whoever else writes at the same time."""

import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from graft_dist.errors import StoreError
from storage import TrajectoryStore, connect
from storage.compaction import compact_table, live_files
from storage.parquet_files import batches_of
from storage.place import Place
from tests.storage.records import DATASET, committed_units, write_unit


@pytest.fixture
def store(tmp_path):
    made = TrajectoryStore(tmp_path / "store")
    made.begin("run", "tiny", DATASET)
    for index in range(4):
        made.commit(write_unit(made, f"u{index}", "a1"), "run", index + 1)
    return made


def rows(store):
    with connect(store.path, threads=1) as connection:
        return connection.sql("SELECT unit_id, sequence_id, round_index FROM rounds ORDER BY ALL").fetchall()


def compact_from(store, log, target_size=1 << 20):
    compact_table(log, store.root / "rounds", store.path / "_tmp", keep=[], drop=[], target_size=target_size)


def test_the_second_of_two_compactions_fails_and_leaves_nothing(store):
    first, second = DeltaTable(store.path / "rounds"), DeltaTable(store.path / "rounds")
    expected = rows(store)
    compact_from(store, first)
    with pytest.raises(StoreError, match="met another one and changed nothing"):
        compact_from(store, second)
    assert rows(store) == expected
    assert len(list((store.path / "rounds").rglob("part-*.parquet"))) == 1


def test_a_commit_during_a_compaction_is_kept(store):
    log = DeltaTable(store.path / "rounds")
    store.commit(write_unit(store, "u4", "a1"), "run", 5)
    compact_from(store, log)
    assert len(rows(store)) == 30 and len(live_files(DeltaTable(store.path / "rounds"))) == 2


def test_a_compaction_during_a_commit_is_kept(store):
    class Interrupted(TrajectoryStore):
        def _not_in(self, log, units):
            chosen = super()._not_in(log, units)
            store.compact()
            return chosen

    Interrupted(store.path).commit(write_unit(store, "u4", "a1"), "run", 5)
    assert len(rows(store)) == 30 and committed_units(store) == {f"u{index}" for index in range(5)}


def test_files_are_filled_up_to_the_size_asked_for(store):
    sizes = [file.size for file in live_files(DeltaTable(store.path / "rounds"))]
    expected = rows(store)
    compact_from(store, DeltaTable(store.path / "rounds"), target_size=2 * max(sizes))
    assert len(live_files(DeltaTable(store.path / "rounds"))) == 2 and rows(store) == expected
    compact_from(store, DeltaTable(store.path / "rounds"), target_size=max(sizes))  # all are large now
    assert len(live_files(DeltaTable(store.path / "rounds"))) == 2


def test_partitions_stay_apart(store):
    store.begin("run", "other", DATASET)
    files = write_unit(store, "u9", "a1", target="other") + write_unit(store, "u10", "a1", target="other")
    store.commit(files, "run", 5)
    store.compact()
    assert sorted(file.partition[0] for file in live_files(DeltaTable(store.path / "rounds"))) == ["other", "tiny"]
    with connect(store.path) as connection:
        counts = connection.sql("SELECT target, count(*) FROM rounds GROUP BY target ORDER BY target").fetchall()
    assert counts == [("other", 12), ("tiny", 24)]


def test_units_stay_together_and_types_stay_the_same(store):
    before = pq.read_schema(store.snapshot().rounds_files[0])
    store.compact()
    (path,) = store.snapshot().rounds_files
    table = pq.ParquetFile(path).read()
    units = table.column("unit_id").to_pylist()
    assert table.schema.equals(before) and units == sorted(units)


def test_compacting_twice_does_nothing_the_second_time(store):
    store.compact()
    before = store.snapshot()
    result = store.compact()
    assert store.snapshot() == before and result.num_files_before == result.num_files_after == 2


def test_what_is_read_for_merging_is_not_decoded_ahead_of_a_slow_writer(tmp_path):
    """It would pile up, until all of it is in memory."""
    schema = pa.schema([("values", pa.list_(pa.int32()))])
    values = np.random.default_rng(0).integers(0, 1 << 30, (4096, 16), np.int32)
    lists = pa.ListArray.from_arrays(np.arange(0, values.size + 1, 16, np.int32), values.ravel())
    files = [Place.parse(tmp_path / f"{index}.parquet") for index in range(40)]
    for file in files:
        pq.write_table(pa.table([lists], schema=schema), file.path)
    before, held, num_rows = pa.total_allocated_bytes(), [], 0
    for batch in batches_of(files, schema):
        zlib.compress(batch.column("values").flatten().to_numpy())
        held.append(pa.total_allocated_bytes() - before)
        num_rows += batch.num_rows
    assert num_rows == len(values) * len(files) and max(held) < 10 * values.nbytes  # of forty
