"""A store named by a URI obeys the rules of one at a path: s3:// on a server of our own, through the real clients, and
file://."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, FileSystem
from typer.testing import CliRunner

from graft_dist.errors import StoreError
from jobs.cli import app
from storage import StoreFencedError, TrajectoryStore, connect, run_query
from tests.storage.records import DATASET, committed_units, write_unit


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("bucket_server.py"))]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert server.stdin is not None and server.stdout is not None
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{int(server.stdout.readline())}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        files, name = FileSystem.from_uri("s3://graft?allow_bucket_creation=true&region=us-east-1")
        files.create_dir(name)
        yield "s3://graft"
        server.stdin.close()


@pytest.fixture(params=["s3", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    if request.param == "file":
        return f"{tmp_path.as_uri()}/a%20folder/store"
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}/store"


def counts(root: str) -> tuple[int, int]:
    """(number of sequences, number of visible rounds)"""
    with connect(root, threads=1) as connection:
        sizes = [connection.sql(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in ("sequences", "rounds")]
    return sizes[0], sizes[1]


def test_units_are_written_committed_merged_forgotten_and_vacuumed(root: str, tmp_path: Path) -> None:
    store = TrajectoryStore(root)
    assert not store.exists and store.snapshot().rounds_files == ()
    assert store.begin("run", "tiny", DATASET) == 1 and store.exists
    write_unit(store, "u0", "never-committed")
    for index in (1, 2, 3):
        store.commit(write_unit(store, f"u{index}", "a1", run_id="old" if index == 1 else "run"), "run", index)
        assert counts(root) == (2 * index, 6 * index)
    assert store.commit(write_unit(store, "u1", "a2"), "run", 4).skipped == ("u1",)
    with pytest.raises(StoreFencedError):
        TrajectoryStore(root).commit(write_unit(store, "u9", "late"), "run", 3)

    before = store.snapshot()
    with connect(root) as reader:
        assert store.compact().num_files_after == 2 and counts(root) == (6, 18)
        assert reader.sql("SELECT count(*) FROM rounds").fetchall() == [(18,)]
    assert store.snapshot(before.sequences_version, before.rounds_version) == before
    assert store.begin("run", "tiny", DATASET) == 4 and committed_units(store) == {"u1", "u2", "u3"}
    assert run_query(root, "runs")["run_id"].to_pylist() == ["old", "run"]

    answered = CliRunner().invoke(app, ["store", "forget", "--store", root, "--run", "old"])
    assert answered.exit_code == 0, answered.output
    assert counts(root) == (4, 12)
    exported = store.export(tmp_path / "rows")
    assert len(list(exported.rglob("*.parquet"))) == 2
    deleted = store.vacuum(retention_hours=0)
    below = FileSelector((store.root / "rounds").path, recursive=True)
    left = [info for info in store.root.files.get_file_info(below) if info.extension == "parquet"]
    assert len(deleted) == 14 and len(left) == 1
    question = ["--format", "csv", "SELECT count(*) AS n FROM rounds"]
    answered = CliRunner().invoke(app, ["query", "--store", root, *question])
    assert answered.output.split() == ["n", "12"]
    aside = store.path / "_tmp" if store.root.is_local else tmp_path / "graft-dist" / "uploads"
    assert not list(aside.iterdir())  # nothing is left of what was written aside


def test_two_drivers_at_once_and_a_reader(root: str) -> None:
    """Both commit the same units under different runs; each counts once, and the reader only ever sees whole ones."""
    problems: list[BaseException] = []
    is_done = threading.Event()
    TrajectoryStore(root).begin("run-0", "tiny", DATASET)

    def drive(run_id: str) -> None:
        try:
            driver = TrajectoryStore(root)
            seq = driver.begin(run_id, "tiny", DATASET)
            for index in range(4):
                files = write_unit(driver, f"u{index}", f"{run_id}.{index}", run_id=run_id)
                driver.commit(files, run_id, seq + index)
        except BaseException as error:
            problems.append(error)

    def read() -> None:
        try:
            while not is_done.is_set():
                with connect(root, threads=1) as connection:
                    found = connection.sql("SELECT count(*) FROM rounds GROUP BY unit_id").fetchall()
                assert {count for (count,) in found} <= {6}
        except BaseException as error:
            problems.append(error)

    reader = threading.Thread(target=read)
    drivers = [threading.Thread(target=drive, args=(f"run-{index}",)) for index in range(2)]
    for thread in (reader, *drivers):
        thread.start()
    for thread in drivers:
        thread.join()
    is_done.set()
    reader.join()
    assert problems == [] and counts(root) == (8, 24)


def test_an_object_that_is_gone_or_not_what_was_written_is_refused(root: str) -> None:
    store = TrajectoryStore(root)
    store.begin("run", "tiny", DATASET)
    for damage, message in (("cut", "is not the file that was written"), ("delete", "has to be decoded again")):
        files = write_unit(store, "u1", damage)
        place = store.root / "rounds" / files[0].path
        place.remove()
        if damage == "cut":
            with place.files.open_output_stream(place.path) as stream:
                stream.write(b"PAR1")
        with pytest.raises(StoreError, match=message):
            store.commit(files, "run", 1)
    assert store.commit(write_unit(store, "u1", "whole"), "run", 1).committed == ("u1",)


def test_pinned_files_outlive_vacuum_until_they_are_unpinned(root: str) -> None:
    store = TrajectoryStore(root)
    turn = store.begin("run", "tiny", DATASET)
    for index in range(3):
        store.commit(write_unit(store, f"u{index}", "a1"), "run", turn + index)
    read = store.snapshot()
    store.pin("learning", read)
    assert store.compact().num_files_after == 2
    assert store.vacuum(retention_hours=0) == []
    with connect(root, snapshot=read, threads=1) as connection:
        assert connection.sql("SELECT count(*) FROM rounds").fetchall() == [(18,)]
    store.unpin("learning")
    store.unpin("learning")
    deleted = store.vacuum(retention_hours=0)
    assert {path.rpartition("/")[2] for path in deleted} == {f"unit-u{index}-a1.parquet" for index in range(3)}
    assert len(deleted) == 6 and counts(root) == (6, 18)


def test_a_bucket_that_is_not_there_is_one_sentence(bucket: str) -> None:
    with pytest.raises(StoreError, match="s3://no-such-bucket/store") as caught:
        TrajectoryStore("s3://no-such-bucket/store").begin("run", "tiny", DATASET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["s3://", "s3://bucket/a b", "s3://bucket/run[1]", "s3://bucket//store"])
def test_names_that_readers_would_take_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(StoreError, match=r"is not s3://BUCKET/PREFIX"):
        TrajectoryStore(name)


def test_rows_are_exported_to_folders_only(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is in an object store; this needs a folder"):
        TrajectoryStore(tmp_path).export(f"{bucket}/rows")
