"""Questions to a trajectory store: an in-memory DuckDB with the views `sequences` and `rounds`, and named queries.

The reading rules:

* A connection sees one snapshot of the store, taken when it is made, whatever is committed or compacted meanwhile.
* `rounds` shows only rounds whose (unit_id, attempt) has sequences, so a reader sees whole units only.
* Columns are those of `schema`, typed also when the store is empty; where a file is older than a column it is NULL.
  Columns that only newer code knows are shown as they are.
* The partition columns `target` (slug) and `date` are part of both views.

Read through `connect` and not with a glob: after a compaction a glob counts rows twice until the next vacuum.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from decimal import Decimal
from importlib import resources
from typing import Any

import duckdb
import pyarrow as pa

from graft_dist.errors import StoreError
from storage.place import ObjectReader, Place
from storage.schema import PARTITION_COLUMNS, PARTITION_FIELDS, TABLES
from storage.trajectories import Snapshot, TrajectoryStore

FORMATS = ("table", "csv", "json")
MEMORY_LIMIT = "2GB"  # enough for every named question to ten million rounds (docs/operations.md)


def connect(
    root: str | os.PathLike[str],
    *,
    memory_limit: str = MEMORY_LIMIT,
    threads: int | None = None,
    snapshot: Snapshot | None = None,
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the views `sequences` and `rounds` over one snapshot of the store.

    Args:
        root: the store, also in an object store; need not exist yet, the views are empty then.
        memory_limit: of DuckDB, such as "2GB"; what needs more goes to files in `.tmp` of the working directory.
        threads: DuckDB's default is all cores.
        snapshot: an earlier `TrajectoryStore(root).snapshot()` to read instead of the newest.

    Raises:
        StoreError: for a store that cannot be opened, or a limit that is none.
    """
    taken = snapshot or TrajectoryStore(root).snapshot()
    # Extensions would be downloaded; nothing here needs one, and without a network the attempt only costs seconds.
    settings: dict[str, Any] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "memory_limit": memory_limit,
    }
    if threads is not None:
        settings["threads"] = threads
    try:
        connection = duckdb.connect(":memory:", config=settings)
    except duckdb.Error as error:
        raise StoreError(f"a memory limit of {memory_limit!r} is not a size such as 2GB.") from error
    connection.execute("SET TimeZone = 'UTC'")  # the same answer on every machine
    place = Place.parse(taken.root)
    if not place.is_local:
        connection.register_filesystem(ObjectReader(place.files))
    try:
        sequences = _select(connection, "sequences", taken.sequences_files, taken.sequences_columns)
        rounds = _select(connection, "rounds", taken.rounds_files, taken.rounds_columns)
        connection.execute(f"CREATE VIEW sequences AS {sequences}")
        connection.execute(f"CREATE VIEW rounds_of_all_attempts AS {rounds}")
        connection.execute(
            "CREATE VIEW rounds AS SELECT * FROM rounds_of_all_attempts SEMI JOIN sequences USING (unit_id, attempt)"
        )
    except duckdb.Error as error:
        connection.close()
        raise StoreError(f"snapshot {taken.name} of {taken.root} cannot be read: {_first_line(error)}.") from error
    return connection


def query_names() -> list[str]:
    """The named queries that `run_query` knows, sorted."""
    folder = resources.files("storage") / "queries"
    return sorted(file.name.removesuffix(".sql") for file in folder.iterdir() if file.name.endswith(".sql"))


def run_query(
    root: str | os.PathLike[str],
    sql_or_name: str,
    *,
    memory_limit: str = MEMORY_LIMIT,
    threads: int | None = None,
) -> pa.Table:
    """The answer to an SQL text, or to the named query of that name, over the store's newest snapshot.

    Raises:
        StoreError: if there is no store at `root`, or DuckDB refuses the query; one sentence.
    """
    store = TrajectoryStore(root)
    if not store.exists:
        raise StoreError(f"there is no trajectory store at {store.root}: a collect job creates one when it starts.")
    sql = _sql_of(sql_or_name)
    if not sql.strip():
        raise StoreError(f"the query is empty: give SQL, or one of the named queries {', '.join(query_names())}.")
    with connect(root, memory_limit=memory_limit, threads=threads) as connection:
        try:
            answer = connection.sql(sql)
            return pa.table({}) if answer is None else answer.to_arrow_table()
        except duckdb.Error as error:
            named = ", ".join(query_names())
            raise StoreError(
                f"the query failed: {_first_line(error)} (views: sequences, rounds; named queries: {named})."
            ) from error


