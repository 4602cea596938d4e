"""The collector with a real engine on a tiny target: whole units, no idle slot, faults that cost what they must."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from graft_dist import engine as engine_module
from graft_dist.engine import Engine, SequenceEvent
from graft_dist.policy import plain
from graft_dist.rounds import RoundRecord, SequenceRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs.collector import Collector
from jobs.units import Unit, WorkItem
from jobs.work import Report
from storage.trajectories import FileInfo
from tests.jobs.fakes import make_file

SLOTS = 2


@dataclass
class Shelf:
    """A writer that keeps what it is given."""

    units: dict[str, tuple[list[SequenceRecord], list[RoundRecord]]] = field(default_factory=dict)
    fault: Exception | None = None

    def __call__(
        self, unit: Unit, sequences: Sequence[SequenceRecord], rounds: Sequence[RoundRecord]
    ) -> list[FileInfo]:
        if self.fault is not None:
            raise self.fault
        self.units[unit.unit_id] = (list(sequences), list(rounds))
        return [make_file(unit.unit_id, 1)]


class FragileEngine(Engine):
    """An engine whose step raises `fault` once."""

    fault: Exception | None = None

    def step(self) -> list[SequenceEvent]:
        if FragileEngine.fault is not None and self.num_live == SLOTS:
            fault, FragileEngine.fault = FragileEngine.fault, None
            raise fault
        return super().step()


def unit(name: str, *lengths: int, **changes: Any) -> Unit:
    """A unit of one item for each prompt length."""
    items = [
        WorkItem(f"{name}-{index}", f"p-{name}-{index}", "chat", ("x" * length,), 0, None)
        for index, length in enumerate(lengths)
    ]
    return Unit(name, tuple(replace(item, **changes) for item in items))


def render(item: WorkItem) -> list[int]:
    return [10 + (7 * index + len(item.turns[0])) % 300 for index in range(len(item.turns[0]))]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def collector(tiny_llama: Target, shelf: Shelf) -> Collector:
    return make_collector(tiny_llama, shelf)


def make_collector(target: Target, shelf: Shelf, **more: Any) -> Collector:
    def engine() -> Engine:
        return FragileEngine(target, None, plain(), max_slots=SLOTS, max_length=64, record=True, detokenize=False)

    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    settings: dict[str, Any] = {"write": shelf, "slice_s": 1e9} | more
    return Collector(make_engine=engine, num_slots=SLOTS, render=render, sampling=sampling, **settings)


def run_all(collector: Collector, units: Sequence[Unit]) -> list[Report]:
    """What a driver does: hand out a unit when asked for one, until everything is back."""
    left, held, reports = list(units), list[str](), list[Report]()
    wants = True
    while left or held:
        assert len(reports) < 100, "the collector makes no progress"
        new = left.pop(0) if wants and left else None
        report = collector.work(held, new, bool(left))
        held += [new.unit_id] if new else []
        for done in (*report.finished, *report.failed):
            held.remove(done.unit_id)
        wants = report.wants_unit
        reports.append(report)
    return reports


def test_units_come_back_whole_and_equal_to_decoding_them_one_by_one(collector: Collector, tiny_llama: Target) -> None:
    units = [unit("a", 3, 5, 4), unit("b", 9, 2), unit("c", 7)]
    run_all(collector, units)
    together = collector.write.units  # type: ignore[union-attr]
    assert set(together) == {"a", "b", "c"}
    for one in units:
        alone = Shelf()
        for item in one.items:
            run_all(make_collector(tiny_llama, alone), [Unit(item.sequence_id, (item,))])
        records, rounds = together[one.unit_id]
        assert [record.sequence_id for record in records] == [item.sequence_id for item in one.items]
        for record in records:
            assert record.output_token_ids == alone.units[record.sequence_id][0][0].output_token_ids
            assert len(record.output_token_ids) == 6
            indices = [entry.round_index for entry in rounds if entry.sequence_id == record.sequence_id]
            assert indices == list(range(record.num_rounds))


def test_a_slot_that_falls_free_at_a_units_tail_is_filled_from_the_next_unit(collector: Collector) -> None:
    first = collector.work([], unit("a", 3, 3, 3), has_more=True)
    assert first.wants_unit  # the third sequence decodes alone: a slot is free
    assert first.finished == ()
    second = collector.work(["a"], unit("b", 3), has_more=False)
    assert [done.unit_id for done in second.finished] == ["a"]
    third = collector.work(["b"], None, has_more=False)
    assert [done.unit_id for done in third.finished] == ["b"]


def test_without_further_units_a_free_slot_does_not_interrupt_the_slice(collector: Collector) -> None:
    report = collector.work([], unit("a", 3, 3, 3), has_more=False)
    assert [done.unit_id for done in report.finished] == ["a"]


def test_a_slice_ends_when_its_time_is_over(tiny_llama: Target, shelf: Shelf) -> None:
    collector = make_collector(tiny_llama, shelf, slice_s=0.0)
    reports = run_all(collector, [unit("a", 3, 3)])
    assert len(reports) > 2
    assert sum(report.progress.num_tokens for report in reports) == 12
    assert sum(report.progress.num_sequences for report in reports) == 2


def test_a_sequence_whose_rounds_are_not_all_recorded_becomes_an_error_row(
    collector: Collector, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, numbers = engine_module._records, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(numbers) == 0:
            raise MemoryError("no room")
        return honest(*arguments)

    monkeypatch.setattr(engine_module, "_records", failing)
    run_all(collector, [unit("m", 3, *[4] * SLOTS)])
    records, rounds = shelf.units["m"]
    missing = "1 of 5 rounds could not be recorded (MemoryError: no room)"
    assert [record.error for record in records] == [missing] * SLOTS + [None]
    assert len(rounds) == 4 * SLOTS + 5


def test_what_cannot_be_decoded_becomes_an_error_row_with_its_reason(collector: Collector, shelf: Shelf) -> None:
    mixed = Unit("m", (*unit("m", 3, 0, 64).items, replace(unit("n", 3).items[0], error="not JSON")))
    (report,) = run_all(collector, [mixed])
    records, _ = shelf.units["m"]
    assert [record.finish_reason for record in records] == ["length", "error", "error", "error"]
    assert [record.error for record in records][3] == "not JSON"
    assert "empty" in str(records[1].error)
    assert "leaves no room" in str(records[2].error)
    tally = report.finished[0].tally
    assert (tally.num_sequences, tally.num_errors, tally.num_tokens) == (4, 3, 6)
    assert (tally.num_rounds, tally.num_round_tokens, tally.mat) == (5, 5, 1.0)


def test_a_unit_of_bad_lines_alone_is_finished_at_once(collector: Collector, shelf: Shelf) -> None:
    (report,) = run_all(collector, [unit("a", 3, 3, error="not JSON")])
    assert report.finished[0].tally.num_errors == 2


def test_an_engine_that_fails_costs_the_units_in_hand_and_nothing_else(collector: Collector, shelf: Shelf) -> None:
    FragileEngine.fault = RuntimeError("shape mismatch")
    report = collector.work([], unit("a", 3, 3), has_more=False)
    assert [(failed.unit_id, failed.error) for failed in report.failed] == [("a", "RuntimeError: shape mismatch")]
    assert report.wants_unit
    run_all(collector, [unit("a", 3, 3), unit("b", 4)])  # the same unit again, on the same collector
    assert set(shelf.units) == {"a", "b"}
    assert all(record.finish_reason == "length" for record in shelf.units["a"][0])


def test_a_device_error_leaves_the_collector(collector: Collector) -> None:
    FragileEngine.fault = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        collector.work([], unit("a", 3, 3), has_more=False)


@pytest.mark.parametrize("fault", [OSError("disk full"), ModuleNotFoundError("no module of that name")])
def test_a_unit_that_cannot_be_written_fails_alone_and_says_why(
    collector: Collector, shelf: Shelf, fault: Exception
) -> None:
    shelf.fault = fault
    report = collector.work([], unit("a", 3), has_more=False)
    assert [failed.error for failed in report.failed] == [f"{type(fault).__name__}: {fault}"]
    shelf.fault = None
    run_all(collector, [unit("b", 3)])
    assert set(shelf.units) == {"b"}


@pytest.mark.parametrize(("number", "is_full"), [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EIO, False)])
def test_a_full_or_read_only_disk_is_told_apart(collector: Collector, shelf: Shelf, number: int, is_full: bool) -> None:
    shelf.fault = OSError(number, os.strerror(number))
    report = collector.work([], unit("a", 3), has_more=False)
    assert [failed.is_disk_full for failed in report.failed] == [is_full]


def test_units_that_a_restart_has_lost_are_reported_as_unknown(collector: Collector) -> None:
    report = collector.work(["lost", "gone"], unit("a", 3), has_more=False)
    assert report.unknown == ("lost", "gone")
    assert [done.unit_id for done in report.finished] == ["a"]


def test_without_a_writer_units_finish_without_files(tiny_llama: Target, shelf: Shelf) -> None:
    (report,) = run_all(make_collector(tiny_llama, shelf, write=None), [unit("a", 3)])
    assert report.finished[0].files == ()
    assert report.finished[0].tally.num_tokens == 6


def test_every_sequence_has_its_own_seed(tiny_llama: Target, shelf: Shelf) -> None:
    collector = make_collector(tiny_llama, shelf)
    collector.sampling = SamplingParams(max_new_tokens=6, temperature=1.0, ignore_eos=True)
    items = unit("a", 5, 5, 5).items
    run_all(
        collector, [Unit("a", tuple(replace(item, seed=seed) for item, seed in zip(items, (1, 2, 1), strict=True)))]
    )
    first, second, third = (record.output_token_ids for record in shelf.units["a"][0])
    assert first == third != second
    assert [record.seed for record in shelf.units["a"][0]] == [1, 2, 1]
    assert [record.sampling.seed for record in shelf.units["a"][0]] == [1, 2, 1]


def test_an_answer_whose_dense_rounds_fail_costs_its_neighbours_nothing(tiny_llama: Target, shelf: Shelf) -> None:
    def dense(record: SequenceRecord) -> list[RoundRecord]:
        if record.sequence_id == "a-1":
            raise RuntimeError("no such row")
        return []

    (report,) = run_all(make_collector(tiny_llama, shelf, dense=dense), [unit("a", 3, 4, 5)])
    assert not report.failed
    errors = [record.error for record in shelf.units["a"][0]]
    assert errors == [None, "its dense rounds could not be made (RuntimeError: no such row)", None]
    assert all(len(record.output_token_ids) > 0 for record in shelf.units["a"][0]), "the answer itself is kept"


def test_a_unit_without_any_dense_rounds_has_failed(tiny_llama: Target, shelf: Shelf) -> None:
    def dense(record: SequenceRecord) -> list[RoundRecord]:
        raise RuntimeError("no such kernel")

    (report,) = run_all(make_collector(tiny_llama, shelf, dense=dense), [unit("a", 3, 4)])
    (failed,) = report.failed
    assert failed.error == "no dense rounds could be made (RuntimeError: no such kernel)"
    assert list(report.finished) == [] and shelf.units == {}
    (kept,) = run_all(make_collector(tiny_llama, shelf, dense=dense), [unit("b", 5)])
    assert len(kept.finished) == 1 and not kept.failed  # of a single sequence it may be the fault


def test_a_device_that_fails_in_dense_rounds_leaves_the_collector(tiny_llama: Target, shelf: Shelf) -> None:
    def dense(record: SequenceRecord) -> list[RoundRecord]:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        run_all(make_collector(tiny_llama, shelf, dense=dense), [unit("a", 3)])


def test_dense_rounds_follow_the_decoded_ones_of_their_sequence(tiny_llama: Target, shelf: Shelf) -> None:
    asked: list[str] = []

    def dense(record: SequenceRecord) -> list[RoundRecord]:
        asked.append(record.sequence_id)
        return []

    mixed = Unit("m", (*unit("m", 3, 4).items, *unit("bad", 3, error="not JSON").items))
    run_all(make_collector(tiny_llama, shelf, dense=dense), [mixed])
    assert sorted(asked) == ["m-0", "m-1"]
