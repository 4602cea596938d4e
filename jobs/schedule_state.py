"""ScheduleState: what a scheduler has done and still means to do, in one SQLite file that survives it.

An attempt is written down before the cluster hears of it. Whoever reads the file after a crash finds either the intent
(and may repeat it, since the submission id is fixed by target, tick and attempt) or the outcome.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, fields, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from graft_dist.errors import ConfigError

VERSION = 1
_TABLES = """
CREATE TABLE attempts (
    target TEXT NOT NULL, tick TEXT NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL, detail TEXT NOT NULL,
    exit_code INTEGER, not_before TEXT NOT NULL, ended TEXT, PRIMARY KEY (target, tick, attempt)
) STRICT;
CREATE TABLE watermarks (target TEXT PRIMARY KEY, tick TEXT NOT NULL) STRICT;
"""


class Status(StrEnum):
    """Where an attempt stands; the first three are open."""

    waiting = "waiting"  # to be submitted, not before its time
    submitting = "submitting"  # the cluster may or may not have heard of it
    submitted = "submitted"  # the cluster has it
    succeeded = "succeeded"
    failed = "failed"
    stopped = "stopped"  # by somebody, who will have had a reason
    yielded = "yielded"  # the job found another run of its target at work and left
    lost = "lost"  # the cluster no longer knows the job
    skipped = "skipped"  # an earlier run was still going
    missed = "missed"  # too late to be made up for
    superseded = "superseded"  # the next tick came before the retry


OPEN = (Status.waiting, Status.submitting, Status.submitted)


@dataclass(frozen=True)
class Attempt:
    """One attempt at one tick. All times are UTC."""

    target: str  # slug
    tick: datetime
    attempt: int  # 0 is the first
    status: Status
    detail: str  # why, for people; may be empty
    exit_code: int | None
    not_before: datetime  # the tick itself, or the end of a pause after a failure
    ended: datetime | None  # when the scheduler learned of the end

    @property
    def submission_id(self) -> str:
        """The job's id: the same for everybody who submits this attempt, so that the cluster refuses a second one."""
        return submission_id(self.target, self.tick, self.attempt)

    def closed(self, status: Status, now: datetime, detail: str = "", exit_code: int | None = None) -> Attempt:
        """The same attempt at its end."""
        return replace(self, status=status, ended=now, detail=detail or self.detail, exit_code=exit_code)


def submission_id(target: str, tick: datetime, attempt: int) -> str:
    """Such as `retrain-smollm2-135m-20261201T0300Z`, with `-r1` for the first retry. `tick` is in UTC."""
    return f"retrain-{target}-{tick:%Y%m%dT%H%MZ}" + (f"-r{attempt}" if attempt else "")


class ScheduleState:
    """The open file; close it, or use it in a `with` statement. Raises `ConfigError` when it cannot be used."""

    def __init__(self, path: Path, is_read_only: bool = False) -> None:
        self.path = path
        if is_read_only and not path.is_file():
            raise ConfigError(f"{path}: no such file; `graft schedule run --state {path}` makes it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=30.0)
            found = self._database.execute("PRAGMA user_version").fetchone()[0]
            if found == 0 and not is_read_only:
                with self._database:
                    self._database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
                found = VERSION
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: cannot be used as the scheduler's state ({error})") from error
        if found != VERSION:
            self.close()
            raise ConfigError(f"{path}: holds a scheduler's state of version {found}, this program knows {VERSION}")

    def __enter__(self) -> ScheduleState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def watermark(self, target: str) -> datetime | None:
        """The last tick that was decided on, or None for a target that is new here."""
        row = self._database.execute("SELECT tick FROM watermarks WHERE target = ?", (target,)).fetchone()
        return None if row is None else datetime.fromisoformat(row[0])

    def write(self, *attempts: Attempt, watermark: datetime | None = None, target: str | None = None) -> None:
        """Put attempts down, and move the watermark of `target`, all or nothing."""
        with self._database:
            for attempt in attempts:
                self._database.execute(
                    "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [_stored(getattr(attempt, field.name)) for field in fields(Attempt)],
                )
            if watermark is not None:
                self._database.execute("INSERT OR REPLACE INTO watermarks VALUES (?, ?)", (target, _stored(watermark)))

    def open_attempts(self, target: str) -> list[Attempt]:
        """What still has to be submitted or followed, oldest first."""
        return [attempt for attempt in self.attempts(target) if attempt.status in OPEN]

    def attempts(self, target: str, limit: int | None = None) -> list[Attempt]:
        """The last `limit` attempts (default: all), oldest first."""
        with closing(
            self._database.execute(
                "SELECT * FROM attempts WHERE target = ? ORDER BY tick DESC, attempt DESC LIMIT ?",
                (target, -1 if limit is None else limit),
            )
        ) as rows:
            return [_attempt(row) for row in rows][::-1]


def _stored(value: object) -> object:
    return value.isoformat(timespec="seconds") if isinstance(value, datetime) else value


def _attempt(row: tuple[str, str, int, str, str, int | None, str, str | None]) -> Attempt:
    target, tick, number, status, detail, exit_code, not_before, ended = row
    return Attempt(
        target=target,
        tick=datetime.fromisoformat(tick),
        attempt=number,
        status=Status(status),
        detail=detail,
        exit_code=exit_code,
        not_before=datetime.fromisoformat(not_before),
        ended=None if ended is None else datetime.fromisoformat(ended),
    )