def query(root: str | os.PathLike[str], sql: str, format: str = "table", *, memory_limit: str = MEMORY_LIMIT) -> str:
    """What `graft query` prints: the answer of `run_query`, formatted.

    Args:
        sql: an SQL text or the name of a named query.
        format: "table" (aligned, for people: floats shortened, long cells cut), "csv" (lists as JSON) or "json" (a list
            of objects). Only "table" shortens anything.
        memory_limit: of DuckDB.

    Raises:
        StoreError: as `run_query`, and for another format.
    """
    if format not in FORMATS:
        raise StoreError(f"format {format!r} is not one of {', '.join(FORMATS)}.")
    answer = run_query(root, sql, memory_limit=memory_limit)
    if format == "json":
        twice = sorted({name for name in answer.column_names if answer.column_names.count(name) > 1})
        if twice:
            raise StoreError(
                f"two columns are called {twice[0]!r}, which one JSON object cannot hold: name them with AS."
            )
        return json.dumps(_plain(answer.to_pylist()), ensure_ascii=False, indent=2, default=str)
    return _as_csv(answer) if format == "csv" else _as_table(answer)


def _first_line(error: duckdb.Error) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _sql_of(sql_or_name: str) -> str:
    name = sql_or_name.strip()
    if name in query_names():
        return (resources.files("storage") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return sql_or_name


def _select(connection: duckdb.DuckDBPyConnection, table: str, files: tuple[str, ...], in_log: pa.Schema) -> str:
    """The view of a table; `in_log`: its columns there, which may be fewer than this code knows, or more."""
    own = [*TABLES[table], *PARTITION_FIELDS]
    newer = [column for column in in_log if column.name not in {field.name for field in own}]
    types = _duckdb_types(connection, pa.schema([*own, *newer]))
    empty = ", ".join(f"NULL::{types[field.name]} AS {field.name}" for field in own)
    empty = f"SELECT {empty} WHERE false"
    if not files:
        return empty
    columns = ", ".join(
        f"{quoted(name)}: {{name: {quoted(name)}, type: {quoted(kind)}, default_value: NULL}}"
        for name, kind in types.items()
        if name not in PARTITION_COLUMNS
    )
    # Told the columns, DuckDB opens files one after another. To find them out itself (`union_by_name`) it opens all of
    # them each time a view is named, and keeps about a hundred kilobytes of each, whatever its limit.
    return (
        f"{empty} UNION ALL BY NAME SELECT * FROM read_parquet([{', '.join(map(quoted, files))}], "
        f"schema=MAP {{{columns}}}, hive_partitioning=true, hive_types={{'target': VARCHAR, 'date': DATE}})"
    )


def quoted(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def _duckdb_types(connection: duckdb.DuckDBPyConnection, schema: pa.Schema) -> dict[str, str]:
    empty = connection.from_arrow(schema.empty_table())
    return dict(zip(empty.columns, map(str, empty.types), strict=True))


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: JSON has neither NaN nor infinities nor decimals."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):  # a DuckDB sum of integers is one, of 38 digits
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_csv(answer: pa.Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.column_names)
    for row in zip(*(column.to_pylist() for column in answer.columns), strict=True):
        cells = (json.dumps(_plain(cell), default=str) if isinstance(cell, list | dict) else cell for cell in row)
        writer.writerow(cells)
    return text.getvalue().rstrip("\n")


def _as_table(answer: pa.Table, max_width: int = 60) -> str:
    columns = []
    for name, column in zip(answer.column_names, answer.columns, strict=True):
        cells = [_cell(value, max_width) for value in column.to_pylist()]
        width = max(len(cell) for cell in [name, *cells])
        is_number = any(
            is_kind(column.type) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
        )
        pad = str.rjust if is_number else str.ljust
        columns.append([pad(name, width), "-" * width, *(pad(cell, width) for cell in cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _cell(value: Any, max_width: int) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    text = str(value).replace("\n", " ")
    return text if len(text) <= max_width else text[: max_width - 1] + "…"
