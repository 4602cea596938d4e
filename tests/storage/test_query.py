"""Every named query on rounds made by hand, with answers worked out by hand; formats and errors of `query`."""

import csv
import dataclasses
import io
import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from graft_dist.errors import StoreError
from storage import TrajectoryStore, UnitKey, connect, query_names, run_query
from storage.query import query
from storage.schema import PARTITION_FIELDS, ROUNDS, SEQUENCES
from tests.storage.records import DATASET, PROVENANCE, make_round, make_sequence, undrafted, write_unit


def tree(tokens, parents, depths, targets, accepted, num_tokens):
    """The part of a round that queries about trees look at; node 0 is the root."""
    arrays = {"tree_tokens": tokens, "tree_parents": parents, "tree_depths": depths, "target_tokens": targets}
    return {
        **{name: np.array(values, np.int32) for name, values in arrays.items()},
        "accepted": np.array(accepted, np.int32),
        "num_tokens": num_tokens,
        "budget": len(tokens) - 1,
    }


# Below the root 4: nodes 1 (5) and 2 (6); below node 2: node 3 (7) and node 4 (8).
SHAPE = ([4, 5, 6, 7, 8], [-1, 0, 0, 2, 2], [0, 1, 1, 2, 2])
# Accepts 2 and 4, then the bonus: three tokens; two with budgets 2 and 3, one with budget 1 or 0.
DEEP = tree(*SHAPE, [6, 0, 8, 0, 9], [2, 4], 3)
# Accepts 1; wants 7 next, which sits at depth 2 below node 2: a mismatch.
MISMATCHED = tree(*SHAPE, [5, 7, 0, 0, 0], [1], 2)
# Accepts 2 and 4, and the sequence ends with node 4: no bonus, two tokens at most.
TRIMMED = tree(*SHAPE, [6, 0, 8, 0, 9], [2, 4], 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One run: a code prompt (deep, mismatched, plain round), a chat prompt (trimmed, one dense round), a bad one."""
    path = tmp_path_factory.mktemp("store")
    store = TrajectoryStore(path)
    seq = store.begin("run-1", "tiny", DATASET)
    sequences = [
        make_sequence("code-1", 3, output_token_ids=[1, 2, 3, 4, 5, 6]),
        make_sequence("chat-1", 1, task="chat", output_token_ids=[1, 2, 3], finish_reason="length"),
        make_sequence("bad-1", 0, task="chat", output_token_ids=[], finish_reason="error", error="prompt is empty"),
    ]
    quick = {
        "draft_ns": 1_000_000,
        "build_ns": 0,
        "verify_ns": 2_000_000,
        "commit_ns": 0,
        "batch_size": 2,
        "batch_rows": 6,
    }
    slow = {
        "draft_ns": 2_000_000,
        "build_ns": 1_000_000,
        "verify_ns": 5_000_000,
        "commit_ns": 2_000_000,
        "batch_rows": 5,
    }
    rounds = [
        make_round("code-1", 0, **DEEP, **slow),
        make_round("code-1", 1, **MISMATCHED, **quick),
        undrafted("code-1", 2, **{**quick, "batch_size": 1, "draft_ns": 0}),
        make_round("chat-1", 0, **TRIMMED, **quick),
        make_round("chat-1", 0, kind="dense", followed=np.array([5, 6], np.int32)),
    ]
    key = UnitKey(unit_id="u1", attempt="a1", run_id="run-1")
    written_at = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
    store.commit(store.write_unit(key, PROVENANCE, sequences, rounds, written_at), "run-1", seq)
    return path


def rows(root, name):
    return run_query(root, name, threads=1).to_pylist()


def test_runs(root):
    (row,) = rows(root, "runs")
    assert row.pop("first_written_at") == row.pop("last_written_at") == datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
    assert row == {
        "run_id": "run-1",
        "target": "tiny",
        "policies": "ddtree",
        "sources": "collect",
        "num_units": 1,
        "num_sequences": 3,
        "num_errors": 1,
        "num_stop": 1,
        "num_length": 1,
        "num_output_tokens": 9,
        "num_rounds": 4,
        "num_drafted": 8,
    }


def test_throughput(root):
    chat, code = rows(root, "throughput")
    # chat: 2 tokens in 3 ms shared by two sequences. code: 3 + 2 + 1 tokens in 10 ms, 3 ms / 2 and 2 ms.
    assert (chat["task"], chat["num_rounds"], chat["num_tokens"], chat["mat"]) == ("chat", 1, 2, 2.0)
    assert chat["engine_s"] == pytest.approx(0.0015) and chat["tokens_per_s"] == pytest.approx(2 / 0.0015)
    assert (code["task"], code["num_sequences"], code["num_tokens"], code["mat"]) == ("code", 1, 6, 2.0)
    assert code["mean_batch_size"] == pytest.approx(4 / 3)
    assert code["engine_s"] == pytest.approx(0.0135) and code["tokens_per_s"] == pytest.approx(6 / 0.0135)


def test_acceptance_by_task_and_depth(root):
    columns = ["task", "depth", "num_rounds", "num_in_tree", "num_accepted", "acceptance", "acceptance_given_parent"]
    assert [tuple(row[name] for name in columns) for row in rows(root, "acceptance")] == [
        ("chat", 1, 1, 1, 1, 1.0, 1.0),
        ("chat", 2, 1, 1, 1, 1.0, 1.0),
        ("code", 1, 2, 2, 2, 1.0, 1.0),
        ("code", 2, 2, 2, 1, 0.5, 0.5),
    ]


def test_mismatch_by_task(root):
    assert [
        (row["task"], row["num_rounds"], row["num_mismatched"], row["mismatch_rate"]) for row in rows(root, "mismatch")
    ] == [
        ("chat", 1, 0, 0.0),
        ("code", 2, 1, 0.5),
    ]


def test_gain_by_budget(root):
    # Tokens at budgets 0, 1, 2, 4: deep 1, 1, 2, 3; mismatched 1, 2, 2, 2; trimmed 1, 1, 2, 2; the plain round 1.
    assert [(row["budget"], row["num_rounds"], row["mat"]) for row in rows(root, "gain")] == [
        (0, 4, 1.0),
        (1, 3, pytest.approx(4 / 3)),
        (2, 3, pytest.approx(6 / 3)),
        (4, 3, pytest.approx(7 / 3)),
    ]


def test_gain_at_the_recorded_budget_is_what_was_committed(root):
    full = run_query(
        root, "SELECT avg(num_tokens) AS mat FROM rounds WHERE kind = 'decoded' AND budget = 4"
    ).to_pylist()
    assert rows(root, "gain")[-1]["mat"] == pytest.approx(full[0]["mat"])


def test_timings_by_budget(root):
    columns = ["batch_size", "budget", "num_rounds", "mean_batch_rows", "draft_ms", "build_ms", "verify_ms", "round_ms"]
    assert [tuple(row[name] for name in columns) for row in rows(root, "timings")] == [
        (1, 0, 1, 6.0, 0.0, 0.0, 2.0, 2.0),
        (1, 4, 1, 5.0, 2.0, 1.0, 5.0, 10.0),
        (2, 4, 2, 6.0, 1.0, 0.0, 2.0, 3.0),
    ]


def test_summary(root):
    (row,) = rows(root, "summary")
    assert (row["target"], row["num_sequences"], row["num_errors"], row["num_output_tokens"]) == ("tiny", 3, 1, 9)
    assert (row["num_rounds"], row["num_dense_rounds"], row["mat"], row["mean_budget"]) == (4, 1, 2.0, 3.0)
    assert row["mismatch_rate"] == pytest.approx(1 / 3)
    assert row["tokens_per_s"] == pytest.approx(8 / 0.015)


# ------------------------------------------------------------------ views


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    """A store of two targets, two runs and two days, a file for each target and run; the new run is of the second."""
    store = TrajectoryStore(tmp_path_factory.mktemp("parted"))
    for target in ("tiny", "other"):
        for day, run_id in enumerate(("old", "new"), 1):
            key = UnitKey(unit_id=f"{target}-{run_id}", attempt="a1", run_id=run_id)
            sequence, rounds = make_sequence(target, 2), [make_round(target, index) for index in range(2)]
            written_at = datetime(2026, 1, day, tzinfo=UTC)
            provenance = dataclasses.replace(PROVENANCE, target=target)
            seq = store.begin(run_id, target, DATASET)
            store.commit(store.write_unit(key, provenance, [sequence], rounds, written_at), run_id, seq)
    return store.path


def scans(plan):
    """The table scans of a plan as DuckDB prints it in JSON."""
    below = plan if isinstance(plan, list) else plan.values() if isinstance(plan, dict) else []
    own = [plan] if isinstance(plan, dict) and plan.get("type") == "TABLE_SCAN" else []
    return own + [scan for part in below for scan in scans(part)]


@pytest.mark.parametrize("view", ["rounds", "rounds_of_all_attempts"])
@pytest.mark.parametrize(
    ("condition", "num_files", "row_groups"),
    [
        ("target = 'tiny'", 2, (2, 2)),
        ("date >= DATE '2026-01-02'", 2, (2, 2)),
        ("target = 'tiny' AND date = DATE '2026-01-02'", 1, (1, 1)),
        ("run_id = 'old'", 4, (2, 4)),
    ],
)
def test_files_that_cannot_match_are_not_read(parted, view, condition, num_files, row_groups):
    """By folder for a target or a day; of a run's neighbours only the footers, whose statistics say so."""
    sql = f"EXPLAIN (ANALYZE, FORMAT json) SELECT sum(num_tokens) FROM {view} WHERE {condition}"
    with connect(parted) as connection:
        ((_, plan),) = connection.sql(sql).fetchall()
    (scan,) = (scan for scan in scans(json.loads(plan)) if "/rounds/target=" in scan["extra_info"]["Filename(s)"])
    assert scan["extra_info"]["Total Files Read"] == str(num_files)
    assert (scan["row_groups_scanned"], scan["total_row_groups_to_scan"]) == row_groups


def test_an_empty_store_has_typed_empty_views(tmp_path):
    for made in (False, True):
        if made:
            TrajectoryStore(tmp_path / "store").begin("run", "tiny", DATASET)
        with connect(tmp_path / "store") as connection:
            for view, schema in (("sequences", SEQUENCES), ("rounds", ROUNDS)):
                found = connection.sql(f"SELECT * FROM {view}").to_arrow_table().schema
                assert found.names == [*schema.names, *(field.name for field in PARTITION_FIELDS)]
                assert [field.type for field in found] == [field.type for field in [*schema, *PARTITION_FIELDS]]


@pytest.mark.parametrize("name", query_names())
def test_every_named_query_answers_for_an_empty_store(tmp_path, name):
    TrajectoryStore(tmp_path).begin("run", "tiny", DATASET)
    assert run_query(tmp_path, name).num_rows == 0


def test_views_have_the_types_of_the_schema_when_there_are_rows(root):
    with connect(root) as connection:
        found = connection.sql("SELECT * FROM rounds").to_arrow_table().schema
    assert [field.type for field in found] == [field.type for field in [*ROUNDS, *PARTITION_FIELDS]]


def test_settings_reach_duckdb(root):
    with connect(root, memory_limit="256MB", threads=1) as connection:
        threads, memory, install = connection.sql(
            "SELECT current_setting('threads'), current_setting('memory_limit'), "
            "current_setting('autoinstall_known_extensions')"
        ).fetchall()[0]
    assert threads == 1 and memory.startswith("244") and install is False
    with connect(root) as connection:
        assert connection.sql("SELECT current_setting('memory_limit')").fetchall() == [("1.8 GiB",)]
    with pytest.raises(StoreError, match="a memory limit of 'much' is not a size"):
        connect(root, memory_limit="much")


def test_a_snapshot_whose_files_are_gone_is_named(tmp_path):
    store = TrajectoryStore(tmp_path)
    store.begin("run", "tiny", DATASET)
    store.commit(write_unit(store, "u1", "a1"), "run", 1)
    old = store.snapshot()
    store.commit(write_unit(store, "u2", "a1"), "run", 2)
    store.compact()
    store.vacuum(retention_hours=0)
    with pytest.raises(StoreError, match=r"snapshot sequences@2\+rounds@1 of .* cannot be read"):
        connect(tmp_path, snapshot=old)


# ------------------------------------------------------------------ what the command prints


def test_tables_are_aligned(root):
    text = query(
        root,
        "SELECT task, count(*) AS n, 1 / 3 AS third, NULL::INTEGER AS nothing FROM sequences GROUP BY 1 ORDER BY 1",
    )
    assert text.splitlines() == [
        "task  n   third  nothing",
        "----  -  ------  -------",
        "chat  2  0.3333",
        "code  1  0.3333",
    ]


def test_long_cells_are_cut_in_tables_only(root):
    sql = "SELECT repeat('x', 100) AS word"
    assert query(root, sql).splitlines()[2] == "x" * 59 + "…"
    assert query(root, sql, "csv").splitlines()[1] == "x" * 100


def test_csv_keeps_lists_as_json(root):
    text = query(root, "SELECT 'a,b' AS name, [[1, 2], [3]] AS ids, NULL AS nothing", "csv")
    assert list(csv.reader(io.StringIO(text))) == [["name", "ids", "nothing"], ["a,b", "[[1, 2], [3]]", ""]]


def test_json_is_valid_json(root):
    text = query(root, "SELECT 'nan'::DOUBLE AS x, [1, 2] AS ids, DATE '2026-05-06' AS day, 'ü' AS name", "json")
    assert json.loads(text) == [{"x": None, "ids": [1, 2], "day": "2026-05-06", "name": "ü"}]


def test_sums_and_decimals_are_numbers(root):
    sql = "SELECT sum(num_rounds) AS n, 1.25::DECIMAL(6, 2) AS d FROM sequences"
    assert json.loads(query(root, sql, "json")) == [{"n": 4, "d": 1.25}]
    assert query(root, "SELECT sum(num_rounds) AS num_rounds FROM sequences").splitlines()[2] == "         4"


@pytest.mark.parametrize("format", ["table", "csv", "json"])
@pytest.mark.parametrize("name", query_names())
def test_every_named_query_prints_in_every_format(root, name, format):
    assert query(root, name, format).strip()


def test_an_answer_without_rows_prints_its_columns(root):
    sql = "SELECT task FROM sequences WHERE false"
    assert query(root, sql) == "task\n----" and query(root, sql, "csv") == "task" and query(root, sql, "json") == "[]"


def test_a_statement_without_an_answer_prints_nothing(root):
    assert query(root, "-- only a comment") == ""
    assert run_query(root, "-- only a comment") == pa.table({})


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT nothing FROM rounds", "the query failed: Binder Error.*nothing.*named queries: acceptance, gain"),
        ("SELEKT 1", "the query failed: Parser Error"),
        ("SELECT * FROM trees", "views: sequences, rounds"),
    ],
)
def test_a_wrong_query_is_one_sentence(root, sql, message):
    with pytest.raises(StoreError, match=message) as caught:
        query(root, sql)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sql", ["", " \n"])
def test_an_empty_query_is_refused(root, sql):
    with pytest.raises(StoreError, match="the query is empty: give SQL, or one of the named queries acceptance, gain"):
        query(root, sql)


def test_two_columns_of_one_name_are_no_json_object(root):
    assert query(root, "SELECT 1 AS a, 2 AS a", "csv") == "a,a\n1,2"
    with pytest.raises(StoreError, match="two columns are called 'a'"):
        query(root, "SELECT 1 AS a, 2 AS a", "json")


def test_a_missing_store_is_one_sentence(tmp_path):
    with pytest.raises(StoreError, match=r"there is no trajectory store at .*typo"):
        query(tmp_path / "typo", "summary")
    assert not (tmp_path / "typo").exists()


def test_a_wrong_format_is_one_sentence(root):
    with pytest.raises(StoreError, match="format 'xml' is not one of table, csv, json"):
        query(root, "summary", "xml")
