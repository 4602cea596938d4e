"""Recorded rounds as learning wants them: which sequences there are, and their rounds as records, in a fixed order.

The order of sequences (unit, sequence) and of a sequence's rounds (decoded before dense, round) does not depend on
files, compaction or attempts, so that "round number i" means the same in every run over the same rows. Rounds are read
once, in the order of the files, which is the same in every run over one snapshot; of them, one unit is held at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from graft_dist.errors import StoreError
from graft_dist.learning.saba import TimedRounds
from graft_dist.replay import SequenceName
from graft_dist.rounds import RoundRecord

_MOST_TIMED = 1_000_000  # timed rounds of one batch size that are read

_BATCH_ROWS = 4096  # rows read at a time


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """A sequence of which rounds with candidates were recorded. All of a store's are held at once: keep it small."""

    unit_id: str
    attempt: str
    sequence_id: str
    prompt_id: str
    task: str
    run_id: str
    prompt_name: str  # of what was asked, the same in every run; `prompts_of` reads the tokens
    num_decoded: int  # rounds of the wanted shape
    num_dense: int
    source: str  # collect or traffic
    is_sampled: bool  # at a temperature above 0
    written_at: float  # seconds since 1970

    @property
    def key(self) -> SequenceName:
        """What names it in the store."""
        return self.unit_id, self.sequence_id


@dataclass(frozen=True)
class Source:
    """What the drafted rounds of one target in a store come from."""

    target_spec: str
    target_fingerprint: str
    drafter_fingerprints: tuple[str, ...]  # sorted


@dataclass(frozen=True)
class RoundShape:
    """Which rounds are wanted: those of one shape."""

    depth: int  # D
    width: int  # K
    num_hidden: int = 0  # H', size of the recorded hidden states; 0: hidden states are not read

    @property
    def of_candidates(self) -> str:
        """As SQL, whatever was recorded of hidden states."""
        return f"len(candidate_ids) = {self.depth} AND len(candidate_ids[1]) = {self.width}"

    @property
    def condition(self) -> str:
        """As SQL."""
        has_hidden = f" AND len(hidden[1]) = {self.num_hidden}" if self.num_hidden > 0 else ""
        return self.of_candidates + has_hidden


def source_of(connection: duckdb.DuckDBPyConnection, target: str) -> Source:
    """Return where the rounds of a target (slug) come from.

    Raises:
        StoreError: the store holds no drafted rounds of it; says what it holds instead.
    """
    drafted = "SELECT 1 FROM rounds WHERE target = ? AND len(candidate_ids) > 0 LIMIT 1"
    if not connection.execute(drafted, [target]).fetchall():
        others = [row[0] for row in connection.execute("SELECT DISTINCT target FROM rounds ORDER BY 1").fetchall()]
        held = f"it holds rounds of {', '.join(others)}" if others else "it holds no rounds at all"
        raise StoreError(f"the store holds no drafted rounds of {target} to learn from: {held}; collect some first")
    rows = connection.execute(
        """SELECT DISTINCT target_spec, target_fingerprint, drafter_fingerprint FROM sequences
           WHERE target = ? AND error IS NULL AND drafter_fingerprint IS NOT NULL""",
        [target],
    ).fetchall()
    specs, targets = sorted({row[0] for row in rows}), sorted({row[1] for row in rows})
    if len(targets) != 1:
        raise StoreError(f"the store's rounds of {target} come from {len(targets)} different models: use another store")
    return Source(specs[0], targets[0], tuple(sorted({row[2] for row in rows})))


