"""The two tables of a trajectory store: their columns, and how records become rows.

    sequences   one row per decoded prompt, also for a prompt that failed (`error` says why)
    rounds      one row per round; joins to its sequence on (unit_id, attempt, sequence_id)

Both are partitioned by `target=<slug>/date=<day>`; the partition columns live in the folder names and in the log, not
in the file bodies. Conventions, chosen for reading with DuckDB (whose lists start at 1):

* Token ids and counts are `int32`, log-probabilities and logits `float32`, durations `int64` nanoseconds or `float64`
  seconds as the name says.
* A `[D, K]` array is a list of lists: `candidate_ids[d][i]` is the i-th candidate of draft depth d, since depths count
  from 1. `parent_logits[p]` belongs to the root (p = 1) or to accepted node p - 1. A round without a draft has `[]`.
* Tree arrays hold node 0, the root, as element 1; the *values* in `tree_parents` and `accepted` are node indices, which
  count from 0 (the root), so node n is `tree_tokens[n + 1]`.
* Durations of a round are those of the whole batch: `draft_ns / batch_size` is one sequence's share.

A later version may only add nullable columns, and then raises `SCHEMA_VERSION`; readers see NULL where a file is older.
This module knows rows and columns; files and the log are `trajectories`'.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from graft_dist.errors import StoreError

if TYPE_CHECKING:  # reading a store needs none of the decoding code
    from graft_dist.rounds import RoundRecord, SequenceRecord

SCHEMA_VERSION = 3

PARTITION_COLUMNS = ("target", "date")
PARTITION_FIELDS = (pa.field("target", pa.string()), pa.field("date", pa.date32()))


def _list_of(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item))


_KEY_FIELDS = [
    pa.field("unit_id", pa.string(), nullable=False),  # the unit of work; counts once however often it was tried
    pa.field("attempt", pa.string(), nullable=False),  # unique per try of a unit, over all runs
    pa.field("run_id", pa.string(), nullable=False),  # the job that committed it
    pa.field("sequence_id", pa.string(), nullable=False),
]

SEQUENCES: pa.Schema = pa.schema(
    [
        *_KEY_FIELDS,
        pa.field("prompt_id", pa.string()),
        pa.field("task", pa.string()),
        pa.field("prompt_token_ids", _list_of(pa.int32())),
        pa.field("output_token_ids", _list_of(pa.int32())),
        pa.field("finish_reason", pa.string()),  # stop, length, abort, error
        pa.field("error", pa.string()),  # NULL unless the prompt failed
        pa.field("sampling", pa.string()),  # all sampling parameters as JSON: sampling->>'top_p'
        pa.field("temperature", pa.float64()),
        pa.field("seed", pa.int64()),
        pa.field("num_rounds", pa.int32()),  # rounds decoded, whether or not they were recorded
        pa.field("num_drafted", pa.int32()),  # draft nodes verified
        pa.field("num_accepted", pa.int32()),  # draft nodes that became output
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),  # wall time while the sequence was live; slots overlap, so never sum it
        pa.field("target_spec", pa.string()),  # the target's full name; `target` is its slug
        pa.field("target_fingerprint", pa.string()),
        pa.field("drafter_fingerprint", pa.string()),  # NULL for plain decoding
        pa.field("policy", pa.string()),
        pa.field("policy_fingerprint", pa.string()),
        pa.field("hardware", pa.string()),
        pa.field("software", pa.string()),
        pa.field("schema_version", pa.int32()),
        pa.field("written_at", pa.timestamp("us", tz="UTC")),
        pa.field("source", pa.string()),  # collect (a job) or traffic (users' requests); NULL before version 2
    ]
)

ROUNDS: pa.Schema = pa.schema(
    [
        *_KEY_FIELDS,
        pa.field("kind", pa.string()),  # decoded, or dense (teacher-forced: no tree, no timings)
        pa.field("round_index", pa.int32()),
        pa.field("context_length", pa.int32()),
        pa.field("root_token", pa.int32()),
        pa.field("candidate_ids", _list_of(_list_of(pa.int32()))),  # [D, K]
        pa.field("candidate_log_probs", _list_of(_list_of(pa.float32()))),  # [D, K]
        pa.field("conf", pa.float32()),
        pa.field("degen", pa.float32()),
        pa.field("hist", pa.float32()),
        pa.field("budget", pa.int32()),  # nodes verified, root not counted
        pa.field("tree_tokens", _list_of(pa.int32())),  # [n + 1]
        pa.field("tree_parents", _list_of(pa.int32())),  # [n + 1], -1 at the root
        pa.field("tree_depths", _list_of(pa.int32())),  # [n + 1]
        pa.field("target_tokens", _list_of(pa.int32())),  # [n + 1], the target's next token at every node
        pa.field("accepted", _list_of(pa.int32())),  # node indices of the accepted path
        pa.field("num_tokens", pa.int32()),  # acceptance length: tokens committed, bonus included, after trimming
        pa.field("is_mismatch", pa.bool_()),  # NULL for dense rounds
        pa.field("parent_logits", _list_of(_list_of(pa.float32()))),  # [P, K]
        pa.field("parent_logsumexp", _list_of(pa.float32())),  # [P]
        pa.field("followed", _list_of(pa.int32())),  # dense rounds: the tokens that really followed the root
        pa.field("hidden", _list_of(_list_of(pa.float32()))),  # [D, H'], projected; NULL: not recorded, or version < 3
        pa.field("draft_ns", pa.int64()),
        pa.field("build_ns", pa.int64()),
        pa.field("verify_ns", pa.int64()),
        pa.field("commit_ns", pa.int64()),
        pa.field("batch_size", pa.int32()),  # live slots
        pa.field("batch_rows", pa.int32()),  # rows verified, padding excluded
    ]
)

TABLES: Mapping[str, pa.Schema] = {"sequences": SEQUENCES, "rounds": ROUNDS}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What produced a unit; every field becomes a column of its sequences (`target` the partition)."""

    target: str  # slug: letters, digits, '.', '_' and '-'
    target_spec: str  # full name: "builtin:smollm2-135m", "Qwen/Qwen3-8B"
    target_fingerprint: str
    drafter_fingerprint: str | None  # None for plain decoding
    policy: str  # name: "ddtree"
    policy_fingerprint: str | None
    hardware: str
    software: str
    source: str = "collect"  # "traffic" marks recorded requests of a server: users' data


