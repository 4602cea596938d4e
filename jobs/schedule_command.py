"""`graft schedule`: the loop around `Scheduler`, its status, and the single submission for other schedulers."""

from __future__ import annotations

import fcntl
import json
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from graft_dist.config import load_config
from graft_dist.errors import ConfigError
from graft_dist.schedule import Schedule
from jobs.cluster import dashboard_address
from jobs.failure_hook import tell
from jobs.job_queue import JobQueue, JobState, QueueUnavailable
from jobs.schedule import ScheduledTarget, Scheduler, outcome, submit_once
from jobs.schedule_state import Attempt, ScheduleState, Status

MAX_SILENCES = 20
"""After so many unanswered questions in a row `--wait` no longer believes that the cluster will come back."""


def scheduled_targets(configs: Sequence[str]) -> list[ScheduledTarget]:
    """The targets of these configurations. Raises `ConfigError` for one without a schedule, and for one given twice."""
    found: dict[str, ScheduledTarget] = {}
    for config in configs:
        settings = load_config(config)
        if settings.schedule is None:
            raise ConfigError(f"{config}: has no schedule; add the key schedule with at least cron to it")
        if settings.slug in found:
            raise ConfigError(f"{config} and {found[settings.slug].config} are the same target, {settings.slug}")
        found[settings.slug] = ScheduledTarget(settings.slug, config, settings.schedule)
    return list(found.values())


def with_entrypoint(schedule: Schedule, entrypoint: str) -> Schedule:
    """The schedule with another command line, which has to keep the same rules."""
    try:
        return Schedule.model_validate(schedule.model_dump() | {"entrypoint": entrypoint})
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["ctx"]["error"]
        raise ConfigError(f"--entrypoint is {entrypoint!r}, {reason}") from error


def run_schedule(
    configs: Sequence[str], address: str | None, working_dir: str | None, state: Path, interval_s: float
) -> int:
    """Step until SIGTERM or Ctrl-C. Nothing is lost by stopping: the jobs go on, and the file remembers them."""
    targets = scheduled_targets(configs)
    queue = _ray_jobs(address, working_dir)
    stop = _StopEvent()
    with _only_one(state), ScheduleState(state) as opened:
        for target in targets:
            _say(f"{target.slug}: {target.schedule.cron} in {target.schedule.timezone}, {_next_run(target)}")
        loop(Scheduler(targets, opened, queue, _say, partial(tell, say=_say)), stop.wait, interval_s)
    _say("stopped; submitted jobs go on, and the next start follows them")
    return 0


def loop(scheduler: Scheduler, wait: Callable[[float], bool], interval_s: float) -> None:
    """Step, wait, and again, until `wait` says that it is enough. A cluster that is away is said once.

    So is a state file that cannot be written, or read, for a while: on a full disk, say.
    """
    trouble = ""
    while True:
        try:
            scheduler.step(datetime.now(UTC))
            if trouble:
                _say("the schedule goes on")
            trouble = ""
        except (QueueUnavailable, sqlite3.OperationalError, OSError) as error:
            if not trouble:
                what = f"{error}" if isinstance(error, QueueUnavailable) else f"the scheduler's state: {error}"
                _say(f"{what}; ticks are kept and made up for")
            trouble = str(error) or type(error).__name__
        except sqlite3.Error as error:
            raise ConfigError(f"the scheduler's state can no longer be used ({error})") from error
        if wait(interval_s):
            return


def show_status(configs: Sequence[str], state: Path, last: int, form: str) -> None:
    """Print what is next and what was."""
    targets = scheduled_targets(configs)
    with ScheduleState(state, is_read_only=True) as opened:
        rows = [_status(target, opened.attempts(target.slug, last)) for target in targets]
    if form == "json":
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['target']}  next run {row['next_run']}  ({row['cron']}, {row['timezone']})")
        for attempt in row["attempts"]:
            code = "" if attempt["exit_code"] is None else f"exit code {attempt['exit_code']}"
            notes = "  ".join(text for text in (code, attempt["detail"]) if text)
            print(f"  {attempt['tick']}  {attempt['status']:<10}  {attempt['submission_id']}  {notes}".rstrip())
        if not row["attempts"]:
            print("  nothing yet")


def submit(
    config: str, address: str | None, working_dir: str | None, entrypoint: str | None, wait: bool, interval_s: float
) -> int:
    """Submit the last tick's job, and with `wait` follow it; 0 unless it failed."""
    (target,) = scheduled_targets([config])
    if entrypoint is not None:
        target = replace(target, schedule=with_entrypoint(target.schedule, entrypoint))
    queue = _ray_jobs(address, working_dir)
    done = submit_once(target, queue, datetime.now(UTC))
    _say(done.message)
    if done.submission_id is None or not wait:
        return 1 if done.is_failed else 0
    return follow(queue, done.submission_id, threading.Event().wait, interval_s)


def follow(queue: JobQueue, submission_id: str, wait: Callable[[float], object], interval_s: float) -> int:
    """Ask until the job is at its end; 0 if it succeeded, or left the work to another run of its target."""
    silences = 0
    while True:
        try:
            job = queue.jobs().get(submission_id)
        except QueueUnavailable as error:
            silences += 1
            if silences == MAX_SILENCES:
                _say(f"{submission_id} cannot be followed any longer: {error}")
                return 1
        else:
            silences = 0
            if job is None:
                _say(f"{submission_id} is lost: the cluster no longer knows it")
                return 1
            if job.state.is_finished:
                status = outcome(job)
                code = "" if job.exit_code is None else f", exit code {job.exit_code}"
                _say(f"{submission_id} {status}{code}" + (f": {job.message}" if job.message else ""))
                return 0 if job.state == JobState.succeeded or status == Status.yielded else 1
        wait(interval_s)


def _ray_jobs(address: str | None, working_dir: str | None) -> JobQueue:
    if working_dir is not None and "://" not in working_dir and not Path(working_dir).is_dir():
        raise ConfigError(f"--working-dir {working_dir}: no such folder")
    url = dashboard_address(address)
    from jobs.ray_jobs import RayJobs  # Ray takes a second to import; mistakes above are said before that

    return RayJobs(url, working_dir)


def _status(target: ScheduledTarget, attempts: list[Attempt]) -> dict[str, Any]:
    schedule = target.schedule
    local = next(schedule.ticks(datetime.now(UTC))).astimezone(ZoneInfo(schedule.timezone))
    return {
        "target": target.slug,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "next_run": local.isoformat(timespec="minutes"),
        "attempts": [
            {
                "tick": f"{attempt.tick:%Y-%m-%dT%H:%MZ}",
                "attempt": attempt.attempt,
                "status": attempt.status.value,
                "submission_id": attempt.submission_id,
                "exit_code": attempt.exit_code,
                "detail": attempt.detail,
            }
            for attempt in attempts
        ],
    }


def _next_run(target: ScheduledTarget) -> str:
    tick = next(target.schedule.ticks(datetime.now(UTC)))
    return f"next run {tick.astimezone(ZoneInfo(target.schedule.timezone)).isoformat(timespec='minutes')}"


class _StopEvent(threading.Event):
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        super().__init__()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())


@contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """Hold the lock beside the state file. The system drops it with the process, however that ends."""
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        file = state.with_name(state.name + ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{state}: cannot be used as the scheduler's state ({error})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{state}: another scheduler is at work with this file") from None
        yield


def _say(line: str) -> None:
    with suppress(OSError):  # where the output goes to a full disk, the schedule goes on all the same
        print(line, flush=True)
