"""Collector: decodes units with one Engine and hands their rows to a writer.

The collector is a plain class without threads. Each call of `work` is one bounded slice: take a unit in, run rounds,
and come back as soon as a unit is complete, a slot is free for the next unit, or the slice is over. So a slot that
falls free at a unit's tail is filled by the next unit's prompts while the tail still decodes, and the driver hears
from every worker every few seconds.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from graft_dist.engine import SequenceEvent
from graft_dist.errors import GraftError
from graft_dist.rounds import RoundRecord, SequenceRecord, SequenceSummary
from graft_dist.sampling import SamplingParams
from jobs.units import Unit, WorkItem
from jobs.work import FailedUnit, FinishedUnit, Report, Tally
from storage.trajectories import FileInfo

FATAL_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""After one of these the process's device context is not to be trusted: the worker has to start again."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""After one of these no other unit can be written either."""


class Decoder(Protocol):
    """The part of `Engine` that a collector drives."""

    record_failure: str | None

    @property
    def record(self) -> bool | AbstractSet[str]: ...
    @property
    def num_live(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, prompt_token_ids: list[int], params: SamplingParams, sequence_id: str | None = None) -> str: ...
    def step(self) -> list[SequenceEvent]: ...


WriteUnit = Callable[[Unit, Sequence[SequenceRecord], Sequence[RoundRecord]], Sequence[FileInfo]]
"""Writes one finished unit's files, complete and flushed but not yet visible to readers."""

DenseRounds = Callable[[SequenceRecord], Sequence[RoundRecord]]
"""The teacher-forced rounds of one finished sequence."""


@dataclass
class _OpenSequence:
    item: WorkItem
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)


@dataclass
class _OpenUnit:
    unit: Unit
    num_left: int
    dense_error: str | None = None  # of the first sequence whose dense rounds could not be made
    num_without_dense: int = 0  # sequences whose dense rounds could not be made
    has_dense: bool = False  # those of another one could
    records: dict[str, SequenceRecord] = field(default_factory=dict)
    rounds: dict[str, list[RoundRecord]] = field(default_factory=dict)


