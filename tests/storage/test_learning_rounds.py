"""Rounds as learning reads them: sources, order, records that are what was written, timings."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from graft_dist.errors import StoreError
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from storage import TrajectoryStore, UnitKey, connect
from storage.learning_rounds import (
    RoundShape,
    Source,
    Timed,
    num_of_other_drafters,
    prompts_of,
    recorded_sequences,
    round_records,
    shapes_of,
    source_of,
    timed_hardware,
    timed_rounds,
)
from tests.storage.records import (
    DATASET,
    PROVENANCE,
    commit_replayable,
    commit_rounds_only,
    make_round,
    make_sequence,
    undrafted,
)

SHAPE = RoundShape(2, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    commit_replayable(tmp_path)
    return tmp_path


def test_where_rounds_come_from(root: Path, tmp_path: Path) -> None:
    with connect(root, threads=1) as connection:
        assert source_of(connection, "tiny") == Source("org/tiny", "t-1", ("d-1",))
        assert shapes_of(connection, "tiny", "d-1") == [(2, 3, 6)]
        with pytest.raises(StoreError, match="no drafted rounds of large to learn from: it holds rounds of tiny"):
            source_of(connection, "large")
    with connect(tmp_path / "none", threads=1) as connection, pytest.raises(StoreError, match="no rounds at all"):
        source_of(connection, "tiny")


def test_sequences_and_their_rounds(root: Path) -> None:
    with connect(root, threads=1) as connection:
        sequences = recorded_sequences(connection, "tiny", "d-1", RoundShape(2, 3))
        assert [(each.sequence_id, each.num_decoded, each.num_dense) for each in sequences] == [
            ("chat-1", 1, 0), ("code-1", 2, 1), ("gone-1", 1, 0), ("gone-2", 1, 0),
        ]  # fmt: skip
        assert sequences[1].prompt_name == prompt_name(tuple(range(10))) and sequences[1].task == "code"
        prompts = list(prompts_of(connection, "tiny", sequences[1:2]))
        assert prompts == [(sequences[1], tuple(range(10)))]
        assert recorded_sequences(connection, "tiny", "d-2", RoundShape(2, 3)) == []
        assert recorded_sequences(connection, "tiny", "d-1", RoundShape(2, 4)) == []
        found = list(round_records(connection, "tiny", sequences[:2], RoundShape(2, 3)))
        assert [sequence.sequence_id for sequence, _ in found] == ["chat-1", "code-1"]
        assert [(each.kind, each.round_index) for each in found[1][1]] == [("decoded", 0), ("decoded", 2), ("dense", 1)]
        with pytest.raises(StoreError, match="the store has changed"):
            list(round_records(connection, "tiny", [replace(sequences[0], num_decoded=2)], RoundShape(2, 3)))


def test_prompts_have_names(tmp_path: Path) -> None:
    """The same at all times: which prompts settle what a policy is fitted to goes by them."""
    asked = [(), (7,), (7, 8), (49151, 0, 3)]
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    sequences = [make_sequence(f"s-{at}", 1, prompt_token_ids=list(ids)) for at, ids in enumerate(asked)]
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    rounds = [make_round(f"s-{at}", 0) for at in range(len(asked))]
    store.commit(store.write_unit(key, PROVENANCE, sequences, rounds), "run", turn)
    with connect(tmp_path, threads=1) as connection:
        found = recorded_sequences(connection, "tiny", "d-1", SHAPE)
        assert [each.prompt_name for each in found] == [prompt_name(ids) for ids in asked]
        assert {each.sequence_id: ids for each, ids in prompts_of(connection, "tiny", found)} == {
            f"s-{at}": ids for at, ids in enumerate(asked)
        }


def prompt_name(token_ids: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]


def test_records_are_what_was_written(tmp_path: Path) -> None:
    written = [make_round("s", 0), make_round("s", 1, parent_logits=np.zeros((1, 3), np.float32), accepted=[])]
    written[1] = replace(written[1], accepted=np.zeros(0, np.int32), parent_logsumexp=np.ones(1, np.float32))
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, [make_sequence("s", 2)], written), "run", turn)
    with connect(tmp_path, threads=1) as connection:
        sequences = recorded_sequences(connection, "tiny", "d-1", SHAPE)
        ((_, read),) = round_records(connection, "tiny", sequences, SHAPE)
    for ours, theirs in zip(read, written, strict=True):
        for field in fields(RoundRecord):
            assert np.array_equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name


def test_rounds_come_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    """Whole units in the order of the files, whatever order the unit was written in; the same before and after a merge,
    since files are merged in their order; never rounds of an attempt that does not count or of another target."""
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    rounds = [make_round(name, index) for index in (1, 0) for name in ("b", "a")]
    names = {"u-3": "tiny", "u-1": "tiny", "u-2": "other", "u-4": "tiny"}
    pair = [make_sequence(name, 2) for name in "ab"]
    died = store.write_unit(UnitKey(unit_id="u-4", attempt="0", run_id="run"), PROVENANCE, pair, rounds)
    commit_rounds_only(store, died, turn)
    for at, (unit_id, target) in enumerate(names.items(), turn + 1):
        key = UnitKey(unit_id=unit_id, attempt="a", run_id="run")
        store.commit(store.write_unit(key, replace(PROVENANCE, target=target), pair, rounds), "run", at)
    expected = [(unit_id, name, [0, 1]) for unit_id in ("u-1", "u-3", "u-4") for name in "ab"]
    assert streamed(tmp_path) == expected
    assert streamed(tmp_path, only=("u-3",)) == expected[2:4]
    assert store.compact(orphan_age_hours=24).num_files_after < 9
    assert streamed(tmp_path) == expected
    with connect(tmp_path, threads=1) as connection:
        sequences = recorded_sequences(connection, "tiny", "d-1", SHAPE)
        with pytest.raises(StoreError, match="1 rounds of 1 units are gone"):
            list(round_records(connection, "tiny", [replace(sequences[0], num_decoded=3)], SHAPE))
        with pytest.raises(StoreError, match="unit u-1 now has more rounds than were counted"):
            list(round_records(connection, "tiny", [replace(sequences[0], num_decoded=1), sequences[2]], SHAPE))
        assert list(round_records(connection, "tiny", [], SHAPE)) == []


def streamed(root: Path, only: tuple[str, ...] = ()) -> list[tuple[str, str, list[int]]]:
    """(unit, sequence, round indices) as they come."""
    with connect(root, threads=2) as connection:
        sequences = recorded_sequences(connection, "tiny", "d-1", SHAPE)
        wanted = [each for each in sequences if not only or each.unit_id in only]
        found = list(round_records(connection, "tiny", wanted[::-1], SHAPE))
    return [(each.unit_id, each.sequence_id, [record.round_index for record in records]) for each, records in found]


def test_timings_of_the_busiest_hardware(root: Path) -> None:
    with connect(root, threads=1) as connection:
        (timed,) = timed_rounds(connection, "tiny", "d-1", SHAPE, "cpu")
        assert timed_hardware(connection, "tiny", "d-1", SHAPE) == ["cpu"]
        assert timed_hardware(connection, "large", "d-1", SHAPE) == []
        assert list(timed_rounds(connection, "tiny", "d-1", SHAPE, "gpu")) == []
    assert (timed.hardware, timed.batch_size, timed.label, timed.run_ids) == ("cpu", 1, "cpu", ("run",))
    assert rows_of(timed) == [(0, 5.0, 4.9, 12), (4, 10.0, 8.9, 13)]


def test_rounds_that_costs_are_fitted_on(tmp_path: Path) -> None:
    """Not the round in which the drafter reads the prompt, nor one of another shape; alone before batches, greedy
    before sampled."""
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    greedy, sampled = SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=0.5, seed=1)
    sequences = [
        make_sequence("cold", 6, sampling=greedy),
        make_sequence("warm", 2, sampling=sampled),
        make_sequence("pair", 2, sampling=greedy),
        make_sequence("plain", 1, sampling=greedy),
    ]
    rounds = [
        undrafted("cold", 0, batch_rows=1, draft_ns=0),
        make_round("cold", 1, draft_ns=70_000_000),  # the prompt
        make_round("cold", 2),
        make_round("cold", 3, batch_rows=1),  # drafted, and then nothing was verified
        make_round("cold", 4, batch_rows=5, context_length=40),
        replace(chain("cold", 5), verify_ns=90_000_000),
        *(make_round("warm", index) for index in range(2)),
        *(make_round("pair", index, batch_size=2, batch_rows=6) for index in range(2)),
        undrafted("plain", 0, batch_rows=1, draft_ns=0, verify_ns=2_000_000),
    ]
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, sequences, rounds), "run", turn)
    with connect(tmp_path, threads=1) as connection:
        alone, warm, pair = timed_rounds(connection, "tiny", "d-1", replace(SHAPE, num_hidden=4), "cpu")
    assert rows_of(alone) == [(0, 3.0, 2.9, 10), (0, 5.0, 4.9, 10), (2, 6.0, 4.9, 14), (4, 6.0, 4.9, 40)]
    assert len(set(alone.rounds.sequence_keys.tolist())) == 2
    assert rows_of(warm) == [(2, 6.0, 4.9, 12)]
    assert rows_of(pair) == [(2, 3.0, 2.45, 12)] and pair.label == "cpu, share of 2 sequences"


def test_shapes_are_counted_where_hidden_states_are(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    hidden = np.zeros((2, 4), np.float32)
    rounds = [*(make_round("s", index) for index in range(3)), replace(chain("s", 3), hidden=hidden)]
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, [make_sequence("s", 4)], rounds), "run", turn)
    with connect(tmp_path, threads=1) as connection:
        assert shapes_of(connection, "tiny", "d-1") == [(2, 3, 3), (2, 1, 1)]
        assert shapes_of(connection, "tiny", "d-1", 4) == [(2, 1, 1)]
        assert shapes_of(connection, "tiny", "d-1", 5) == []


def chain(sequence_id: str, round_index: int) -> RoundRecord:
    """A round that drafted one candidate a depth."""
    record = make_round(sequence_id, round_index)
    return replace(
        record,
        candidate_ids=record.candidate_ids[:, :1],
        candidate_log_probs=record.candidate_log_probs[:, :1],
        parent_logits=record.parent_logits[:, :1],
    )


def test_another_drafters_rounds_are_not_mixed_in(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    drafted = (("old", "d-1", 50_000_000), ("new", "d-2", 3_000_000), ("plain", None, 2_000_000))
    for at, (name, drafter, verify_ns) in enumerate(drafted):
        provenance = replace(PROVENANCE, drafter_fingerprint=drafter)
        rounds = [make_round(name, index, verify_ns=verify_ns) for index in range(3)]
        if drafter is None:
            rounds = [undrafted(name, index, batch_rows=1, draft_ns=0, verify_ns=verify_ns) for index in range(3)]
        key = UnitKey(unit_id=name, attempt="a", run_id="run")
        store.commit(store.write_unit(key, provenance, [make_sequence(name, 3)], rounds), "run", turn + at)
    with connect(tmp_path, threads=1) as connection:
        assert shapes_of(connection, "tiny", "d-2") == [(2, 3, 3)] and shapes_of(connection, "tiny", "d-3") == []
        assert num_of_other_drafters(connection, "tiny", "d-2") == 1
        (timed,) = timed_rounds(connection, "tiny", "d-2", SHAPE, "cpu")
    assert sorted(set(timed.rounds.undrafted_ms.round(1).tolist())) == [2.9, 3.9]


def rows_of(timed: Timed) -> list[tuple[float, ...]]:
    rounds = timed.rounds
    columns = (rounds.budgets, rounds.round_ms, rounds.undrafted_ms, rounds.context_lengths)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))