def shapes_of(
    connection: duckdb.DuckDBPyConnection, target: str, drafter_fingerprint: str, num_hidden: int = 0
) -> list[tuple[int, int, int]]:
    """Return (D, K, number of rounds) of the shapes that a drafter's rounds have, the most frequent first.

    With `num_hidden`, of those alone that were recorded with hidden states of that size.
    """
    has_hidden = f"AND len(hidden[1]) = {num_hidden}" if num_hidden > 0 else ""
    return connection.execute(
        f"""SELECT len(candidate_ids), len(candidate_ids[1]), count(*)
           FROM rounds JOIN sequences USING (unit_id, attempt, sequence_id)
           WHERE rounds.target = ? AND drafter_fingerprint = ? AND len(candidate_ids) > 0 {has_hidden}
           GROUP BY ALL ORDER BY 3 DESC, 1, 2""",
        [target, drafter_fingerprint],
    ).fetchall()


def num_of_other_drafters(connection: duckdb.DuckDBPyConnection, target: str, drafter_fingerprint: str) -> int:
    """Return how many sequences of a target were decoded with another drafter."""
    # All rows, though there is one: a result that is not read to its end keeps others from being streamed.
    ((count,),) = connection.execute(
        "SELECT count(*) FROM sequences WHERE target = ? AND error IS NULL AND drafter_fingerprint <> ?",
        [target, drafter_fingerprint],
    ).fetchall()
    return int(count)


def hidden_size_of(connection: duckdb.DuckDBPyConnection, target: str, drafter_fingerprint: str) -> int:
    """Return the most frequent size of recorded hidden states; 0 where there are none."""
    rows = connection.execute(
        """SELECT len(hidden[1]) FROM rounds JOIN sequences USING (unit_id, attempt, sequence_id)
           WHERE rounds.target = ? AND drafter_fingerprint = ? AND hidden IS NOT NULL
           GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 1""",
        [target, drafter_fingerprint],
    ).fetchall()
    return int(rows[0][0]) if rows else 0


# Of a prompt's tokens: the first 16 hexadecimal digits of the SHA-256 of "(1, 2, 3)".
_PROMPT_NAME = (
    "left(sha256('(' || trim(prompt_token_ids::VARCHAR, '[]') || if(len(prompt_token_ids) = 1, ',)', ')')), 16)"
)


def recorded_sequences(
    connection: duckdb.DuckDBPyConnection, target: str, drafter_fingerprint: str, shape: RoundShape
) -> list[RecordedSequence]:
    """Return the sequences that have rounds of this shape, in order."""
    found = connection.execute(
        f"""
        WITH counted AS (
            SELECT unit_id, attempt, sequence_id, count(*) FILTER (kind = 'decoded') AS num_decoded,
                count(*) FILTER (kind = 'dense') AS num_dense
            FROM rounds
            WHERE target = $target AND {shape.condition}
            GROUP BY ALL
        )
        SELECT unit_id, attempt, sequence_id, prompt_id, task, run_id, {_PROMPT_NAME}, num_decoded, num_dense,
            coalesce(source, 'collect'), temperature > 0, epoch(written_at)
        FROM counted JOIN sequences USING (unit_id, attempt, sequence_id)
        WHERE error IS NULL AND drafter_fingerprint = $drafter
        ORDER BY unit_id, sequence_id
        """,
        {"target": target, "drafter": drafter_fingerprint},
    )
    sequences: list[RecordedSequence] = []
    while rows := found.fetchmany(_BATCH_ROWS):
        sequences += (RecordedSequence(*row) for row in rows)
    return sequences


def prompts_of(
    connection: duckdb.DuckDBPyConnection, target: str, sequences: Iterable[RecordedSequence]
) -> Iterator[tuple[RecordedSequence, tuple[int, ...]]]:
    """Stream the prompts of some sequences of a target, as token ids, in no order; no other query meanwhile."""
    wanted = {each.key: each for each in sequences}
    if not wanted:
        return
    reader = connection.sql(
        "SELECT unit_id, sequence_id, prompt_token_ids FROM sequences WHERE target = $target",
        params={"target": target},
    ).to_arrow_reader(_BATCH_ROWS)
    for batch in reader:
        keys = zip(batch["unit_id"].to_pylist(), batch["sequence_id"].to_pylist(), strict=True)
        for key, token_ids in zip(keys, batch["prompt_token_ids"], strict=True):
            sequence = wanted.get(key)
            if sequence is not None:
                yield sequence, tuple(token_ids.as_py())


