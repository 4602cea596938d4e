"""A pool, a log and an engine that run in one thread and die when they are told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graft_dist.errors import StoreError
from jobs.driver import NoWorkersLeft
from jobs.units import Unit, WorkItem
from jobs.work import Assignment, FailedUnit, FinishedUnit, Report, Tally, WorkerLost
from storage.trajectories import FileInfo, StoreFencedError


def make_units(number: int, size: int = 2) -> list[Unit]:
    return [
        Unit(
            f"u{unit}",
            tuple(WorkItem(f"s{unit}-{item}", f"p{unit}-{item}", "chat", ("?",), 0, None) for item in range(size)),
        )
        for unit in range(number)
    ]


def make_file(unit_id: str, attempt: int) -> FileInfo:
    return FileInfo(
        table="sequences",
        path=f"unit-{unit_id}-{attempt}.parquet",
        size=100,
        rows=2,
        sha256="",
        unit_id=unit_id,
        attempt=str(attempt),
        target="tiny",
        date="2026-01-01",
    )


@dataclass
class FakePool:
    """Workers that take one call per unit in hand. `fate` says what a call on a unit comes to: "ok", "error ...",
    "bad" (error rows), "kill" or "forget"."""

    num_workers: int
    fate: Callable[[str, int], str] = lambda unit_id, attempt: "ok"
    calls_per_unit: int = 1
    calls: list[tuple[int, tuple[str, ...], str | None, bool]] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hands: list[dict[str, int]] = [{} for _ in range(self.num_workers)]
        self._answers: deque[tuple[int, Report | WorkerLost]] = deque()
        self.is_gone = False

    def call(self, worker: int, held: Sequence[str], new: Assignment | None, has_more: bool) -> None:
        assert all(index != worker for index, _ in self._answers), "two calls in flight on one worker"
        self.calls.append((worker, tuple(held), None if new is None else new.unit.unit_id, has_more))
        hand = self.hands[worker]
        unknown = tuple(unit_id for unit_id in held if unit_id not in hand)
        if new is not None:
            hand[new.unit.unit_id] = self.calls_per_unit
            self.attempts[new.unit.unit_id] = new.attempt
        fates = {unit_id: self.fate(unit_id, self.attempts[unit_id]) for unit_id in hand}
        if "kill" in fates.values():
            hand.clear()
            self._answers.append((worker, WorkerLost("killed")))
            return
        if "forget" in fates.values():
            hand.clear()
            self._answers.append((worker, Report()))
            return
        finished, failed = [], []
        if new is None and has_more and len(hand) < 2:  # a free slot, and a unit to be had: it decodes nothing
            self._answers.append((worker, Report(unknown=unknown)))
            return
        for unit_id in list(hand):
            if fates[unit_id].startswith("error"):
                failed.append(FailedUnit(unit_id, fates[unit_id], is_disk_full="disk full" in fates[unit_id]))
                del hand[unit_id]
                continue
            hand[unit_id] -= 1
            if hand[unit_id] <= 0:
                tally = Tally(
                    num_sequences=2, num_tokens=20, num_rounds=9, num_round_tokens=18, num_rows=2, num_bytes=100
                )
                if fates[unit_id] == "bad":
                    tally = Tally(num_sequences=2, num_errors=2, num_rows=2, num_bytes=100)
                finished.append(FinishedUnit(unit_id, (make_file(unit_id, self.attempts[unit_id]),), tally))
                del hand[unit_id]
        report = Report(tuple(finished), tuple(failed), unknown, len(hand) < 2, Tally(num_sequences=2 * len(finished)))
        self._answers.append((worker, report))

    def wait(self, timeout_s: float) -> list[tuple[int, Report | WorkerLost]]:
        if self.is_gone:
            raise NoWorkersLeft("all gone")
        if not self._answers:
            return []
        worker, answer = self._answers.popleft()
        if isinstance(answer, WorkerLost):
            self._answers.append((worker, Report()))  # usable again
        return [(worker, answer)]


@dataclass
class FakeLog:
    """Keeps what was committed; `fence_at` is the commit that finds another driver's, `fail_at` one that cannot be."""

    fence_at: int | None = None
    fail_at: int | None = None
    batches: list[list[str]] = field(default_factory=list)

    def commit(self, files: Sequence[FileInfo]) -> None:
        if self.fence_at == len(self.batches):
            raise StoreFencedError("another driver has committed")
        if self.fail_at == len(self.batches):
            raise StoreError("the log cannot be written")
        self.batches.append([file.unit_id for file in files])

    @property
    def units(self) -> list[str]:
        return [unit_id for batch in self.batches for unit_id in batch]


class FakeClock:
    """Advances by `step_s` with every look."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.now = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now
