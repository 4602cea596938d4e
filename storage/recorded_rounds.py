"""Recorded rounds as replay wants them: read from a store in batches, each with the tokens that really followed.

A decoded round's followers are found by position in its sequence's output; a dense round brings its own. Left out, and
counted, are rounds without candidates (plain decoding) and those too close to where a sequence was cut off by an abort
or an error: what would have followed there, nobody knows.

How far a tree may reach depends on how long the sequence was allowed to go on (`rooms`): to its end if it ended with
"length", else to its `max_new_tokens`. An engine's own `max_length` is not in the store: in a sequence that stopped by
itself within D tokens of it, the last trees may be rebuilt deeper than they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from graft_dist.cost_curve import Timing
from graft_dist.errors import StoreError
from graft_dist.replay import RecordedRounds

BATCH_ROUNDS = 1024


@dataclass(frozen=True)
class Selection:
    """Which rounds; None: all of them."""

    target: str | None = None  # slug
    task: str | None = None
    prompt_ids: Sequence[str] | None = None
    kind: str | None = None  # decoded or dense
    drafter: str | None = None  # fingerprint


@dataclass(frozen=True)
class Skipped:
    """Selected rounds that cannot be replayed."""

    num_undrafted: int  # without candidates
    num_cut_off: int  # too close to where a sequence was cut off


@dataclass(frozen=True)
class RecordedTimings:
    """Medians by budget of the hardware and batch size with most drafted rounds."""

    hardware: str
    batch_size: int
    timings: list[Timing]


# In `placed`, num_output counts the output tokens up to and with the root.
_PLACED = """
WITH placed AS (
    SELECT
        r.*, s.task, s.output_token_ids, len(r.candidate_ids) AS depth,
        r.context_length - len(s.prompt_token_ids) + 1 AS num_output,
        len(s.output_token_ids) - num_output AS num_left,
        s.finish_reason NOT IN ('stop', 'length') AND num_left <= depth AS is_cut_off,
        CASE WHEN s.finish_reason = 'length' THEN num_left
             ELSE greatest((s.sampling->>'max_new_tokens')::INTEGER - num_output, num_left) END AS room
    FROM rounds r
    JOIN sequences s USING (unit_id, attempt, sequence_id)
    WHERE ($target IS NULL OR r.target = $target) AND ($task IS NULL OR s.task = $task)
        AND ($prompt_ids IS NULL OR s.prompt_id IN (SELECT unnest($prompt_ids::VARCHAR[])))
        AND ($kind IS NULL OR r.kind = $kind)
        AND ($drafter IS NULL OR s.drafter_fingerprint = $drafter)
)
"""

# The hidden states are many times the rest of a round: read only where they are asked for.
_ROUNDS = """{placed}
SELECT
    kind, task, unit_id, sequence_id, round_index, context_length, root_token, candidate_ids, candidate_log_probs,
    depth, len(candidate_ids[1]) AS width, conf, degen, hist, num_left, room,
    {hidden} AS hidden, coalesce(len({hidden}[1]), 0) AS num_hidden,
    CASE WHEN kind = 'dense' THEN followed ELSE output_token_ids[num_output + 1:num_output + depth] END AS followed
