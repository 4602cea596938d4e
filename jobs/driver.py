"""The driver loop of a collection run: hands units to workers, commits what they finished, and decides how it ends.

It knows workers and the log through two small Protocols only, so that tests run it without Ray and without files. The
rules it owns:

* A worker is given a unit when it asks for one; each call to a worker is one bounded slice of work and answers with a
  `Report`. Nothing is retried below the driver: a lost worker's units are queued again whole, as a new attempt.
* Only this loop commits, in batches. A unit counts once it is committed, whatever happened before.
* A unit that was in hand when a worker was lost is a suspect: it is tried again alone, so that what kills the next
  worker is known. After `max_attempts` it is set aside and the run ends as partial.
* When the first units all fail with the same error the run stops: the fault is the run's, not theirs.
* When the store cannot be written any more, or no worker is left, the run is cut off, with everything committed that
  still can be. The other units were not tried: unlike those set aside they are for the next run.
* Asked to stop, it commits what is finished and leaves the rest for the next run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from graft_dist.errors import StoreError
from jobs.units import Unit
from jobs.work import Assignment, FinishedUnit, Report, Tally, WorkerLost
from storage.trajectories import FileInfo, StoreFencedError


class NoWorkersLeft(Exception):
    """Raised by a pool whose workers are all gone for good."""


class WorkerPool(Protocol):
    """What runs units. Workers are numbered; each has at most one call in flight."""

    @property
    def num_workers(self) -> int: ...

    def call(self, worker: int, held: Sequence[str], new: Assignment | None, has_more: bool) -> None:
        """Start one slice of work: `held` units are in hand, `new` is added; `has_more` units wait in the queue."""
        ...

    def wait(self, timeout_s: float) -> list[tuple[int, Report | WorkerLost]]:
        """The calls that came back within `timeout_s`. A lost worker reports again by itself once it is usable.

        Raises `NoWorkersLeft` when none ever will.

        """
        ...


class CommitLog(Protocol):
    """Where finished units become visible."""

    def commit(self, files: Sequence[FileInfo]) -> object:
        """Make `files` visible, all or none.

        Raises `StoreFencedError` when another driver of this run has committed, `StoreError` when the store cannot
        take them.
        """
        ...


class Ending(Enum):
    """How a run ended, with its exit code."""

    COMPLETE = 0
    FAILED_ALIKE = 2
    PARTIAL = 3  # some units were set aside
    CUT_OFF = 4  # the store cannot be written, or no worker is left: units wait for the next run
    FENCED = 75
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class DriverSettings:
    """The driver's limits."""

    commit_units: int = 8  # commit when this many units are finished ...
    commit_interval_s: float = 30.0  # ... or the first of them has waited this long
    max_attempts: int = 3  # then a unit is set aside
    fail_fast: int = 3  # this many units failing alike before any success end the run
    poll_s: float = 0.5  # longest wait before looking at the stop flag
    progress_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("commit_units", "max_attempts", "fail_fast"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Progress:
    """What is known while a run works; `num_sequences_done` counts sequences of units that finished in this run."""

    num_sequences_done: int
    num_sequences_total: int
    seen: Tally  # everything decoded, lost attempts included
    finished: Tally  # of finished units
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.seen.num_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the pace so far; None before the first sequence."""
        done = self.seen.num_sequences
        left = self.num_sequences_total - self.num_sequences_done
        return self.elapsed_s / done * left if done else None

    def line(self) -> str:
        """One line for people."""
        left = "unknown time left" if self.left_s is None else f"about {_duration(self.left_s)} left"
        return (
            f"{self.seen.num_sequences}/{self.num_sequences_total} sequences, {self.tokens_per_s:.1f} tokens/s, "
            f"MAT {self.finished.mat:.2f}, {self.finished.num_rows:,} rows and {self.finished.num_bytes / 1e6:.1f} MB "
            f"written, {left}"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True)
class SetAside:
    """A unit that was given up after its last attempt."""

    unit_id: str
    attempts: int
    reason: str


@dataclass(frozen=True)
class RunResult:
    """The end of a run."""

    ending: Ending
    committed: Tally
    num_units_committed: int
    num_units_left: int  # neither committed nor set aside
    set_aside: tuple[SetAside, ...]
    num_workers_lost: int
    elapsed_s: float
    message: str | None = None  # why the run ended, where the ending alone does not say it


@dataclass
class _Trial:
    """A unit's history in this run."""

    unit: Unit
    attempts: int = 0  # tries that ended badly
    is_suspect: bool = False


def _ignore(_: object) -> None:
    return None


@dataclass
class Driver:
    """One run over `units`.

    `stop_signal` gives the ending asked for from outside; `failpoint` is called at "unit-finished", "before-commit" and
    "after-commit", for tests that kill the process there.

    """

    pool: WorkerPool
    log: CommitLog
    units: Sequence[Unit]
    settings: DriverSettings = field(default_factory=DriverSettings)
    stop_signal: Callable[[], Ending | None] = lambda: None
    on_progress: Callable[[Progress], None] = _ignore
    on_event: Callable[[str], None] = _ignore
    failpoint: Callable[[str], None] = _ignore
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._trials = {unit.unit_id: _Trial(unit) for unit in self.units}
        self._queue: deque[str] = deque(self._trials)
        self._suspects: deque[str] = deque()
        self._hands: list[list[str]] = [[] for _ in range(self.pool.num_workers)]
        self._ready = set(range(self.pool.num_workers))  # workers without a call in flight that can take one
        self._wants = set(self._ready)  # workers whose last report asked for a unit
        self._pending: list[FinishedUnit] = []
        self._pending_since = 0.0
        self._set_aside: list[SetAside] = []
        self._num_committed = self._num_lost = self._losses_in_a_row = 0
        self._disk_error: str | None = None
        self._first_errors: dict[str, set[str]] = {}  # error -> units, until something succeeds
        self._seen = self._finished = self._committed = Tally()
        self._num_done = 0

    def run(self) -> RunResult:
        """Work until every unit is committed or set aside, or the run has to stop. Returns how it ended."""
        started = self._last_line = self.clock()
        try:
            try:
                ending, message = self._loop(started)
            except NoWorkersLeft as error:
                ending, message = Ending.CUT_OFF, str(error)
            self._commit()
        except StoreFencedError as error:
            ending, message = Ending.FENCED, str(error)
        except StoreError as error:
            ending, message = Ending.CUT_OFF, str(error)
        if ending is Ending.COMPLETE and self._set_aside:
            ending = Ending.PARTIAL
        left = len(self._trials) - self._num_committed - len(self._set_aside)
        return RunResult(
            ending,
            self._committed,
            self._num_committed,
            left,
            tuple(self._set_aside),
            self._num_lost,
            self.clock() - started,
            message,
        )

    def _loop(self, started: float) -> tuple[Ending, str | None]:
        while self._is_unfinished():
            asked = self.stop_signal()
            if asked is not None:
                return asked, "asked to stop"
            for worker in sorted(self._ready):
                self._start(worker)
            for worker, answer in self.pool.wait(self.settings.poll_s):
                self._take(worker, answer)
            if self._disk_error is not None:
                return Ending.CUT_OFF, f"the store cannot be written any more ({self._disk_error})"
            reason = self._hopeless()
            if reason is not None:
                return Ending.FAILED_ALIKE, reason
            self._commit_when_due()
            self._show(started)
        return Ending.COMPLETE, None

    def _is_unfinished(self) -> bool:
        return bool(self._queue or self._suspects or any(self._hands))

    # Handing out

    def _start(self, worker: int) -> None:
        held = tuple(self._hands[worker])
        unit_id = self._next_for(worker)
        if unit_id is None and not held:
            return
        new = None
        if unit_id is not None:
            trial = self._trials[unit_id]
            new = Assignment(trial.unit, trial.attempts + 1)
            self._hands[worker].append(unit_id)
        self._ready.discard(worker)
        self._wants.discard(worker)
        alone = any(self._trials[held_id].is_suspect for held_id in self._hands[worker])
        # Suspects do not count: this worker's hand is not empty, so it could not be given one, and a worker that is
        # told of more comes back at once when it has a free slot. It would never get on with what it holds.
        self.pool.call(worker, held, new, bool(self._queue) and not alone)

    def _next_for(self, worker: int) -> str | None:
        hand = self._hands[worker]
        if worker not in self._wants or any(self._trials[unit_id].is_suspect for unit_id in hand):
            return None
        if not hand and self._suspects:
            return self._suspects.popleft()
        return self._queue.popleft() if self._queue else None

    # Taking back

    def _take(self, worker: int, answer: Report | WorkerLost) -> None:
        if isinstance(answer, WorkerLost):
            self._lose(worker, answer.reason)
            return
        self._ready.add(worker)
        if answer.wants_unit:
            self._wants.add(worker)
        self._seen += answer.progress
        for finished in answer.finished:
            self._finish(worker, finished)
        for failed in answer.failed:
            if failed.is_disk_full:
                self._disk_error = failed.error
            elif self._release(worker, failed.unit_id):
                self._first_errors.setdefault(failed.error, set()).add(failed.unit_id)
                self._fail(failed.unit_id, failed.error)
        for unit_id in answer.unknown:
            if self._release(worker, unit_id):
                self._fail(unit_id, "its worker was restarted")

    def _release(self, worker: int, unit_id: str) -> bool:
        """Take a unit out of a worker's hand; False if it is not there (a late answer)."""
        if unit_id not in self._hands[worker]:
            return False
        self._hands[worker].remove(unit_id)
        return True

    def _finish(self, worker: int, finished: FinishedUnit) -> None:
        if not self._release(worker, finished.unit_id):
            return
        self.failpoint("unit-finished")
        if not self._pending:
            self._pending_since = self.clock()
        self._pending.append(finished)
        self._finished += finished.tally
        self._num_done += finished.tally.num_sequences
        self._losses_in_a_row = 0

    def _lose(self, worker: int, reason: str) -> None:
        self._num_lost += 1
        self._losses_in_a_row += 1
        self._ready.discard(worker)
        self._wants.discard(worker)
        lost, self._hands[worker] = self._hands[worker], []
        self.on_event(f"worker {worker} was lost ({reason}); {len(lost)} of its units go back into the queue")
        for unit_id in lost:
            self._fail(unit_id, f"worker lost: {reason}")

    def _fail(self, unit_id: str, reason: str) -> None:
        trial = self._trials[unit_id]
        trial.attempts += 1
        trial.is_suspect = True
        if trial.attempts < self.settings.max_attempts:
            self._suspects.append(unit_id)
            return
        self._set_aside.append(SetAside(unit_id, trial.attempts, reason))
        self.on_event(f"unit {unit_id} is set aside after {trial.attempts} attempts: {reason}")

    def _hopeless(self) -> str | None:
        """Why no unit will ever succeed, once that is clear."""
        if self._finished.num_sequences > self._finished.num_errors:  # units of bad lines alone prove nothing
            return None
        for error, unit_ids in self._first_errors.items():
            if len(unit_ids) >= self.settings.fail_fast:
                return f"the first {len(unit_ids)} units all failed alike: {error}"
        if self._losses_in_a_row >= self.settings.fail_fast * self.settings.max_attempts:
            return f"{self._losses_in_a_row} workers were lost before any unit was finished"
        return None

    # Committing

    def _commit_when_due(self) -> None:
        if not self._pending:
            return
        waited = self.clock() - self._pending_since
        if len(self._pending) >= self.settings.commit_units or waited >= self.settings.commit_interval_s:
            self._commit()

    def _commit(self) -> None:
        if not self._pending:
            return
        batch, self._pending = self._pending, []
        self.failpoint("before-commit")
        self.log.commit([info for finished in batch for info in finished.files])
        self._num_committed += len(batch)
        for finished in batch:
            self._committed += finished.tally
        self.failpoint("after-commit")

    def _show(self, started: float) -> None:
        now = self.clock()
        if now - self._last_line < self.settings.progress_s:
            return
        self._last_line = now
        total = sum(len(unit) for unit in self.units)
        self.on_progress(Progress(self._num_done, total, self._seen, self._finished, now - started))