def asked_prompts(
    connection: duckdb.DuckDBPyConnection, target: str, source: str, since: float
) -> Iterator[tuple[int, ...]]:
    """Token ids of what was asked of a target (slug) from `since` on (seconds since 1970), the last asked first.

    Every prompt once; without those that failed. No other query on `connection` meanwhile.
    """
    found = connection.execute(
        """SELECT prompt_token_ids FROM sequences
           WHERE target = ? AND coalesce(source, 'collect') = ? AND epoch(written_at) >= ? AND error IS NULL
           GROUP BY prompt_token_ids ORDER BY max(written_at) DESC, prompt_token_ids""",
        [target, source, since],
    )
    while rows := found.fetchmany(1000):
        yield from (tuple(ids) for (ids,) in rows)


def count_sequences(connection: duckdb.DuckDBPyConnection, target: str, source: str, since: float) -> int:
    """How many sequences of a target (slug) and source were written from `since` on (seconds since 1970)."""
    (row,) = connection.execute(
        """SELECT count(*) FROM sequences
           WHERE target = ? AND coalesce(source, 'collect') = ? AND epoch(written_at) >= ?""",
        [target, source, since],
    ).fetchall()
    return int(row[0])


def round_records(
    connection: duckdb.DuckDBPyConnection, target: str, sequences: Sequence[RecordedSequence], shape: RoundShape
) -> Iterator[tuple[RecordedSequence, list[RoundRecord]]]:
    """Stream the rounds of some sequences of a target, one sequence at a time; no other query meanwhile.

    Units come in the order of the files that hold them; within a unit sequences are in order, and so are their rounds.
    Files are read once from front to back; of row groups, those alone whose units can be among the wanted ones.

    Raises:
        StoreError: a sequence has not the rounds that `recorded_sequences` counted.
    """
    wanted = {(each.unit_id, each.attempt, each.sequence_id): each for each in sequences}
    left: dict[str, int] = {}  # of a unit, rounds that have not been read
    for each in sequences:
        left[each.unit_id] = left.get(each.unit_id, 0) + each.num_decoded + each.num_dense
    waiting: dict[str, list[tuple[RecordedSequence, RoundRecord]]] = {}  # a unit's rounds, until they are complete
    for sequence, record in _wanted_rounds(connection, target, wanted, shape) if wanted else ():
        unit_id = sequence.unit_id
        if unit_id not in left:
            raise StoreError(f"the store has changed: unit {unit_id} now has more rounds than were counted")
        waiting.setdefault(unit_id, []).append((sequence, record))
        left[unit_id] -= 1
        if left[unit_id] == 0:
            del left[unit_id]
            yield from _by_sequence(waiting.pop(unit_id))
            if not left:
                return  # a few units are found long before the last file
    if left:
        raise StoreError(f"the store has changed: {sum(left.values())} rounds of {len(left)} units are gone")


def _wanted_rounds(
    connection: duckdb.DuckDBPyConnection,
    target: str,
    wanted: Mapping[tuple[str, str, str], RecordedSequence],
    shape: RoundShape,
) -> Iterator[tuple[RecordedSequence, RoundRecord]]:
    """The rounds of these sequences, by (unit, attempt, sequence), in the order of the files."""
    columns = "*" if shape.num_hidden > 0 else "* EXCLUDE (hidden)"
    units = [unit_id for unit_id, _, _ in wanted]
    # No join: DuckDB keeps the order of the files through a filter, and may lose it in a join.
    reader = connection.sql(
        f"""SELECT {columns} FROM rounds_of_all_attempts
           WHERE target = $target AND unit_id BETWEEN $first AND $last AND {shape.condition}""",
        params={"target": target, "first": min(units), "last": max(units)},
    ).to_arrow_reader(_BATCH_ROWS)
    for batch in reader:
        keys = zip(*(batch[name].to_pylist() for name in ("unit_id", "attempt", "sequence_id")), strict=True)
        owners = [wanted.get(key) for key in keys]
        found = [owner for owner in owners if owner is not None]
        if found:
            is_wanted = pa.array([owner is not None for owner in owners])
            yield from zip(found, _records(pa.Table.from_batches([batch]).filter(is_wanted), shape), strict=True)


