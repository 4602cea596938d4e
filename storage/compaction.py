"""Compaction of one Delta table: many small files become few, rounds whose sequences never came are dropped.

Not the compaction that `deltalake` brings: two of those at once, or one with an outdated view of the log, both succeed
and leave every row twice (seen with 1.6.6; its commits ignore application transactions). Ours is one commit of removals
and additions under a fence that only compactions use, so the second of two fails and changes nothing.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from graft_dist.errors import StoreError
from storage.parquet_files import batches_of, write_file
from storage.place import Place
from storage.schema import PARTITION_COLUMNS

_FENCE = "graft-dist/compact"
_ROWS_PER_GROUP = 50_000  # DuckDB reads row groups in parallel; one is held in memory while writing
_BYTES_PER_GROUP = 64 << 20  # of rows with hidden states, fewer make a group


@dataclass(frozen=True)
class LiveFile:
    """A file that the log names."""

    path: str  # relative to the table's folder
    size: int  # bytes
    partition: tuple[str, str]  # target, date


def live_files(log: DeltaTable) -> list[LiveFile]:
    """The files of one version of a table, sorted by path."""
    # Not the log's own list of URIs: it spells a blank in the root as %20, which readers of local files take literally.
    actions = pa.table(log.get_add_actions(flatten=True))
    names = ["path", "size_bytes", *(f"partition.{name}" for name in PARTITION_COLUMNS)]
    columns = (actions.column(name).to_pylist() if actions.num_rows else [] for name in names)
    return sorted(
        (LiveFile(path, size, (target, str(date))) for path, size, target, date in zip(*columns, strict=True)),
        key=lambda file: file.path,
    )


def compact_table(
    log: DeltaTable, folder: Place, aside: Path, *, keep: Sequence[str], drop: Sequence[str], target_size: int
) -> None:
    """Replace small files by merged ones, in one commit.

    Args:
        log: the table, as of a version read before `keep` and `drop` were worked out.
        folder: the table's folder.
        aside: local folder for files being written; of a local store, on the same file system.
        keep: paths not to touch.
        drop: paths whose rows are to go.
        target_size: bytes; merged files are filled up to about this, and files of more than half of it stay.

    Raises:
        StoreError: if another compaction came first; nothing was changed then.
    """
    untouched = {*keep, *drop}
    mergeable = [file for file in live_files(log) if file.path not in untouched and 2 * file.size <= target_size]
    bins = [group for group in _bins(mergeable, target_size) if len(group) > 1]
    dropped = [file for file in live_files(log) if file.path in set(drop)]
    if not bins and not dropped:
        return
    schema = body_schema(log)
    added = [_merge(group, folder, aside, schema) for group in bins]
    removed = [removal(file, data_change=False) for group in bins for file in group]
    removed += [removal(file, data_change=True) for file in dropped]
    replace_files(log, folder, added, removed)


def replace_files(log: DeltaTable, folder: Place, added: Sequence[AddAction], removed: Sequence[RemoveAction]) -> None:
    """Take files out of a table's log and put others in, in one commit under the fence of all upkeep.

    Raises:
        StoreError: if other upkeep came first; nothing was changed then, and the added files are deleted.
    """
    turn = (log.transaction_version(_FENCE) or 0) + 1
    try:
        log.create_write_transaction(
            [*added, *removed],
            "append",
            log.schema(),
            partition_by=list(PARTITION_COLUMNS),
            commit_properties=CommitProperties(app_transactions=[Transaction(_FENCE, turn)]),
        )
    except CommitFailedError as error:
        for action in added:
            (folder / action.path).remove()
        raise StoreError(f"the compaction of {folder} met another one and changed nothing ({error}).") from error


def _bins(files: Sequence[LiveFile], target_size: int) -> list[list[LiveFile]]:
    """Neighbours of one partition, together at most `target_size`."""
    bins: list[list[LiveFile]] = []
    room: Mapping[tuple[str, str], int] = {}
    for file in sorted(files, key=lambda file: (file.partition, file.path)):
        if file.size > room.get(file.partition, 0):
            bins.append([])
            room = {file.partition: target_size}
        bins[-1].append(file)
        room = {file.partition: room[file.partition] - file.size}
    return bins


def _merge(group: Sequence[LiveFile], folder: Place, aside: Path, schema: pa.Schema) -> AddAction:
    rows = batches_of([folder / file.path for file in group], schema)
    return add_rows(folder, aside, group[0].partition, schema, rows, data_change=False)


def add_rows(
    folder: Place,
    aside: Path,
    partition: tuple[str, str],
    schema: pa.Schema,
    rows: Iterable[pa.RecordBatch],
    *,
    data_change: bool,
) -> AddAction:
    """Write rows as a new file of a partition (target, date), and return what the log is to say of it."""
    target, date = partition
    name = f"part-{uuid.uuid4().hex}"
    path = f"target={target}/date={date}/{name}.parquet"
    written = write_file(aside / f"{folder.name}-{name}", folder / path, schema, _row_groups(rows, schema))
    return AddAction(
        path=path,
        size=written.size,
        partition_values={"target": target, "date": date},
        modification_time=int(time.time() * 1000),
        data_change=data_change,
        stats=json.dumps({"numRecords": written.rows}),
    )


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows in their order, so that a unit's stay together."""
    waiting: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        waiting.append(batch)
        num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
        if num_rows >= _ROWS_PER_GROUP or num_bytes >= _BYTES_PER_GROUP:
            yield pa.Table.from_batches(waiting, schema)
            waiting, num_rows, num_bytes = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting, schema)


def removal(file: LiveFile, *, data_change: bool) -> RemoveAction:
    """What the log is to say of a file that goes."""
    return RemoveAction(
        path=file.path,
        data_change=data_change,
        deletion_timestamp=int(time.time() * 1000),
        size=file.size,
        partition_values=dict(zip(PARTITION_COLUMNS, file.partition, strict=True)),
    )


def body_schema(log: DeltaTable) -> pa.Schema:
    """The columns of a table's files: all but those that the folders' names hold."""
    full = pa.schema(log.schema().to_arrow())
    return pa.schema([column for column in full if column.name not in PARTITION_COLUMNS])
