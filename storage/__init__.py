"""Trajectories on disk: Parquet files under a Delta log in, DuckDB views out. Knows records and bytes, no models.

    store = TrajectoryStore(root)
    seq = store.begin(run_id, target_slug, {"target_fingerprint": ...})   # driver
    files = store.write_unit(UnitKey(...), Provenance(...), sequences, rounds)   # anyone
    store.commit(files, run_id, seq)   # driver
    connect(root).sql("SELECT task, count(*) FROM sequences GROUP BY task")

The rules of writing are in `trajectories`, those of reading in `query`, the columns in `schema`.
"""

from storage.query import connect, query_names, run_query
from storage.schema import SCHEMA_VERSION, Provenance, UnitKey
from storage.trajectories import (
    CommitResult,
    Compaction,
    FileInfo,
    Snapshot,
    StoreFencedError,
    TrajectoryStore,
    new_attempt,
)

__all__ = [
    "SCHEMA_VERSION",
    "CommitResult",
    "Compaction",
    "FileInfo",
    "Provenance",
    "Snapshot",
    "StoreFencedError",
    "TrajectoryStore",
    "UnitKey",
    "connect",
    "new_attempt",
    "query_names",
    "run_query",
]
