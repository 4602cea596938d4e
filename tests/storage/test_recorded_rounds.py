"""Rounds made by hand, committed, and read back as replay wants them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graft_dist.cost_curve import Timing
from graft_dist.errors import StoreError
from graft_dist.replay import RecordedRounds
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from storage import TrajectoryStore, UnitKey, connect
from storage.recorded_rounds import (
    Selection,
    Skipped,
    check_one_source,
    count_skipped,
    recorded_rounds,
    recorded_timings,
)
from tests.storage.records import (
    DATASET,
    PROVENANCE,
    commit_replayable,
    make_round,
    make_sequence,
    write_unit,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    commit_replayable(path)
    return path


def read(root: Path, selection: Selection) -> list[RecordedRounds]:
    with connect(root, threads=1) as connection:
        return list(recorded_rounds(connection, selection))


def test_what_followed_and_how_far_it_could_have_gone(root: Path) -> None:
    (rounds,) = read(root, Selection())
    found = {
        (kind, task, sequence_id, int(index)): (followed.tolist(), int(left), int(room))
        for (kind, task), sequence_id, index, followed, left, room in zip(
            rounds.groups,
            rounds.sequence_ids,
            rounds.round_indices,
            rounds.followed,
            rounds.num_left,
            rounds.rooms,
            strict=True,
        )
    }
    assert found == {
        ("decoded", "code", "code-1", 0): ([5, 7], 4, 19),
        ("decoded", "code", "code-1", 2): ([8, -1], 1, 16),  # near the end fewer tokens are known
        ("dense", "code", "code-1", 1): ([7, 9], 3, 18),
        ("decoded", "chat", "chat-1", 0): ([6, 7], 2, 2),  # it ended at its limit
        ("decoded", "chat", "gone-2", 0): ([6, 8], 3, 19),  # aborted, but later than it matters here
    }
    assert rounds.candidate_ids.shape == rounds.log_probs.shape == (5, 2, 3)
    assert rounds.candidate_ids[0].tolist() == [[5, 6, 9], [7, 8, 9]]
    assert rounds.log_probs[0].tolist() == [[-0.5, -1.5, -2.5], [-0.25, -2.0, -3.0]]
    assert set(rounds.root_tokens.tolist()) == {4, 5, 9}


def test_what_is_left_out_is_counted(root: Path) -> None:
    with connect(root, threads=1) as connection:
        assert count_skipped(connection, Selection()) == Skipped(num_undrafted=1, num_cut_off=1)
        assert count_skipped(connection, Selection(task="chat")) == Skipped(num_undrafted=0, num_cut_off=1)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(task="code"), {"code-1"}),
        (Selection(prompt_ids=["prompt-chat-1", "prompt-gone-2"]), {"chat-1", "gone-2"}),
        (Selection(target="tiny", task="chat", prompt_ids=["prompt-chat-1", "prompt-code-1"]), {"chat-1"}),
        (Selection(prompt_ids=[]), set()),
        (Selection(target="other"), set()),
    ],
)
def test_selections(root: Path, selection: Selection, expected: set[str]) -> None:
    assert {name for rounds in read(root, selection) for name in rounds.sequence_ids} == expected


def test_timings_by_budget(root: Path) -> None:
    with connect(root, threads=1) as connection:
        found = recorded_timings(connection, Selection())
        assert found is not None
        assert (found.hardware, found.batch_size) == ("cpu", 1)
        assert found.timings == [Timing(0, 5.0, 4.9, 1), Timing(2, 6.0, 4.9, 4), Timing(4, 10.0, 8.9, 1)]
        assert recorded_timings(connection, Selection(target="other")) is None


def test_hidden_states_come_back_where_they_were_recorded_and_asked_for(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    hidden = np.arange(8, dtype=np.float32).reshape(2, 4)
    rounds = [make_round("s", 0), make_round("s", 1, hidden=hidden), make_round("s", 2, hidden=hidden[:, :3])]
    sequence = make_sequence("s", 3, output_token_ids=list(range(40)))
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, [sequence], rounds), "run", turn)
    with connect(tmp_path, threads=1) as connection:
        batches = list(recorded_rounds(connection, Selection(), with_hidden=True))
        (without,) = recorded_rounds(connection, Selection())
    assert len(without) == 3 and without.hidden is None
    assert [None if batch.hidden is None else batch.hidden.shape for batch in batches] == [None, (1, 2, 3), (1, 2, 4)]
    assert batches[2].hidden is not None and batches[2].hidden[0].tolist() == hidden.tolist()
    assert [batch.round_indices.tolist() for batch in batches] == [[0], [2], [1]]


def test_several_shapes_and_many_batches(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    wide = {
        "candidate_ids": np.array([[5, 6, 9, 8]] * 3, np.int32),
        "candidate_log_probs": np.zeros((3, 4), np.float32),
    }
    number = 1500
    rounds: list[RoundRecord] = [
        make_round("s", index, context_length=3 + index, **(wide if index % 2 else {})) for index in range(number)
    ]
    sequence = make_sequence(
        "s", number, output_token_ids=list(range(number + 1)), sampling=SamplingParams(max_new_tokens=number + 9)
    )
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, [sequence], rounds), "run", turn)
    batches = read(tmp_path, Selection())
    assert len(batches) > 2
    assert {batch.candidate_ids.shape[1:] for batch in batches} == {(2, 3), (3, 4)}
    for batch in batches:
        steps = np.arange(1, batch.candidate_ids.shape[1] + 1)
        expected = batch.round_indices[:, None] + steps
        assert np.array_equal(batch.followed, np.where(expected <= number, expected, -1))
    assert sorted(np.concatenate([batch.round_indices for batch in batches]).tolist()) == list(range(number))


def test_several_targets_are_not_mixed(root: Path, tmp_path: Path) -> None:
    with connect(root, threads=1) as connection:
        assert check_one_source(connection, Selection()) == ["d-1"]
    store = TrajectoryStore(tmp_path)
    for target in ("tiny", "small"):
        turn = store.begin("run-" + target, target, DATASET)
        store.commit(write_unit(store, "u-" + target, "a-" + target, target=target), "run-" + target, turn)
    with connect(tmp_path, threads=1) as connection:
        with pytest.raises(StoreError, match="choose one of small, tiny"):
            check_one_source(connection, Selection())
        assert check_one_source(connection, Selection(target="tiny")) == ["d-1"]
