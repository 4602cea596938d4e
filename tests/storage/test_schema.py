"""Records become rows without loss, and files that do not fit are refused."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from deltalake import Schema as DeltaSchema

from graft_dist.errors import StoreError
from storage.schema import (
    PARTITION_COLUMNS,
    ROUNDS,
    SCHEMA_VERSION,
    SEQUENCES,
    TABLES,
    UnitKey,
    check_file_schema,
    rounds_table,
    sequences_table,
)
from tests.storage.records import PROVENANCE, make_round, make_sequence, undrafted

KEY = UnitKey(unit_id="u", attempt="a", run_id="r")


def test_a_round_becomes_a_row_with_the_same_values():
    record = make_round("s", 1)
    row = rounds_table(KEY, [record]).to_pylist()[0]
    assert (row["unit_id"], row["attempt"], row["run_id"], row["sequence_id"]) == ("u", "a", "r", "s")
    for name in ROUNDS.names:
        if hasattr(record, name):
            value = getattr(record, name)
            assert row[name] == (value.tolist() if isinstance(value, np.ndarray) else value), name


def test_rounds_of_different_shapes_share_a_table():
    deep = make_round("s", 0, candidate_ids=np.arange(12, dtype=np.int32).reshape(4, 3))
    rows = rounds_table(KEY, [undrafted("s", 1), deep, undrafted("s", 2)]).to_pylist()
    assert [row["candidate_ids"] for row in rows] == [
        [],
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        [],
    ]
    assert [row["accepted"] for row in rows] == [[], [1], []]


def test_hidden_states_are_null_where_none_were_recorded():
    hidden = np.array([[0.5, -1.5, 2.0], [0.25, 0.0, 1.0]], np.float32)
    rounds = [
        make_round("s", 0),
        make_round("s", 1, hidden=hidden),
        undrafted("s", 2),
        make_round("s", 3, hidden=hidden),
    ]
    column = rounds_table(KEY, rounds).column("hidden")
    assert column.to_pylist() == [None, hidden.tolist(), None, hidden.tolist()]
    assert rounds_table(KEY, [make_round("s", 0)]).column("hidden").to_pylist() == [None]


def test_no_rounds_make_an_empty_typed_table():
    table = rounds_table(KEY, [])
    assert table.num_rows == 0 and table.schema == ROUNDS


def test_a_mismatch_is_recorded_and_left_open_for_dense_rounds():
    # After node 1 the target wants 7 at depth 2; a 7 is there, but below node 2.
    mismatched = make_round(
        "s",
        0,
        tree_tokens=np.array([4, 5, 6, 7], np.int32),
        tree_parents=np.array([-1, 0, 0, 2], np.int32),
        tree_depths=np.array([0, 1, 1, 2], np.int32),
        target_tokens=np.array([5, 7, 1, 1], np.int32),
    )
    dense = make_round("s", 1, kind="dense", followed=np.array([5, 8], np.int32))
    table = rounds_table(KEY, [mismatched, make_round("s", 2), dense])
    assert table.column("is_mismatch").to_pylist() == [True, False, None]
    assert table.column("followed").to_pylist() == [[], [], [5, 8]]


def test_a_sequence_becomes_a_row_with_its_provenance():
    written_at = datetime(2026, 3, 4, 5, 6, 7, 8, tzinfo=UTC)
    failed = make_sequence("s", 0, finish_reason="error", error="prompt is empty", output_token_ids=[], seed=None)
    row = sequences_table(KEY, PROVENANCE, [failed], written_at).to_pylist()[0]
    assert row["error"] == "prompt is empty" and row["output_token_ids"] == [] and row["seed"] is None
    assert row["target_spec"] == "org/tiny" and row["policy"] == "ddtree" and row["hardware"] == "cpu"
    assert row["written_at"] == written_at and row["schema_version"] == SCHEMA_VERSION
    assert '"top_p": 0.9' in row["sampling"] and row["temperature"] == 0.5


@pytest.mark.parametrize("schema", TABLES.values(), ids=TABLES.keys())
def test_the_log_can_hold_every_type(schema):
    assert pa.schema(DeltaSchema.from_arrow(schema).to_arrow()) == schema
    assert not set(PARTITION_COLUMNS) & set(schema.names)


def test_a_file_with_another_type_is_refused():
    index = SEQUENCES.get_field_index("seed")
    changed = SEQUENCES.set(index, pa.field("seed", pa.string()))
    with pytest.raises(StoreError, match=r"f\.parquet has column 'seed' as string, but the table has it as int64"):
        check_file_schema(changed, SEQUENCES, "f.parquet")


def test_a_file_with_an_unknown_column_is_refused():
    with pytest.raises(StoreError, match="column 'mood'"):
        check_file_schema(SEQUENCES.append(pa.field("mood", pa.string())), SEQUENCES, "f.parquet")


def test_a_file_may_lack_nullable_columns_only():
    check_file_schema(SEQUENCES.remove(SEQUENCES.get_field_index("seed")), SEQUENCES, "f.parquet")
    with pytest.raises(StoreError, match="lacks the column 'attempt'"):
        check_file_schema(SEQUENCES.remove(SEQUENCES.get_field_index("attempt")), SEQUENCES, "f.parquet")
