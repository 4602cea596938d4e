"""A copy of a store that is written to meanwhile holds whole units, if made in the order of the operations page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from storage import TrajectoryStore, connect
from tests.storage.records import DATASET, commit_rounds_only, write_unit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
DOCUMENTED = [("sequences", "log"), ("sequences", "files"), ("rounds", "log"), ("rounds", "files")]


class Writer:
    """Commits a unit each time it is called; now and then the log gets a checkpoint, and files are merged."""

    def __init__(self, root: Path) -> None:
        self.store = TrajectoryStore(root)
        self.num_units = 0

    def __call__(self) -> None:
        seq = self.store.begin("run", "tiny", DATASET)
        self.store.commit(write_unit(self.store, f"u{self.num_units}", "a1"), "run", seq)
        self.num_units += 1
        for table in ("sequences", "rounds"):
            DeltaTable(self.store.path / table).create_checkpoint()
        if self.num_units % 3 == 0:
            self.store.compact()


def copy_log(source: Path, dest: Path, meanwhile: Callable[[], None]) -> None:
    """As rsync does it: first the names, then what they hold."""
    names = [file.name for file in source.iterdir() if file.name != "_last_checkpoint"]
    meanwhile()
    dest.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy2(source / name, dest / name)


def copy_files(source: Path, dest: Path, meanwhile: Callable[[], None]) -> None:
    meanwhile()
    shutil.copytree(source, dest, ignore=shutil.ignore_patterns("_delta_log"), dirs_exist_ok=True)


def copy(store: Path, backup: Path, order: list[tuple[str, str]], meanwhile: Callable[[], None]) -> None:
    for table, what in order:
        if what == "log":
            copy_log(store / table / "_delta_log", backup / table / "_delta_log", meanwhile)
        else:
            copy_files(store / table, backup / table, meanwhile)


def units(root: Path, table: str) -> set[str]:
    with connect(root, threads=1) as connection:
        return {row[0] for row in connection.execute(f"SELECT DISTINCT unit_id FROM {table}").fetchall()}


def test_the_page_says_the_order_that_is_tested_here() -> None:
    (block,) = re.findall(r"```sh\n(for table in sequences rounds;.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    log, files = (line.split() for line in block.splitlines() if "rsync" in line)
    assert log[:5] == ["rsync", "-a", "--exclude", "_last_checkpoint", "/data/store/$table/_delta_log"]
    assert files[:5] == ["rsync", "-a", "--exclude", "_delta_log", "/data/store/$table/"]


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_copy_made_while_units_are_committed_and_merged_holds_whole_units(tmp_path: Path, num_before: int) -> None:
    store, backup = tmp_path / "store", tmp_path / "backup"
    writer = Writer(store)
    for _ in range(num_before):
        writer()
    copy(store, backup, DOCUMENTED, writer)
    assert writer.num_units == num_before + len(DOCUMENTED)
    held = units(backup, "sequences")
    assert {f"u{index}" for index in range(num_before)} <= held and units(backup, "rounds") == held
    # What is restored goes on: the missing units are decoded again, and every unit is whole and there once.
    restored = TrajectoryStore(backup)
    seq = restored.begin("run", "tiny", DATASET)
    everything = [write_unit(restored, f"u{index}", "a2") for index in range(writer.num_units)]
    assert set(restored.commit([file for pair in everything for file in pair], "run", seq).skipped) == held
    with connect(backup, threads=1) as connection:
        found = connection.sql("SELECT unit_id, count(*) FROM rounds GROUP BY unit_id").fetchall()
    assert sorted(found) == [(f"u{index}", 6) for index in range(writer.num_units)]


def test_a_copy_made_between_the_two_halves_of_a_commit_leaves_the_unit_to_be_decoded_again(tmp_path: Path) -> None:
    store, backup = tmp_path / "store", tmp_path / "backup"
    writer = Writer(store)
    writer()
    commit_rounds_only(writer.store, write_unit(writer.store, "half", "a1"), writer.store.begin("run", "tiny", DATASET))
    copy(store, backup, DOCUMENTED, lambda: None)
    assert units(backup, "sequences") == units(backup, "rounds") == {"u0"}


def test_copied_the_other_way_round_units_would_lack_their_rounds(tmp_path: Path) -> None:
    """That the order matters at all."""
    store, backup = tmp_path / "store", tmp_path / "backup"
    writer = Writer(store)
    writer()
    copy(store, backup, [*DOCUMENTED[2:], *DOCUMENTED[:2]], writer)
    assert units(backup, "sequences") - units(backup, "rounds") != set()
