"""Whole units only, once each, whatever is killed when. A crash is a step that is not taken: nothing runs at exit."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import resource
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from graft_dist.errors import GraftError, StoreError
from storage import StoreFencedError, TrajectoryStore, UnitKey, connect, new_attempt, run_query
from storage.schema import ROUNDS, SCHEMA_VERSION, SEQUENCES
from tests.storage.records import (
    DATASET,
    PROVENANCE,
    commit_rounds_only,
    committed_units,
    make_round,
    make_sequence,
    write_unit,
)


@pytest.fixture
def store(tmp_path):
    made = TrajectoryStore(tmp_path / "a store's root")
    assert made.begin("run", "tiny", DATASET) == 1
    return made


def counts(store):
    """(number of sequences, number of visible rounds)"""
    with connect(store.path, threads=1) as connection:
        return (
            connection.sql("SELECT count(*) FROM sequences").fetchall()[0][0],
            connection.sql("SELECT count(*) FROM rounds").fetchall()[0][0],
        )


def attempts(store):
    with connect(store.path, threads=1) as connection:
        return connection.sql(
            "SELECT DISTINCT s.unit_id, s.attempt, r.attempt FROM sequences s JOIN rounds r USING (unit_id) ORDER BY 1"
        ).fetchall()


def age(path, hours):
    then = path.stat().st_mtime - 3600 * hours
    os.utime(path, (then, then))


# ------------------------------------------------------------------ units in, units out


def test_what_is_committed_can_be_read(store):
    files = write_unit(store, "u1", "a1")
    assert counts(store) == (0, 0)
    result = store.commit(files, "run", 1)
    assert result.committed == ("u1",) and result.skipped == ()
    assert counts(store) == (2, 6)
    assert committed_units(store) == {"u1"}


def test_values_survive_the_round_trip(store):
    store.commit(write_unit(store, "u1", "a1", num_sequences=1, num_rounds=1), "run", 1)
    with connect(store.path) as connection:
        row = connection.sql("SELECT * FROM rounds").to_arrow_table().to_pylist()[0]
        sequence = (
            connection.sql("SELECT *, sampling->>'top_p' AS top_p FROM sequences").to_arrow_table().to_pylist()[0]
        )
    expected = make_round("u1.0", 0)
    assert row["candidate_ids"] == expected.candidate_ids.tolist()
    assert row["candidate_log_probs"] == expected.candidate_log_probs.tolist()
    assert row["tree_parents"] == [-1, 0, 1] and row["accepted"] == [1] and row["kind"] == "decoded"
    assert row["target"] == "tiny" and row["date"] == sequence["written_at"].date()
    assert sequence["prompt_token_ids"] == [1, 2, 3] and sequence["top_p"] == "0.9"


def test_a_file_info_describes_its_file(store):
    for info in write_unit(store, "u1", "a1"):
        path = store.path / info.table / info.path
        assert path.stat().st_size == info.size and pq.read_metadata(path).num_rows == info.rows
        assert pq.read_schema(path).metadata[b"graft.unit_id"] == b"u1"
        assert info.path.startswith(f"target=tiny/date={info.date}/")
    assert list((store.path / "_tmp").iterdir()) == []


def test_many_units_are_one_commit_per_table(store):
    before = store.snapshot()
    files = [file for index in range(5) for file in write_unit(store, f"u{index}", "a1")]
    store.commit(files, "run", 1)
    after = store.snapshot()
    assert after.sequences_version == before.sequences_version + 1
    assert after.rounds_version == before.rounds_version + 1
    assert counts(store) == (10, 30)


def test_a_unit_of_failed_prompts_has_no_rounds(store):
    failed = make_sequence("s", 0, finish_reason="error", error="prompt is empty", output_token_ids=[])
    store.commit(store.write_unit(UnitKey(unit_id="u", attempt="a", run_id="run"), PROVENANCE, [failed], []), "run", 1)
    assert counts(store) == (1, 0) and committed_units(store) == {"u"}


@pytest.mark.parametrize(
    ("sequences", "rounds", "message"),
    [
        ([], [], "0 sequences"),
        ([make_sequence("s", 0), make_sequence("s", 0)], [], "2 sequences with 1 different ids"),
        ([make_sequence("s", 1)], [make_round("other", 0)], "not one of its sequences"),
        ([make_sequence("s", 3)], [make_round("s", 0), make_round("s", 2)], r"had 3 rounds, but .* \[0, 2\]"),
        ([make_sequence("s", 2)], [make_round("s", 0), make_round("s", 0)], r"\[0, 0\]"),
    ],
)
def test_a_unit_that_is_not_whole_is_not_written(store, sequences, rounds, message):
    with pytest.raises(ValueError, match=message):
        store.write_unit(UnitKey(unit_id="u", attempt="a", run_id="run"), PROVENANCE, sequences, rounds)


def test_an_attempt_is_never_overwritten(store):
    write_unit(store, "u1", "a1")
    with pytest.raises(ValueError, match="'a1' of unit 'u1' exists already"):
        write_unit(store, "u1", "a1")
    assert new_attempt() != new_attempt()


@pytest.mark.parametrize("unit_id", ["", "a/b", "a b", "../up", "u'1"])
def test_names_that_cannot_be_file_names_are_refused(store, unit_id):
    with pytest.raises(ValueError, match="unit id"):
        write_unit(store, unit_id, "a1")


def test_a_failed_write_leaves_nothing_behind(store, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("storage.parquet_files.pq.ParquetWriter", full)
    with pytest.raises(OSError, match="no space"):
        write_unit(store, "u1", "a1")
    assert [path for path in store.path.rglob("*unit-*") if path.is_file()] == []


# ------------------------------------------------------------------ once only


def test_the_first_committed_attempt_wins(store):
    first, second = write_unit(store, "u1", "a1"), write_unit(store, "u1", "a2")
    store.commit(second, "run", 1)
    result = store.commit([*first, *write_unit(store, "u2", "a3")], "run", 2)
    assert result.committed == ("u2",) and result.skipped == ("u1",)
    assert attempts(store) == [("u1", "a2", "a2"), ("u2", "a3", "a3")]
    assert counts(store) == (4, 12)


def test_two_attempts_in_one_batch_count_once(store):
    store.commit([*write_unit(store, "u1", "a1"), *write_unit(store, "u1", "a2")], "run", 1)
    assert attempts(store) == [("u1", "a1", "a1")] and counts(store) == (2, 6)


def test_the_same_files_twice_count_once(store):
    files = write_unit(store, "u1", "a1")
    store.commit(files, "run", 1)
    assert store.commit(files, "run", 2).skipped == ("u1",)
    assert counts(store) == (2, 6)


def test_half_a_unit_is_not_committed(store):
    with pytest.raises(ValueError, match=r"has only \['sequences'\]"):
        store.commit(write_unit(store, "u1", "a1")[1:], "run", 1)


def test_a_second_driver_of_the_same_run_is_fenced(store):
    first, second = store, TrajectoryStore(store.path)
    first.commit(write_unit(first, "u1", "a1"), "run", 1)
    assert second.begin("run", "tiny", DATASET) == 2
    second.commit(write_unit(second, "u2", "a2"), "run", 2)
    with pytest.raises(StoreFencedError, match="another driver of run 'run'") as caught:
        first.commit(write_unit(first, "u3", "a3"), "run", 2)
    assert isinstance(caught.value, GraftError)
    assert committed_units(second) == {"u1", "u2"} and counts(store) == (4, 12)


def test_a_fenced_driver_is_told_even_if_it_has_nothing_new(store):
    files = write_unit(store, "u1", "a1")
    store.commit(files, "run", 1)
    with pytest.raises(StoreFencedError):
        store.commit(files, "run", 1)


def test_a_driver_fenced_between_its_two_commits_adds_nothing(store):
    """The slow driver has its rounds in the log when the other takes over; its sequences must not follow."""

    class Slow(TrajectoryStore):
        def _not_in(self, log, units):
            other = TrajectoryStore(self.path)
            seq = other.begin("run", "tiny", DATASET)
            other.commit(write_unit(other, "u1", "fast"), "run", seq)
            return super()._not_in(log, units)

    with pytest.raises(StoreFencedError):
        Slow(store.path).commit(write_unit(store, "u1", "slow"), "run", 1)
    assert attempts(store) == [("u1", "fast", "fast")] and counts(store) == (2, 6)


def test_drivers_of_two_runs_share_a_store_and_each_unit_counts_once(store):
    """Both drivers look, both see that u1 is missing, both commit it: the log makes the second look again."""

    class Overtaken(TrajectoryStore):
        overtaken = False

        def _not_in(self, log, units):
            chosen = super()._not_in(log, units)
            if not self.overtaken:
                self.overtaken = True
                store.commit([*write_unit(store, "u1", "first"), *write_unit(store, "u2", "first")], "run", 1)
            return chosen

    late = Overtaken(store.path)
    seq = late.begin("other-run", "tiny", DATASET)
    result = late.commit([*write_unit(late, "u1", "late"), *write_unit(late, "u3", "late")], "other-run", seq)
    assert result.committed == ("u3",) and result.skipped == ("u1",)
    assert attempts(store) == [("u1", "first", "first"), ("u2", "first", "first"), ("u3", "late", "late")]
    assert counts(store) == (6, 18)


def test_threads_committing_at_once_lose_and_double_nothing(store):
    def drive(run_id):
        driver = TrajectoryStore(store.path)
        seq = driver.begin(run_id, "tiny", DATASET)
        for index in range(5):
            driver.commit(write_unit(driver, f"u{index}", f"{run_id}.{index}", run_id=run_id), run_id, seq + index)

    threads = [threading.Thread(target=drive, args=(f"run-{index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert committed_units(store) == {f"u{index}" for index in range(5)} and counts(store) == (10, 30)


# ------------------------------------------------------------------ crashes


def test_killed_while_writing(store):
    """A half-written file lies aside, under a name that no pattern for Parquet files finds."""
    (store.path / "_tmp").mkdir(exist_ok=True)
    (store.path / "_tmp" / "rounds-unit-u1-a1").write_bytes(b"PAR1 and no more")
    assert counts(store) == (0, 0)
    store.commit(write_unit(store, "u1", "a2"), "run", 1)
    assert counts(store) == (2, 6)


def test_killed_between_rename_and_commit(store):
    write_unit(store, "u1", "a1")
    resumed = TrajectoryStore(store.path)
    assert committed_units(resumed) == set() and counts(store) == (0, 0)
    resumed.commit(write_unit(resumed, "u1", "a2"), "run", resumed.begin("run", "tiny", DATASET))
    assert attempts(store) == [("u1", "a2", "a2")] and counts(store) == (2, 6)


def test_killed_between_the_two_commits(store):
    commit_rounds_only(store, write_unit(store, "u1", "a1"), 1)
    assert store.snapshot().rounds_files and not store.snapshot().sequences_files
    assert counts(store) == (0, 0) and committed_units(store) == set()
    resumed = TrajectoryStore(store.path)
    seq = resumed.begin("run", "tiny", DATASET)
    assert seq == 2
    resumed.commit(write_unit(resumed, "u1", "a2"), "run", seq)
    assert attempts(store) == [("u1", "a2", "a2")] and counts(store) == (2, 6)


def test_a_missing_file_is_not_committed(store):
    files = write_unit(store, "u1", "a1")
    (store.path / "sequences" / files[1].path).unlink()
    with pytest.raises(StoreError, match="is gone: unit 'u1' has to be decoded again"):
        store.commit(files, "run", 1)
    assert store.snapshot().rounds_files == ()


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_is_not_committed(store, damage):
    files = write_unit(store, "u1", "a1")
    path = store.path / "rounds" / files[0].path
    body = path.read_bytes()
    path.write_bytes(body[:-9] if damage == "cut" else body[:50] + bytes([body[50] ^ 1]) + body[51:])
    with pytest.raises(StoreError, match="is not the file that was written"):
        store.commit(files, "run", 1)
    assert committed_units(store) == set()


def test_a_wrong_description_is_not_committed(store):
    rounds, sequences = write_unit(store, "u1", "a1")
    with pytest.raises(StoreError, match="has 6 rows instead of 7"):
        store.commit([dataclasses.replace(rounds, rows=7), sequences], "run", 1)


def test_a_reader_sees_only_whole_units_while_units_are_committed_and_compacted(store):
    """The reader starts before the first commit and ends after the last; it must have seen some of them on the way."""
    seen, done, problems = [], threading.Event(), []

    def read():
        try:
            while True:
                last_turn = done.is_set()
                with connect(store.path, threads=1) as connection:
                    sequences = connection.sql("SELECT unit_id, count(*) FROM sequences GROUP BY ALL").fetchall()
                    rounds = connection.sql("SELECT unit_id, count(*) FROM rounds GROUP BY ALL").fetchall()
                assert {count for _, count in sequences} <= {2} and {count for _, count in rounds} <= {6}
                assert {unit for unit, _ in sequences} == {unit for unit, _ in rounds}
                seen.append(len(sequences))
                if last_turn:
                    return
        except BaseException as error:
            problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(24):
        write_unit(store, f"u{index}", "orphan")
        store.commit(write_unit(store, f"u{index}", "a1"), "run", index + 1)
        if index % 8 == 7:
            store.compact()
            store.vacuum(retention_hours=1)
    done.set()
    reader.join()
    assert not problems
    assert seen == sorted(seen) and seen[-1] == 24


def test_a_connection_keeps_its_snapshot(store):
    store.commit(write_unit(store, "u1", "a1"), "run", 1)
    with connect(store.path) as connection:
        store.commit(write_unit(store, "u2", "a1"), "run", 2)
        store.compact()
        assert connection.sql("SELECT count(*) FROM rounds").fetchall() == [(6,)]


# ------------------------------------------------------------------ snapshots and identity


def test_versions_name_a_data_set(store):
    store.commit(write_unit(store, "u1", "a1"), "run", 1)
    old = store.snapshot()
    store.commit(write_unit(store, "u2", "a1"), "run", 2)
    store.compact()
    again = store.snapshot(old.sequences_version, old.rounds_version)
    assert again == old and again.name == f"sequences@{old.sequences_version}+rounds@{old.rounds_version}"
    with connect(store.path, snapshot=again) as connection:
        assert connection.sql("SELECT DISTINCT unit_id FROM rounds").fetchall() == [("u1",)]
    with pytest.raises(StoreError, match="has no version 99"):
        store.snapshot(99, 99)


def test_a_store_that_is_not_there_is_an_empty_snapshot(tmp_path):
    store = TrajectoryStore(tmp_path / "nothing")
    snapshot = store.snapshot()
    assert snapshot.sequences_files == () and snapshot.name == "sequences@-1+rounds@-1"
    assert store.snapshot(-1, -1) == snapshot
    assert not store.exists
    assert not (tmp_path / "nothing").exists()


def test_a_place_where_nothing_can_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"no trajectory store can be made at .*/file/store") as caught:
        TrajectoryStore(tmp_path / "file" / "store").begin("run", "tiny", DATASET)
    assert "\n" not in str(caught.value)


def test_a_store_that_nothing_can_be_written_to_is_named(store):
    (store.path / "_tmp").rmdir()
    (store.path / "_tmp").write_text("in the way")
    with pytest.raises(StoreError, match=r"writing to .* failed: ") as caught:
        TrajectoryStore(store.path).prepare()
    assert "\n" not in str(caught.value)


@contextlib.contextmanager
def full_disk():
    """Every file of this process that would get longer than nothing: EFBIG, as close as it gets without a real one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_nothing_is_committed_and_nothing_is_lost(store):
    turn = store.begin("run", "tiny", DATASET)
    files = write_unit(store, "u1", "a1")
    with full_disk():
        with pytest.raises(OSError, match="File too large") as caught:
            write_unit(store, "u2", "a1")
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(StoreError, match=r"rounds (cannot be written|.*given up)") as refused:
            store.commit(files, "run", turn)
        with pytest.raises(StoreError, match="writing to"):
            store.prepare()
        with pytest.raises(StoreError, match=r"no trajectory store can be made at .*: File too large"):
            TrajectoryStore(store.path.parent / "other").begin("run", "tiny", DATASET)
    assert str(refused.value).isascii() and "\n" not in str(refused.value)
    assert committed_units(store) == set()
    assert list((store.path / "_tmp").iterdir()) == []
    assert store.commit(files, "run", turn).committed == ("u1",)


