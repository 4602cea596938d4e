"""A plain copy of a store's rows: few Parquet files in hive folders, for tools that know no Delta log."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from pathlib import Path

from graft_dist.errors import StoreError
from storage.place import Place
from storage.query import connect, quoted
from storage.schema import PARTITION_COLUMNS
from storage.trajectories import TrajectoryStore

_MARKER = "_graft_export"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # renameat2(2): both names exist before and after, each with the other's folder
_ORDER = {"sequences": "sequence_id", "rounds": "sequence_id, kind, round_index"}


def export_tree(root: str | os.PathLike[str], dest: str | os.PathLike[str]) -> Path:
    """Write the store's present rows to `dest` as `<table>/target=<slug>/date=<day>/*.parquet`, only committed ones.

    The tree is written aside and takes its place in one step: a reader finds the whole old export or the whole new one.
    A table without rows is an empty folder. The copy is not flushed to disk: after a power cut, export again.

    Raises:
        StoreError: if there is no store, if `dest` is no folder, holds anything but an earlier export, or if the file
            system cannot swap two folders.
    """
    source, final = TrajectoryStore(root), Place.parse(dest).local
    if not source.exists:
        raise StoreError(f"there is no trajectory store at {source.root}.")
    if final.exists() and not (final / _MARKER).is_file():
        raise StoreError(f"{final} exists and is no earlier export: choose another folder.")
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.parent / f".{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        _write_tree(str(source.root), aside)
        if final.exists():
            _exchange(aside, final)
        else:
            aside.rename(final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _write_tree(source: str, aside: Path) -> None:
    aside.mkdir()
    (aside / _MARKER).write_text("Written by graft-dist; the next export replaces this folder.\n", encoding="utf-8")
    with connect(source) as connection:
        # One writer, so that each partition becomes one file.
        connection.execute("SET threads = 1")
        for table, order in _ORDER.items():
            folder = aside / table
            folder.mkdir()
            partitions = ", ".join(PARTITION_COLUMNS)
            connection.execute(
                f"COPY (SELECT * FROM {table} ORDER BY {partitions}, {order}) TO {quoted(str(folder))} "
                f"(FORMAT parquet, COMPRESSION zstd, PARTITION_BY ({partitions}), OVERWRITE_OR_IGNORE)"
            )


def _exchange(first: Path, second: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        names = os.fsencode(first), os.fsencode(second)
        if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        reason = os.strerror(ctypes.get_errno())
    else:
        reason = "not supported by this system"
    raise StoreError(f"cannot swap {second} for the new export in one step ({reason}): export to a new folder.")
