"""What crosses between the driver and its workers: small frozen records, no tensors and no rows."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from jobs.units import Unit
from storage.trajectories import FileInfo


@dataclass(frozen=True)
class Tally:
    """Raw counters of recorded work; ratios are made on display only."""

    num_sequences: int = 0
    num_errors: int = 0  # of these sequences, the ones that are error rows
    num_tokens: int = 0  # output tokens
    num_rounds: int = 0  # decoded rounds, dense ones not counted
    num_round_tokens: int = 0  # tokens the decoded rounds committed
    num_rows: int = 0  # rows in both tables
    num_bytes: int = 0  # of the written files

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mat(self) -> float:
        """Mean acceptance length pooled over decoded rounds, the bonus token included; 0 before the first round."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True)
class Assignment:
    """One attempt at a unit."""

    unit: Unit
    attempt: int  # 1 for the first


@dataclass(frozen=True)
class FinishedUnit:
    """A unit whose files are complete and waiting to be committed."""

    unit_id: str
    files: tuple[FileInfo, ...]
    tally: Tally


@dataclass(frozen=True)
class FailedUnit:
    """A unit that raised in our own code."""

    unit_id: str
    error: str
    is_disk_full: bool = False  # or read-only: no unit can be written any more


@dataclass(frozen=True)
class Report:
    """A worker's answer to one call."""

    finished: tuple[FinishedUnit, ...] = ()
    failed: tuple[FailedUnit, ...] = ()
    unknown: tuple[str, ...] = ()  # units the driver believes this worker holds and it does not: it was restarted
    wants_unit: bool = True  # a slot is free
    progress: Tally = Tally()  # decoded since the last report; attempts that are lost later included


@dataclass(frozen=True)
class WorkerLost:
    """The call did not come back: the worker's process is gone, and with it everything it held."""

    reason: str