def _by_sequence(
    rounds: Iterable[tuple[RecordedSequence, RoundRecord]],
) -> Iterator[tuple[RecordedSequence, list[RoundRecord]]]:
    """A unit's rounds in order, sequence by sequence."""
    ordered = sorted(rounds, key=lambda row: (row[0].sequence_id, row[1].kind, row[1].round_index))
    for _, rows in groupby(ordered, key=lambda row: row[0].sequence_id):
        some = list(rows)
        sequence, records = some[0][0], [record for _, record in some]
        if len(records) != sequence.num_decoded + sequence.num_dense:
            raise StoreError(f"the store has changed: sequence {sequence.sequence_id} now has {len(records)} rounds")
        yield sequence, records


@dataclass(frozen=True, eq=False)
class Timed:
    """Timed rounds of one hardware and batch size; a batch's round costs each of its sequences the same share."""

    hardware: str
    batch_size: int
    rounds: TimedRounds
    run_ids: tuple[str, ...]  # that recorded them

    @property
    def label(self) -> str:
        """The hardware, and how many sequences shared a round if that was more than one.

        What a sequence's share costs is not what its round costs alone: the two must not be taken for each other.
        """
        return self.hardware if self.batch_size == 1 else f"{self.hardware}, share of {self.batch_size} sequences"


def timed_hardware(
    connection: duckdb.DuckDBPyConnection, target: str, drafter_fingerprint: str, shape: RoundShape
) -> list[str]:
    """The hardware on which a drafter's rounds of one shape were timed.

    First that on which most were alone in their batch: the tail of a batched run is not what somebody timed on purpose.
    """
    found = connection.execute(
        f"""SELECT hardware FROM rounds JOIN sequences USING (unit_id, attempt, sequence_id)
           WHERE rounds.target = ? AND kind = 'decoded' AND drafter_fingerprint = ? AND {shape.of_candidates}
           GROUP BY hardware
           ORDER BY count(*) FILTER (WHERE batch_size = 1) DESC, count(*) DESC, hardware""",
        [target, drafter_fingerprint],
    ).fetchall()
    return [hardware for (hardware,) in found]