@pytest.mark.parametrize("is_gone", [True, False])
def test_upkeep_of_a_store_with_a_damaged_file_is_one_sentence(store, is_gone, monkeypatch):
    for name in ("a", "b"):
        store.commit(write_unit(store, name, "first"), "run", 1 + (name == "b"))
    damaged = sorted((store.path / "rounds").glob("*/*/*.parquet"))[0]
    damaged.unlink() if is_gone else damaged.write_bytes(b"not Parquet at all")
    with pytest.raises(StoreError, match=r"the compaction of .* failed: "):
        store.compact()
    with pytest.raises(StoreError, match=r"the deletion from .* failed: "):
        store.forget(run_id="run")

    def refuse(*_, **__):
        raise DeltaError("somebody has taken the folder away")

    monkeypatch.setattr(DeltaTable, "vacuum", refuse)
    with pytest.raises(StoreError, match=r"the vacuum of .* failed: somebody has taken the folder away"):
        store.vacuum(retention_hours=0)


def test_drivers_that_begin_at_once_find_one_store(tmp_path):
    started = threading.Barrier(3)
    firsts = []

    def begin(run_id):
        started.wait()
        firsts.append(TrajectoryStore(tmp_path).begin(run_id, "tiny", DATASET))

    threads = [threading.Thread(target=begin, args=(f"run-{index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert firsts == [1, 1, 1] and TrajectoryStore(tmp_path).exists


def test_committing_before_begin_says_so(tmp_path):
    store = TrajectoryStore(tmp_path / "nothing")
    with pytest.raises(StoreError, match="there is no trajectory store at"):
        store.commit(write_unit(store, "u1", "a1"), "run", 1)


def test_another_data_set_under_the_same_target_is_refused(store):
    with pytest.raises(
        StoreError, match="target 'tiny' with tokenizer_sha256 k-1, this run has k-2: use another store"
    ):
        store.begin("run-2", "tiny", {**DATASET, "tokenizer_sha256": "k-2"})
    assert store.begin("run-2", "tiny", DATASET) == 1
    assert store.begin("run-2", "other-target", {**DATASET, "tokenizer_sha256": "k-2"}) == 1


def test_a_store_of_a_newer_version_is_refused(store):
    DeltaTable(store.path / "rounds").alter.set_table_properties(
        {"graft.schemaVersion": "99"}, raise_if_not_exists=False
    )
    with pytest.raises(StoreError, match="has schema version 99"):
        store.begin("run", "tiny", DATASET)


def test_roots(tmp_path):
    assert TrajectoryStore(f"file://{tmp_path}/with%20space").path == tmp_path / "with space"
    assert TrajectoryStore("relative").path.is_absolute()
    with pytest.raises(StoreError, match=r"uses gs://, not a local path, file:// or s3://"):
        TrajectoryStore("gs://bucket/store")
    with pytest.raises(StoreError, match="readers would take for a pattern"):
        TrajectoryStore(tmp_path / "run[1]")


# ------------------------------------------------------------------ schema changes


def older(schema, *dropped):
    return pa.schema([column for column in schema if column.name not in dropped])


def write_older_unit(store, schemas, unit_id):
    """What code of an earlier version would have left: the same file without the newer columns."""
    files = []
    for info in write_unit(store, unit_id, "old"):
        path = store.path / info.table / info.path
        pq.write_table(pq.ParquetFile(path).read(columns=schemas[info.table].names), path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(dataclasses.replace(info, size=path.stat().st_size, sha256=sha256))
    return files


def test_an_older_store_is_upgraded_and_read_beside_new_files(tmp_path):
    schemas = {"sequences": older(SEQUENCES, "policy_fingerprint"), "rounds": older(ROUNDS, "followed", "batch_rows")}
    past = TrajectoryStore(tmp_path, schemas)
    past.begin("run", "tiny", DATASET)
    past.commit(write_older_unit(past, schemas, "u1"), "run", 1)
    with connect(tmp_path) as connection:  # a new reader, before any new writer
        assert connection.sql("SELECT DISTINCT followed, batch_rows FROM rounds").fetchall() == [(None, None)]

    present = TrajectoryStore(tmp_path)
    present.commit(write_unit(present, "u2", "new"), "run", present.begin("run", "tiny", DATASET))
    for _ in ("as written", "compacted"):
        with connect(tmp_path) as connection:
            rows = connection.sql("SELECT DISTINCT unit_id, batch_rows FROM rounds ORDER BY 1").fetchall()
            names = connection.sql("SELECT DISTINCT unit_id, policy_fingerprint FROM sequences ORDER BY 1").fetchall()
        assert rows == [("u1", None), ("u2", 3)] and names == [("u1", None), ("u2", "p-1")]
        present.compact()


def test_a_store_of_version_1_reads_and_takes_sequences_with_a_source(tmp_path):
    schemas = {"sequences": older(SEQUENCES, "source"), "rounds": older(ROUNDS, "hidden")}
    past = TrajectoryStore(tmp_path, schemas)
    past.begin("run", "tiny", DATASET)
    for table in schemas:
        past_log = DeltaTable(tmp_path / table)
        past_log.alter.set_table_properties({"graft.schemaVersion": "1"}, raise_if_not_exists=False)
    past.commit(write_older_unit(past, schemas, "u1"), "run", 1)
    assert run_query(tmp_path, "SELECT DISTINCT source FROM sequences").to_pylist() == [{"source": None}]

    present, key = TrajectoryStore(tmp_path), UnitKey(unit_id="u2", attempt="a", run_id="served")
    seq = present.begin("served", "tiny", DATASET)
    traffic = dataclasses.replace(PROVENANCE, source="traffic")
    present.commit(present.write_unit(key, traffic, [make_sequence("s", 1)], [make_round("s", 0)]), "served", seq)
    present.commit(write_unit(present, "u3", "new"), "run", present.begin("run", "tiny", DATASET))
    assert DeltaTable(tmp_path / "sequences").metadata().configuration["graft.schemaVersion"] == str(SCHEMA_VERSION)
    for _ in ("as written", "compacted"):
        found = run_query(tmp_path, "SELECT DISTINCT unit_id, source FROM sequences ORDER BY 1").to_pylist()
        assert [row["source"] for row in found] == [None, "traffic", "collect"]
        sources = {row["run_id"]: row["sources"] for row in run_query(tmp_path, "runs").to_pylist()}
        assert sources == {"run": "collect", "served": "traffic"}
        present.compact()


def test_a_store_of_version_2_reads_and_takes_rounds_with_hidden_states(tmp_path):
    schemas = {"sequences": SEQUENCES, "rounds": older(ROUNDS, "hidden")}
    past = TrajectoryStore(tmp_path, schemas)
    past.begin("run", "tiny", DATASET)
    for table in schemas:
        past_log = DeltaTable(tmp_path / table)
        past_log.alter.set_table_properties({"graft.schemaVersion": "2"}, raise_if_not_exists=False)
    past.commit(write_older_unit(past, schemas, "u1"), "run", 1)
    sql = "SELECT DISTINCT unit_id, hidden FROM rounds ORDER BY 1, 2"
    assert [row["hidden"] for row in run_query(tmp_path, sql).to_pylist()] == [None]

    present, key = TrajectoryStore(tmp_path), UnitKey(unit_id="u2", attempt="a", run_id="run")
    seq = present.begin("run", "tiny", DATASET)
    hidden = np.array([[0.5, 1.0], [2.0, -3.0]], np.float32)
    rounds = [make_round("s", 0, hidden=hidden), make_round("s", 1)]
    present.commit(present.write_unit(key, PROVENANCE, [make_sequence("s", 2)], rounds), "run", seq)
    for _ in ("as written", "compacted"):
        found = [(row["unit_id"], row["hidden"]) for row in run_query(tmp_path, sql).to_pylist()]
        assert found == [("u1", None), ("u2", hidden.tolist()), ("u2", None)]
        present.compact()


def test_files_that_an_older_reader_does_not_know_stay_readable(tmp_path):
    """A column that only newer code knows is shown as it is."""
    wider = {"sequences": SEQUENCES.append(pa.field("mood", pa.string())), "rounds": ROUNDS}
    future = TrajectoryStore(tmp_path, wider)
    future.begin("run", "tiny", DATASET)
    files = write_unit(future, "u1", "a1")
    path = future.path / "sequences" / files[1].path
    table = pq.ParquetFile(path).read()
    pq.write_table(table.append_column("mood", pa.array(["calm"] * table.num_rows)), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    files[1] = dataclasses.replace(files[1], size=path.stat().st_size, sha256=sha256)
    future.commit(files, "run", 1)
    with connect(tmp_path) as connection:
        assert connection.sql("SELECT DISTINCT mood FROM sequences").fetchall() == [("calm",)]


def test_a_file_with_a_changed_type_is_refused_at_commit(store):
    rounds, sequences = write_unit(store, "u1", "a1")
    path = store.path / "rounds" / rounds.path
    table = pq.ParquetFile(path).read()
    index = table.schema.get_field_index("budget")
    pq.write_table(table.set_column(index, "budget", table.column("budget").cast(pa.string())), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    changed = dataclasses.replace(rounds, size=path.stat().st_size, sha256=sha256)
    with pytest.raises(StoreError, match="column 'budget' as string, but the table has it as int32"):
        store.commit([changed, sequences], "run", 1)
    assert committed_units(store) == set()


# ------------------------------------------------------------------ upkeep


def test_compaction_keeps_rows_and_units(store):
    for index in range(6):
        store.commit(write_unit(store, f"u{index}", "a1"), "run", index + 1)
    before = counts(store)
    result = store.compact()
    assert (result.num_files_before, result.num_files_after) == (12, 2)
    assert counts(store) == before and len(store.snapshot().rounds_files) == 1
    fresh = TrajectoryStore(store.path)
    assert committed_units(fresh) == {f"u{index}" for index in range(6)}
    assert fresh.begin("run", "tiny", DATASET) == 7  # the log still knows what was committed with
    assert fresh.commit(write_unit(fresh, "u0", "a2"), "run", 7).skipped == ("u0",)


def test_compaction_drops_rounds_whose_sequences_never_came(store):
    orphan = write_unit(store, "u1", "orphan")
    commit_rounds_only(store, orphan, 1)
    store.commit(write_unit(store, "u1", "a1"), "run", 2)
    assert store.compact(orphan_age_hours=1).num_purged_attempts == 0  # too young: its driver may be about to commit
    with connect(store.path) as connection:
        assert connection.sql("SELECT count(*) FROM rounds_of_all_attempts").fetchall() == [(12,)]
    assert store.compact(orphan_age_hours=0).num_purged_attempts == 1
    with connect(store.path) as connection:
        assert connection.sql("SELECT DISTINCT attempt FROM rounds_of_all_attempts").fetchall() == [("a1",)]
    assert counts(store) == (2, 6)


def test_vacuum_removes_orphans_and_old_files_written_aside(store):
    store.commit(write_unit(store, "u1", "a1"), "run", 1)
    kept = store.snapshot()
    orphans = write_unit(store, "u2", "dead")
    fresh = write_unit(store, "u3", "about-to-be-committed")
    old_tmp, new_tmp = store.path / "_tmp" / "rounds-unit-u4-dead", store.path / "_tmp" / "rounds-unit-u5-alive"
    old_tmp.write_bytes(b"x"), new_tmp.write_bytes(b"x")
    for path in [old_tmp, *(store.path / file.table / file.path for file in orphans)]:
        age(path, 48)
    deleted = store.vacuum(retention_hours=24)
    assert sorted(deleted) == sorted([*(f"{file.table}/{file.path}" for file in orphans), f"_tmp/{old_tmp.name}"])
    assert new_tmp.exists() and not old_tmp.exists()
    assert store.snapshot().rounds_files == kept.rounds_files
    store.commit(fresh, "run", 2)
    assert counts(store) == (4, 12)


def test_vacuum_removes_what_compaction_replaced(store):
    for index in range(3):
        store.commit(write_unit(store, f"u{index}", "a1"), "run", index + 1)
    store.compact()
    assert len(store.vacuum(retention_hours=0)) == 6
    assert counts(store) == (6, 18)


def test_five_thousand_rounds(store):
    files = []
    for index in range(10):
        files += write_unit(store, f"u{index}", "a1", num_sequences=10, num_rounds=50)
    store.commit(files, "run", 1)
    assert counts(store) == (100, 5000)
    assert store.compact().num_files_after == 2 and counts(store) == (100, 5000)
