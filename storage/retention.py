"""Deletion from one Delta table: whole days, or all rows of a run, each in one commit; other rows stay as they are.

The files stay on disk, and earlier versions readable, until `vacuum`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from deltalake import DeltaTable

from storage.compaction import LiveFile, add_rows, body_schema, live_files, removal, replace_files
from storage.parquet_files import distinct_values


def forget_days(log: DeltaTable, folder: Path, before: date, target: str | None) -> int:
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


def forget_run(log: DeltaTable, folder: Path, aside: Path, run_id: str) -> int:
    """Take out a run's rows; files that hold other runs' too are written anew without them. Returns how many files.

    Raises:
        StoreError: other upkeep came first; nothing was changed then.
    """
    schema = body_schema(log)
    concerned = [file for file in live_files(log) if run_id in distinct_values([folder / file.path], "run_id")]
    if not concerned:
        return 0
    mixed = [file for file in concerned if distinct_values([folder / file.path], "run_id") != {run_id}]
    added = [
        add_rows(folder, aside, file.partition, schema, _others(folder, file, schema, run_id), data_change=True)
        for file in mixed
    ]
    replace_files(log, folder, added, [removal(file, data_change=True) for file in concerned])
    return len(concerned)


def _others(folder: Path, file: LiveFile, schema: pa.Schema, run_id: str) -> Iterator[pa.Table]:
    rows = pyarrow.dataset.dataset([str(folder / file.path)], format="parquet", schema=schema)
    for batch in rows.to_batches(filter=pc.field("run_id") != run_id):
        if batch.num_rows:
            yield pa.Table.from_batches([batch], schema)