@dataclass(frozen=True, kw_only=True)
class UnitKey:
    """One attempt at one unit of work."""

    unit_id: str
    attempt: str  # unique over all tries of all runs: `new_attempt()`
    run_id: str


def sequences_table(
    key: UnitKey, provenance: Provenance, sequences: Sequence[SequenceRecord], written_at: datetime
) -> pa.Table:
    """The rows of `sequences` for one attempt, in the given order; `written_at` must carry a time zone."""
    shared = {
        **dataclasses.asdict(key),
        **{name: value for name, value in dataclasses.asdict(provenance).items() if name not in PARTITION_COLUMNS},
        "schema_version": SCHEMA_VERSION,
        "written_at": written_at,
    }
    rows = [
        {
            **shared,
            **{name: getattr(record, name) for name in _SEQUENCE_ATTRIBUTES},
            "sampling": json.dumps(dataclasses.asdict(record.sampling), sort_keys=True),
            "temperature": record.sampling.temperature,
        }
        for record in sequences
    ]
    return pa.Table.from_pylist(rows, schema=SEQUENCES)


def rounds_table(key: UnitKey, rounds: Sequence[RoundRecord]) -> pa.Table:
    """The rows of `rounds` for one attempt, in the given order."""
    columns = []
    for column in ROUNDS:
        if column.name in ("unit_id", "attempt", "run_id"):
            columns.append(pa.array([getattr(key, column.name)] * len(rounds), column.type))
        elif column.name == "is_mismatch":
            mismatches = [record.is_mismatch if record.kind == "decoded" else None for record in rounds]
            columns.append(pa.array(mismatches, column.type))
        else:
            columns.append(_column([getattr(record, column.name) for record in rounds], column.type))
    return pa.Table.from_arrays(columns, schema=ROUNDS)


def check_file_schema(found: pa.Schema, registered: pa.Schema, file: str) -> None:
    """Refuse a file whose rows could not be read beside the table's other rows.

    Every column of the file has to be registered with the same type; a nullable column may be missing.

    Raises:
        StoreError: naming the file, the column and both types.
    """
    for column in found:
        index = registered.get_field_index(column.name)
        if index < 0:
            raise StoreError(f"{file} has a column {column.name!r} that the table does not have: not committed.")
        if column.type != registered.field(index).type:
            raise StoreError(
                f"{file} has column {column.name!r} as {column.type}, but the table has it as "
                f"{registered.field(index).type}: not committed."
            )
    for column in registered:
        if not column.nullable and found.get_field_index(column.name) < 0:
            raise StoreError(f"{file} lacks the column {column.name!r}, which every row must have: not committed.")


# Columns of `sequences` that are attributes of the record under the same name.
_SEQUENCE_ATTRIBUTES = (
    "sequence_id",
    "prompt_id",
    "task",
    "prompt_token_ids",
    "output_token_ids",
    "finish_reason",
    "error",
    "seed",
    "num_rounds",
    "num_drafted",
    "num_accepted",
    "prefill_s",
    "decode_s",
)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """One column. Arrays become lists from one concatenation, not value by value: recording must be cheap."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    known = [array for array in values if array is not None]
    lengths = [None if array is None else len(array) for array in values]
    if not pa.types.is_list(kind.value_type):
        return _lists(lengths, _concatenate(known, kind.value_type), kind)
    inner_lengths = [array.shape[1] for array in known for _ in range(array.shape[0])]
    flat = _concatenate([array.ravel() for array in known], kind.value_type.value_type)
    return _lists(lengths, _lists(inner_lengths, flat, kind.value_type), kind)


def _lists(lengths: Sequence[int | None], values: pa.Array, kind: pa.DataType) -> pa.ListArray:
    """Lists of these lengths cut from `values`; None is NULL."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum([length or 0 for length in lengths], out=offsets[1:])
    is_null = pa.array([length is None for length in lengths], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind, mask=is_null)


_NUMPY_TYPES = {pa.int32(): np.dtype(np.int32), pa.float32(): np.dtype(np.float32)}
"""Of list elements. Arrow's own `to_pandas_dtype` would import pandas, which nothing here needs."""


def _concatenate(arrays: Sequence[Any], kind: pa.DataType) -> pa.Array:
    dtype = _NUMPY_TYPES[kind]
    flat = np.concatenate([np.asarray(array, dtype) for array in arrays]) if arrays else np.zeros(0, dtype)
    return pa.array(flat, kind)
