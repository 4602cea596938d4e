"""Lessons on disk, shares of workers, and fits that stop and go on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from graft_dist.edge_scorer import TdesConfig, TdesNetwork
from graft_dist.errors import PolicyError
from graft_dist.learning.lesson_file import LessonWriter, empty_lessons, open_share
from graft_dist.learning.scorer_checkpoint import ScorerCheckpoint
from graft_dist.learning.tdes import Lessons, Share, TdesTrainer, TdesTraining, join_lessons, lessons_of
from graft_dist.rounds import RoundRecord
from tests.storage.records import make_round


def some_rounds(number: int) -> list[RoundRecord]:
    random = np.random.default_rng(number)
    return [
        make_round("s", index, parent_logits=random.normal(size=(2, 3)).astype(np.float32)) for index in range(number)
    ]


def same(ours: Lessons, theirs: Lessons) -> None:
    assert np.array_equal(ours.candidate_ids, theirs.candidate_ids)
    assert np.array_equal(ours.log_probs, theirs.log_probs)
    for table in ("parents", "edges", "pairs"):
        for field in fields(getattr(ours, table)):
            one, two = (getattr(getattr(each, table), field.name) for each in (ours, theirs))
            assert np.array_equal(one, two), (table, field.name)


def test_parts_come_back_as_one(tmp_path: Path) -> None:
    parts = [lessons_of(some_rounds(number)) for number in (5, 3)]
    with LessonWriter(tmp_path / "lessons") as writer:
        writer.add(empty_lessons(2, 3, 0), np.zeros(0, np.int64))
        writer.add(parts[0], np.array([10, 12, 4, 6, 8]))  # as they are read: in the order of the files
        writer.add(parts[1], np.array([0, 2, 15]))
    share = open_share(tmp_path / "lessons", 20)
    same(share.lessons, join_lessons(parts))
    assert share.num_rounds == 20 and share.lessons.candidate_ids.dtype == np.int32
    assert share.rows_of(np.array([12, 3, 0, 19, 8])).tolist() == [1, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["lessons"]


def test_a_worker_without_rounds(tmp_path: Path) -> None:
    with LessonWriter(tmp_path / "lessons") as writer:
        writer.add(empty_lessons(2, 3, 0), np.zeros(0, np.int64))
    share = open_share(tmp_path / "lessons", 9)
    assert len(share.lessons) == 0 and share.rows_of(np.arange(9)).tolist() == []


def test_what_is_not_whole_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), LessonWriter(tmp_path / "lessons") as writer:
        writer.add(lessons_of(some_rounds(2)), np.arange(2))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with LessonWriter(tmp_path / "lessons") as writer:
        writer.add(lessons_of(some_rounds(2)), np.arange(2))
    with (tmp_path / "lessons" / "log_probs.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(PolicyError, match=r"log_probs\.bin has 49 bytes instead of 48"):
        open_share(tmp_path / "lessons", 2)


def trainer(lessons: Lessons | Share, **changes: int) -> TdesTrainer:
    torch.manual_seed(0)
    network = TdesNetwork(TdesConfig(embedding_size=6, draft_depth=2, width=4, projection_size=4))
    training = TdesTraining(**{"steps": 12, "rounds_per_step": 4, "evaluate_every": 3, **changes})  # type: ignore[arg-type]
    return TdesTrainer(network, torch.randn(16, 6), lessons, lessons_of(some_rounds(4)), training)


def test_a_mapped_share_fits_what_lessons_in_memory_fit(tmp_path: Path) -> None:
    lessons = lessons_of(some_rounds(9))
    with LessonWriter(tmp_path / "lessons") as writer:
        writer.add(lessons, np.arange(9))
    fits = [trainer(each) for each in (lessons, open_share(tmp_path / "lessons", 9))]
    for fit in fits:
        while not fit.is_done:
            fit.advance()
    assert fits[0].evaluations == fits[1].evaluations


def test_a_fit_that_goes_on_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    lessons = lessons_of(some_rounds(9))
    whole, first, second = (trainer(lessons) for _ in range(3))
    while not whole.is_done:
        whole.advance()
    checkpoint = ScorerCheckpoint(tmp_path / "scorer", "run 1")
    assert not checkpoint.load(first) and checkpoint.result() is None
    for _ in range(2):
        first.advance()
        checkpoint.save(first)
    assert checkpoint.load(second) and second.step == 6 and checkpoint.result() is None
    while not second.is_done:
        second.advance()
    checkpoint.save(second)
    assert second.evaluations == whole.evaluations
    result = checkpoint.result()
    assert result is not None and result[1] == tuple(whole.evaluations)
    for name, tensor in whole.result().network.state_dict().items():
        assert torch.equal(tensor, result[0][name]), name
    assert len(list((tmp_path / "scorer").iterdir())) == 2
    with pytest.raises(PolicyError, match="a fit with other settings or other data"):
        ScorerCheckpoint(tmp_path / "scorer", "run 2").load(second)
    (file,) = (tmp_path / "scorer").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PolicyError, match=r"state-\d+.safetensors cannot be read"):
        checkpoint.load(second)