def timed_rounds(
    connection: duckdb.DuckDBPyConnection, target: str, drafter_fingerprint: str, shape: RoundShape, hardware: str
) -> Iterator[Timed]:
    """Yield a drafter's timed rounds of one shape, and undrafted ones, on one hardware: the most telling first.

    Sequences that were alone come before batches, greedy ones before sampled ones (recorded rounds of the latter choose
    a token at every node, decoding only on the path), and then the busiest. The first drafted round of a sequence is
    left out: the drafter reads the prompt in it. So is a drafted round of 0 nodes, which paid for a draft it did not
    use.
    """
    groups = connection.execute(
        f"""SELECT batch_size, temperature > 0 AS is_sampled
           FROM rounds JOIN sequences USING (unit_id, attempt, sequence_id)
           WHERE rounds.target = ? AND kind = 'decoded' AND hardware = ? AND coalesce(drafter_fingerprint = ?, true)
               AND (len(candidate_ids) = 0 OR {shape.of_candidates})
           GROUP BY batch_size, is_sampled ORDER BY (batch_size > 1), is_sampled, count(*) DESC, batch_size""",
        [target, hardware, drafter_fingerprint],
    ).fetchall()
    for batch_size, is_sampled in groups:
        table = connection.sql(
            f"""WITH first AS (
                   SELECT unit_id, attempt, sequence_id, min(round_index) AS first_drafted FROM rounds
                   WHERE target = $target AND kind = 'decoded' AND len(candidate_ids) > 0 GROUP BY ALL
               )
               SELECT
                   round(batch_rows / batch_size)::BIGINT - 1 AS budget,
                   (draft_ns + build_ns + verify_ns + commit_ns) / batch_size / 1e6 AS round_ms,
                   (verify_ns + commit_ns) / batch_size / 1e6 AS undrafted_ms,
                   context_length::BIGINT AS context_length,
                   hash(sequence_id)::UBIGINT AS sequence_key,
                   rounds.run_id AS run_id
               FROM rounds JOIN sequences USING (unit_id, attempt, sequence_id)
                   LEFT JOIN first USING (unit_id, attempt, sequence_id)
               WHERE rounds.target = $target AND kind = 'decoded' AND hardware = $hardware AND batch_size = $size
                   AND coalesce(drafter_fingerprint = $drafter, true)
                   AND (temperature > 0) = $is_sampled AND round_index IS DISTINCT FROM first_drafted
                   AND (len(candidate_ids) > 0) = (round(batch_rows / batch_size) > 1)
                   AND (len(candidate_ids) = 0 OR {shape.of_candidates})
               ORDER BY unit_id, sequence_id, round_index LIMIT {_MOST_TIMED}""",
            params={
                "target": target,
                "drafter": drafter_fingerprint,
                "hardware": hardware,
                "size": batch_size,
                "is_sampled": is_sampled,
            },
        ).to_arrow_table()
        columns = ("budget", "round_ms", "undrafted_ms", "context_length", "sequence_key")
        run_ids = tuple(sorted(table["run_id"].unique().to_pylist()))
        yield Timed(hardware, batch_size, TimedRounds(*(table[name].to_numpy() for name in columns)), run_ids)


_INT_LISTS = ("tree_tokens", "tree_parents", "tree_depths", "target_tokens", "accepted", "followed")
_NUMBERS = (
    "round_index", "context_length", "root_token", "conf", "degen", "hist", "budget", "num_tokens", "draft_ns",
    "build_ns", "verify_ns", "commit_ns", "batch_size", "batch_rows",
)  # fmt: skip


def _records(table: pa.Table, shape: RoundShape) -> Iterator[RoundRecord]:
    """Cut the columns' flat values into rows: value by value it would take ten times as long."""
    columns: dict[str, Any] = {name: table[name].to_pylist() for name in ("sequence_id", "kind", *_NUMBERS)}
    columns |= {name: _cut(table[name], np.int32) for name in _INT_LISTS}
    of_candidates = (-1, shape.depth, shape.width)
    columns["candidate_ids"] = _flat(table["candidate_ids"]).astype(np.int32).reshape(of_candidates)
    columns["candidate_log_probs"] = _flat(table["candidate_log_probs"]).astype(np.float32).reshape(of_candidates)
    if shape.num_hidden > 0:
        hidden = _flat(table["hidden"]).astype(np.float32).reshape(-1, shape.depth, shape.num_hidden)
        columns["hidden"] = hidden
    columns["parent_logsumexp"] = _cut(table["parent_logsumexp"], np.float32)
    logits = _flat(table["parent_logits"]).astype(np.float32).reshape(-1, shape.width)
    columns["parent_logits"] = _split(logits, table["parent_logits"])
    for values in zip(*columns.values(), strict=True):
        yield RoundRecord(**dict(zip(columns, values, strict=True)))


def _flat(lists: pa.ChunkedArray) -> np.ndarray:
    return pc.list_flatten(pc.list_flatten(lists)).to_numpy()


def _cut(lists: pa.ChunkedArray, dtype: type) -> list[np.ndarray]:
    return _split(pc.list_flatten(lists).to_numpy().astype(dtype), lists)


def _split(values: np.ndarray, lists: pa.ChunkedArray) -> list[np.ndarray]:
    """The flat values of each row; a missing list is an empty one. `np.split` takes several times as long."""
    ends = np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy()).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
