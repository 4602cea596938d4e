"""Deletion from one Delta table: whole days, or all rows of a run, each in one commit; other rows stay as they are.

The files stay on disk, and earlier versions readable, until `vacuum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from storage.compaction import add_rows, body_schema, live_files, removal, replace_files
from storage.parquet_files import batches_of, distinct_values
from storage.place import Place


def forget_days(log: DeltaTable, folder: Place, before: date, target: str | None) -> int:
    """Take out what was written on days before `before`, of one target or all; returns how many files went.

    Raises:
        StoreError: other upkeep came first; nothing was changed then.
    """
    gone = [
        file
        for file in live_files(log)
        if date.fromisoformat(file.partition[1]) < before and target in (None, file.partition[0])
    ]
    if gone:
        replace_files(log, folder, [], [removal(file, data_change=True) for file in gone])
    return len(gone)


def forget_run(log: DeltaTable, folder: Place, aside: Path, run_id: str) -> int:
    """Take out a run's rows; files that hold other runs' too are written anew without them. Returns how many files.

    Raises:
        StoreError: other upkeep came first; nothing was changed then.
    """
    schema = body_schema(log)
    added, removed = [], []
    for file in live_files(log):
        place = folder / file.path
        runs = distinct_values([place], "run_id")
        if run_id in runs:
            removed.append(removal(file, data_change=True))
            if len(runs) > 1:
                rows = _without_run(batches_of([place], schema), run_id)
                added.append(add_rows(folder, aside, file.partition, schema, rows, data_change=True))
    if removed:
        replace_files(log, folder, added, removed)
    return len(removed)


def _without_run(batches: Iterable[pa.RecordBatch], run_id: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.filter(pc.not_equal(batch.column("run_id"), run_id))
