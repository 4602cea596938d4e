"""Single Parquet files: written so that a file under its final name is always complete; small questions about them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq

from storage.place import Place

_CHUNK_BYTES = 8 << 20  # read at once; of an object, one request
_BATCH_ROWS = 4096  # decoded at once, some megabytes


@dataclass(frozen=True)
class WrittenFile:
    """What is there after `write_file`."""

    size: int  # bytes
    rows: int
    sha256: str


def write_file(aside: Path, final: Place, schema: pa.Schema, groups: Iterable[pa.Table]) -> WrittenFile:
    """Write `groups`, a row group each, to `aside`, flush, checksum, and rename it to `final` or upload it.

    A local `final` must be on the file system of `aside`; folders are made. An object appears only when its upload has
    ended. Whatever goes wrong, nothing is left behind but perhaps an object that nobody names.
    """
    aside.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    try:
        with aside.open("wb") as file:
            with pq.ParquetWriter(file, schema, compression="zstd", write_page_index=True) as writer:
                for group in groups:
                    writer.write_table(group)
                    rows += group.num_rows
            file.flush()
            os.fsync(file.fileno())
        written = WrittenFile(aside.stat().st_size, rows, sha256_of(Place(pyarrow.fs.LocalFileSystem(), str(aside))))
        _publish(aside, final)
    finally:
        aside.unlink(missing_ok=True)
    return written


def _publish(aside: Path, final: Place) -> None:
    if final.is_local:
        folder = final.local.parent
        folder.mkdir(parents=True, exist_ok=True)
        aside.rename(final.local)
        _fsync_folder(folder)
    else:
        pyarrow.fs.copy_files(
            str(aside),
            final.path,
            source_filesystem=pyarrow.fs.LocalFileSystem(),
            destination_filesystem=final.files,
            chunk_size=_CHUNK_BYTES,
        )


def sha256_of(place: Place) -> str:
    """The file's SHA-256 as hexadecimal digits."""
    digest = hashlib.sha256()
    with place.files.open_input_stream(place.path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def footer_of(place: Place) -> pq.FileMetaData:
    """The file's footer: its schema and number of rows."""
    return pq.read_metadata(place.path, filesystem=place.files)


def batches_of(files: Sequence[Place], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of the files in their order, columns that a file lacks as NULL; nothing is decoded ahead.

    Not a scan of Arrow's datasets: that decodes on while a slow reader is busy, up to a gigabyte.
    """
    for place in files:
        # Of an object a row group's columns are asked for at once, else each would be a request of its own; a row group
        # at a time, else those of the whole object would be held.
        with pq.ParquetFile(place.path, filesystem=place.files, pre_buffer=not place.is_local) as file:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group]):
                    yield _in_columns(batch, schema)


def _in_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    known = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in known else pa.nulls(len(batch), field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def distinct_rows(files: Sequence[Place], *columns: str) -> set[tuple[str, ...]]:
    """The different values of string columns over all files, reading only these columns."""
    found: set[tuple[str, ...]] = set()
    if files:
        paths = [file.path for file in files]
        schema = pa.schema([(column, pa.string()) for column in columns])
        dataset = pyarrow.dataset.dataset(paths, schema=schema, format="parquet", filesystem=files[0].files)
        for batch in dataset.to_batches(cache_metadata=False):  # else the footers of all files are kept
            distinct = pa.Table.from_batches([batch]).group_by(list(columns)).aggregate([])
            found.update(zip(*(distinct[column].to_pylist() for column in columns), strict=True))
    return found


def distinct_values(files: Sequence[Place], column: str) -> set[str]:
    """The different values of one string column over all files."""
    return {value for (value,) in distinct_rows(files, column)}


def _fsync_folder(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
