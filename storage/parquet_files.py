"""Single Parquet files: written so that a file under its final name is always complete; small questions about them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq


@dataclass(frozen=True)
class WrittenFile:
    """What lies on disk after `write_file`."""

    size: int  # bytes
    rows: int
    sha256: str


def write_file(aside: Path, final: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> WrittenFile:
    """Write `groups`, a row group each, to `aside`, flush it to disk, checksum it and rename it to `final`.

    Both paths must be on one file system; folders are made. Whatever goes wrong, nothing is left behind.
    """
    aside.parent.mkdir(parents=True, exist_ok=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    try:
        with aside.open("wb") as file:
            with pq.ParquetWriter(file, schema, compression="zstd", write_page_index=True) as writer:
                for group in groups:
                    writer.write_table(group)
                    rows += group.num_rows
            file.flush()
            os.fsync(file.fileno())
        written = WrittenFile(aside.stat().st_size, rows, sha256_of(aside))
        aside.rename(final)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _fsync_folder(final.parent)
    return written


def sha256_of(path: Path) -> str:
    """The file's SHA-256 as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def distinct_values(files: Sequence[Path], column: str) -> set[str]:
    """The different values of a string column over all files, reading only that column."""
    if not files:
        return set()
    paths = [str(file) for file in files]
    dataset = pyarrow.dataset.dataset(paths, format="parquet", schema=pa.schema([(column, pa.string())]))
    return set(dataset.to_table().column(column).unique().to_pylist())


def _fsync_folder(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