@dataclass
class Collector:
    """Units in hand, decoded by one engine of `num_slots` slots; `make_engine` is called again when one has failed.

    `render` turns an item into prompt token ids and may refuse it with a `GraftError`; `sampling` is every sequence's,
    except for the seed; `write` is None when nothing is recorded.

    """

    make_engine: Callable[[], Decoder]
    num_slots: int
    render: Callable[[WorkItem], list[int]]
    sampling: SamplingParams
    write: WriteUnit | None
    dense: DenseRounds | None = None
    slice_s: float = 2.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._engine = self.make_engine()
        self._units: dict[str, _OpenUnit] = {}
        self._sequences: dict[str, tuple[str, _OpenSequence]] = {}  # sequence id -> unit id, sequence
        self._finished: list[FinishedUnit] = []
        self._failed: list[FailedUnit] = []
        self._progress = Tally()

    def work(self, held: Sequence[str], new: Unit | None, has_more: bool) -> Report:
        """One slice: add `new`, decode for a while, report.

        `held` names the units that the driver believes are in hand here; `has_more` says that another one is waiting.
        An error of the engine as a whole fails every unit in hand; only `FATAL_ERRORS` leave this method.

        """
        unknown = tuple(unit_id for unit_id in held if unit_id not in self._units)
        deadline = self.clock() + self.slice_s
        try:
            if new is not None:
                self._open(new)
            while not self._has_news(has_more):
                for event in self._engine.step():
                    self._take(event)
                if self.clock() >= deadline:
                    break
        except FATAL_ERRORS:
            raise
        except Exception as error:  # a fault anywhere in decoding must cost these units only, and must be reported
            self._fail_all(f"{type(error).__name__}: {error}")
        return self._report(unknown)

    @property
    def has_free_slot(self) -> bool:
        """True if another unit's prompts could start now."""
        return self._engine.num_waiting == 0 and self._engine.num_live < self.num_slots

    def _has_news(self, has_more: bool) -> bool:
        """True if the driver should hear from here before another round is run."""
        if self._finished or self._failed or not self._engine.has_work:
            return True
        return has_more and self.has_free_slot

    def _report(self, unknown: tuple[str, ...]) -> Report:
        report = Report(tuple(self._finished), tuple(self._failed), unknown, self.has_free_slot, self._progress)
        self._finished, self._failed, self._progress = [], [], Tally()
        return report

    def _open(self, unit: Unit) -> None:
        self._units[unit.unit_id] = _OpenUnit(unit, num_left=len(unit))
        for item in unit.items:
            self._start(unit.unit_id, item)

    def _start(self, unit_id: str, item: WorkItem) -> None:
        """Give one item to the engine; what cannot be decoded becomes an error row."""
        error, prompt_token_ids = item.error, []
        if error is None:
            try:
                prompt_token_ids = self.render(item)
                self._engine.add(prompt_token_ids, replace(self.sampling, seed=item.seed), item.sequence_id)
            except (GraftError, ValueError) as refused:
                error = str(refused)
        sequence = _OpenSequence(item, prompt_token_ids)
        if error is None:
            self._sequences[item.sequence_id] = (unit_id, sequence)
        else:
            self._close(unit_id, sequence, self._error_record(sequence, error))

    def _error_record(self, sequence: _OpenSequence, error: str) -> SequenceRecord:
        return SequenceRecord(
            sequence_id=sequence.item.sequence_id,
            prompt_id=sequence.item.prompt_id,
            task=sequence.item.task,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=[],
            finish_reason="error",
            sampling=replace(self.sampling, seed=sequence.item.seed),
            seed=sequence.item.seed,
            num_rounds=0,
            num_drafted=0,
            num_accepted=0,
            prefill_s=0.0,
            decode_s=0.0,
            error=error,
        )

    def _take(self, event: SequenceEvent) -> None:
        unit_id, sequence = self._sequences[event.sequence_id]
        sequence.output_token_ids += event.token_ids
        if event.round is not None:
            sequence.rounds.append(event.round)
        self._progress += Tally(
            num_tokens=len(event.token_ids),
            num_rounds=int(event.round is not None),
            num_round_tokens=0 if event.round is None else event.round.num_tokens,
        )
        if event.finish_reason is not None:
            del self._sequences[event.sequence_id]
            self._close(unit_id, sequence, self._record(sequence, event))

    def _record(self, sequence: _OpenSequence, event: SequenceEvent) -> SequenceRecord:
        assert event.finish_reason is not None
        summary, item = event.summary, sequence.item
        return SequenceRecord(
            sequence_id=item.sequence_id,
            prompt_id=item.prompt_id,
            task=item.task,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            finish_reason=event.finish_reason,
            sampling=replace(self.sampling, seed=item.seed),
            seed=item.seed,
            num_rounds=summary.num_rounds if summary else 0,
            num_drafted=summary.num_drafted if summary else 0,
            num_accepted=summary.num_accepted if summary else 0,
            prefill_s=summary.prefill_s if summary else 0.0,
            decode_s=summary.decode_s if summary else 0.0,
            error=event.error or self._missing_rounds(sequence, summary),
        )

    def _missing_rounds(self, sequence: _OpenSequence, summary: SequenceSummary | None) -> str | None:
        """Why a sequence's rounds are not all there; None if they are, or are not wanted."""
        if not self._engine.record or summary is None or len(sequence.rounds) == summary.num_rounds:
            return None
        return (
            f"{summary.num_rounds - len(sequence.rounds)} of {summary.num_rounds} rounds could not be recorded "
            f"({self._engine.record_failure})"
        )

    def _close(self, unit_id: str, sequence: _OpenSequence, record: SequenceRecord) -> None:
        """Keep a sequence's rows; with its last sequence the unit is written."""
        unit = self._units[unit_id]
        rounds = list(sequence.rounds)
        if self.dense is not None and record.error is None:
            try:
                made = self.dense(record)
                rounds += made
                unit.has_dense = unit.has_dense or bool(made)
            except FATAL_ERRORS:
                raise
            except Exception as error:  # of this sequence alone; its neighbours go on
                problem = f"{type(error).__name__}: {error}"
                record = replace(record, error=f"its dense rounds could not be made ({problem})")
                unit.dense_error = unit.dense_error or problem
                unit.num_without_dense += 1
        unit.records[record.sequence_id], unit.rounds[record.sequence_id] = record, rounds
        unit.num_left -= 1
        self._progress += Tally(num_sequences=1, num_errors=int(record.error is not None))
        if unit.num_left == 0:
            self._finish(unit)

    def _finish(self, unit: _OpenUnit) -> None:
        del self._units[unit.unit.unit_id]
        if unit.num_without_dense > 1 and not unit.has_dense:  # hardly the fault of these sequences
            self._failed.append(FailedUnit(unit.unit.unit_id, f"no dense rounds could be made ({unit.dense_error})"))
            return
        records = [unit.records[item.sequence_id] for item in unit.unit.items]
        rounds = [record for item in unit.unit.items for record in unit.rounds[item.sequence_id]]
        try:
            files = () if self.write is None else tuple(self.write(unit.unit, records, rounds))
        except Exception as error:  # whatever it is, it belongs to this unit, which is no longer in hand
            is_disk_full = isinstance(error, OSError) and error.errno in DISK_ERRORS
            self._failed.append(FailedUnit(unit.unit.unit_id, f"{type(error).__name__}: {error}", is_disk_full))
            return
        self._finished.append(FinishedUnit(unit.unit.unit_id, files, _tally(records, rounds, files)))

    def _fail_all(self, error: str) -> None:
        """Give up everything in hand, and the engine with it: after an error in mid-round its state means nothing."""
        self._failed += [FailedUnit(unit_id, error) for unit_id in self._units]
        self._sequences.clear()
        self._units.clear()
        self._engine = self.make_engine()


def _tally(records: Sequence[SequenceRecord], rounds: Sequence[RoundRecord], files: Sequence[FileInfo]) -> Tally:
    return Tally(
        num_sequences=len(records),
        num_errors=sum(record.error is not None for record in records),
        num_tokens=sum(len(record.output_token_ids) for record in records),
        num_rounds=sum(record.num_rounds for record in records),
        # The first token of a sequence comes from the prefill and belongs to no round.
        num_round_tokens=sum(max(len(record.output_token_ids) - 1, 0) for record in records),
        num_rows=sum(file.rows for file in files),
        num_bytes=sum(file.size for file in files),
    )