FROM placed
WHERE depth > 0 AND NOT is_cut_off
"""

_SKIPPED = f"""{_PLACED}
SELECT count(*) FILTER (depth = 0), count(*) FILTER (depth > 0 AND is_cut_off) FROM placed
"""

# A batch's round costs each of its sequences the same share, at the batch's mean budget.
_TIMINGS = f"""{_PLACED},
timed AS (
    SELECT
        s.hardware, p.batch_size, p.depth > 0 AS is_drafted,
        round(p.batch_rows / p.batch_size)::INTEGER - 1 AS nodes,
        (p.draft_ns + p.build_ns + p.verify_ns + p.commit_ns) / p.batch_size / 1e6 AS round_ms,
        (p.verify_ns + p.commit_ns) / p.batch_size / 1e6 AS undrafted_ms
    FROM placed p JOIN sequences s USING (unit_id, attempt, sequence_id)
    WHERE p.kind = 'decoded'
),
busiest AS (
    SELECT hardware, batch_size FROM timed WHERE is_drafted
    GROUP BY hardware, batch_size ORDER BY count(*) DESC, hardware, batch_size LIMIT 1
)
SELECT hardware, batch_size, nodes, median(round_ms), median(undrafted_ms), count(*)
FROM timed SEMI JOIN busiest USING (hardware, batch_size)
WHERE is_drafted = (nodes > 0)
GROUP BY hardware, batch_size, nodes
ORDER BY nodes
"""


def check_one_source(connection: duckdb.DuckDBPyConnection, selection: Selection) -> list[str]:
    """Return the fingerprints of the selected sequences' drafters.

    Raises:
        StoreError: the selection holds several targets, whose rounds must not be averaged.
    """
    rows = connection.execute(
        "SELECT DISTINCT target, drafter_fingerprint FROM sequences WHERE $target IS NULL OR target = $target",
        {"target": selection.target},
    ).fetchall()
    targets = sorted({target for target, _ in rows})
    if len(targets) > 1:
        raise StoreError(f"the store holds rounds of several targets: choose one of {', '.join(targets)}.")
    return sorted({drafter for _, drafter in rows if drafter is not None})


def recorded_rounds(
    connection: duckdb.DuckDBPyConnection, selection: Selection, *, with_hidden: bool = False
) -> Iterator[RecordedRounds]:
    """Stream the selected rounds in batches of one shape [D, K] each; no other query on `connection` meanwhile.

    `with_hidden` reads the drafter's hidden states too; rounds that were recorded without are in batches of their own.
    """
    sql = _ROUNDS.format(placed=_PLACED, hidden="hidden" if with_hidden else "NULL::FLOAT[][]")
    reader = connection.sql(sql, params=_parameters(selection)).to_arrow_reader(BATCH_ROUNDS)
    for batch in reader:
        table = pa.Table.from_batches([batch])
        columns = [table[name].to_numpy() for name in ("depth", "width", "num_hidden")]
        for shape in sorted(set(zip(*(column.tolist() for column in columns), strict=True))):
            is_shape = np.all([column == size for column, size in zip(columns, shape, strict=True)], axis=0)
            yield _to_rounds(table.filter(pa.array(is_shape)).combine_chunks(), *shape)


def count_skipped(connection: duckdb.DuckDBPyConnection, selection: Selection) -> Skipped:
    """Count the selected rounds that `recorded_rounds` leaves out."""
    return Skipped(*connection.execute(_SKIPPED, _parameters(selection)).fetchall()[0])


def recorded_timings(connection: duckdb.DuckDBPyConnection, selection: Selection) -> RecordedTimings | None:
    """Summarise the timings of the selected decoded rounds, or None where nothing was drafted."""
    rows = connection.execute(_TIMINGS, _parameters(selection)).fetchall()
    if not rows:
        return None
    return RecordedTimings(rows[0][0], rows[0][1], [Timing(*row[2:]) for row in rows])


def _parameters(selection: Selection) -> dict[str, object]:
    prompt_ids = None if selection.prompt_ids is None else list(selection.prompt_ids)
    return {
        "target": selection.target,
        "task": selection.task,
        "prompt_ids": prompt_ids,
        "kind": selection.kind,
        "drafter": selection.drafter,
    }


def _to_rounds(table: pa.Table, depth: int, width: int, num_hidden: int) -> RecordedRounds:
    return RecordedRounds(
        groups=list(zip(table["kind"].to_pylist(), table["task"].to_pylist(), strict=True)),
        unit_ids=table["unit_id"].to_pylist(),
        sequence_ids=table["sequence_id"].to_pylist(),
        round_indices=_numbers(table, "round_index", np.int32),
        context_lengths=_numbers(table, "context_length", np.int32),
        root_tokens=_numbers(table, "root_token", np.int64),
        candidate_ids=_flat(table, "candidate_ids").reshape(-1, depth, width),
        log_probs=_flat(table, "candidate_log_probs").reshape(-1, depth, width),
        followed=_padded(table["followed"], depth),
        num_left=_numbers(table, "num_left", np.int32),
        rooms=_numbers(table, "room", np.int32),
        conf=_numbers(table, "conf", np.float32),
        degen=_numbers(table, "degen", np.float32),
        hist=_numbers(table, "hist", np.float32),
        hidden=_flat(table, "hidden").copy().reshape(-1, depth, num_hidden) if num_hidden > 0 else None,  # writable
    )


def _numbers(table: pa.Table, name: str, dtype: type) -> np.ndarray:
    return table[name].to_numpy().astype(dtype)


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return pc.list_flatten(pc.list_flatten(table[name])).to_numpy()


def _padded(lists: pa.ChunkedArray, depth: int) -> np.ndarray:
    """Lists of up to `depth` tokens as int32 [S, D], -1 beyond their ends."""
    lengths = pc.list_value_length(lists).to_numpy()
    padded = np.full((len(lengths), depth), -1, np.int32)
    padded[np.arange(depth) < lengths[:, None]] = pc.list_flatten(lists).to_numpy()
    return padded
