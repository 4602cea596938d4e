"""Scheduler: submits each target's retraining job at its ticks, follows it, and tries again after a failure.

It never trains. One `step` looks at the clock it is given and at the cluster's job list, and does what is due; a step
that was cut off anywhere is simply taken again, also by another process. What makes that safe is the submission id,
which is fixed by target, tick and attempt: the cluster refuses a second job of the same id. Two schedulers with
different state files, or a person, may still start two different runs of one target; the job's own lease sees to that.

                       submit            cluster says
    waiting ──► submitting ──► submitted ──────────────► succeeded | yielded | stopped | failed | lost
       ▲                                                                            │        │
       └────────────────── next attempt, after a pause ◄────────────────────────────┴────────┘
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from graft_dist.schedule import Schedule
from jobs.job_queue import Job, JobQueue, JobState, QueueUnavailable
from jobs.schedule_state import Attempt, ScheduleState, Status, submission_id

TARGET_KEY = "graft_retrain"
"""Metadata of a submitted job: the slug of the target that it trains."""
TICK_KEY = "graft_tick"

EXIT_REFUSED = 2
"""The job's arguments or configuration cannot work: another attempt would say the same."""
EXIT_LEASE_HELD = 75
"""Another run of the same target is at work."""


@dataclass(frozen=True)
class ScheduledTarget:
    """One target with its schedule, under the configuration's path or name as the job will be given it."""

    slug: str
    config: str
    schedule: Schedule


def entrypoint(target: ScheduledTarget) -> str:
    """The command line of the target's job."""
    return target.schedule.command(target.config)


def metadata(target: ScheduledTarget, tick: datetime) -> dict[str, str]:
    """What the job carries along, by which later steps find it again."""
    return {TARGET_KEY: target.slug, TICK_KEY: tick.isoformat(timespec="minutes")}


def outcome(job: Job) -> Status:
    """What a finished job came to."""
    if job.state == JobState.succeeded:
        return Status.succeeded
    if job.state == JobState.stopped:
        return Status.stopped
    return Status.yielded if job.exit_code == EXIT_LEASE_HELD else Status.failed


def running(target: ScheduledTarget, jobs: dict[str, Job]) -> Job | None:
    """An unfinished job that trains this target, whoever submitted it."""
    found = (job for job in jobs.values() if job.metadata.get(TARGET_KEY) == target.slug and not job.state.is_finished)
    return next(found, None)


class Scheduler:
    """Drives several targets. `say` is told what happens, a line each.

    `alert` is called, once and at most once, with a tick's last attempt when the tick has come to nothing: the job
    failed or was lost and is not tried again, or nobody could act on the tick in time. It must not raise.
    """

    def __init__(
        self,
        targets: Sequence[ScheduledTarget],
        state: ScheduleState,
        queue: JobQueue,
        say: Callable[[str], None],
        alert: Callable[[ScheduledTarget, Attempt], None] = lambda *_: None,
    ) -> None:
        self._targets = targets
        self._state = state
        self._queue = queue
        self._say = say
        self._alert = alert

    def step(self, now: datetime) -> None:
        """Do what is due at `now`. Raises `QueueUnavailable`; a later step makes up for it then.

        What keeps one target's job from being submitted does not hold up the others.
        """
        now = now.astimezone(UTC).replace(microsecond=0)
        for target in self._targets:
            if self._state.watermark(target.slug) is None:  # also while the cluster is away: from now on ticks count
                self._state.write(watermark=now, target=target.slug)
        jobs, unavailable = self._queue.jobs(), None
        for target in self._targets:
            try:
                for attempt in self._state.open_attempts(target.slug):
                    self._follow(target, attempt, jobs, now)
                self._decide(target, jobs, now)
            except QueueUnavailable as error:
                unavailable = error
        if unavailable is not None:
            raise unavailable

    def _follow(self, target: ScheduledTarget, attempt: Attempt, jobs: dict[str, Job], now: datetime) -> None:
        job = jobs.get(attempt.submission_id)
        if attempt.status == Status.waiting:
            if now - attempt.not_before > target.schedule.max_lateness:
                self._miss(target, attempt, now, "it could not be tried again in time")
            elif attempt.not_before <= now:
                self._retry(target, attempt, jobs, now)
        elif job is None and attempt.status == Status.submitting:
            self._submit_late(target, attempt, now)
        elif job is None:
            self._end(target, attempt.closed(Status.lost, now, "the cluster no longer knows the job"), now)
        elif job.state.is_finished:
            self._end(target, attempt.closed(outcome(job), now, job.message, job.exit_code), now)
        elif attempt.status != Status.submitted:
            self._state.write(replace(attempt, status=Status.submitted))

    def _decide(self, target: ScheduledTarget, jobs: dict[str, Job], now: datetime) -> None:
        """Find what has come due since the watermark: one run stands for all ticks that were missed."""
        watermark = self._state.watermark(target.slug)
        assert watermark is not None
        due = target.schedule.due(watermark, now)
        ready = [tick for tick in due if tick + target.schedule.delay(target.slug, tick) <= now]
        if not ready:
            self._give_up_missed(target, watermark, now)
            return
        tick = ready[-1]
        num_earlier = due.index(tick)
        detail = f"stands for {num_earlier} earlier ticks too" if num_earlier else ""
        attempt = Attempt(target.slug, tick, 0, Status.submitting, detail, None, tick, None)
        busy = self._busy(target, jobs)
        if busy is not None:
            attempt = self._skipped(attempt, busy, now)
        superseded = [
            waiting.closed(Status.superseded, now, "the next tick came before the retry")
            for waiting in self._state.open_attempts(target.slug)
            if waiting.status == Status.waiting
        ]
        self._state.write(*superseded, attempt, watermark=tick, target=target.slug)
        for retry in superseded:
            self._alert(target, retry)
        if busy is None:
            self._submit(target, attempt)

    def _busy(self, target: ScheduledTarget, jobs: dict[str, Job]) -> str | None:
        """The id of a run of this target that may still be at work: one of ours, or another in the cluster's list."""
        ours = [one for one in self._state.open_attempts(target.slug) if one.status != Status.waiting]
        if ours:
            return ours[0].submission_id
        listed = running(target, jobs)
        return None if listed is None else listed.submission_id

    def _skipped(self, attempt: Attempt, other: str, now: datetime) -> Attempt:
        self._say(f"{attempt.target}: skipped the tick {_shown(attempt.tick)}, {other} is still at work")
        return attempt.closed(Status.skipped, now, f"{other} was still at work")

    def _give_up_missed(self, target: ScheduledTarget, watermark: datetime, now: datetime) -> None:
        oldest = now - target.schedule.max_lateness
        first = next(target.schedule.ticks(watermark), None)
        if first is not None and first <= oldest:
            detail = f"nobody could act on it within {target.schedule.max_lateness_minutes} minutes"
            missed = Attempt(target.slug, first, 0, Status.missed, detail, None, first, now)
            self._state.write(missed, watermark=oldest, target=target.slug)
            self._say(f"{target.slug}: gave up the tick {_shown(first)}: {detail}")
            self._alert(target, missed)

    def _retry(self, target: ScheduledTarget, attempt: Attempt, jobs: dict[str, Job], now: datetime) -> None:
        busy = self._busy(target, jobs)
        if busy is not None:
            self._state.write(self._skipped(attempt, busy, now))
            return
        self._state.write(replace(attempt, status=Status.submitting))
        self._submit(target, attempt)

    def _submit_late(self, target: ScheduledTarget, attempt: Attempt, now: datetime) -> None:
        """For an attempt that was decided on just before a crash, or before the cluster stopped answering."""
        if now - attempt.not_before > target.schedule.max_lateness:
            self._miss(target, attempt, now, "the cluster was away for too long")
        else:
            self._submit(target, attempt)

    def _miss(self, target: ScheduledTarget, attempt: Attempt, now: datetime, detail: str) -> None:
        missed = attempt.closed(Status.missed, now, detail)
        self._state.write(missed)
        self._say(f"{target.slug}: gave up {attempt.submission_id}: {detail}")
        self._alert(target, missed)

    def _submit(self, target: ScheduledTarget, attempt: Attempt) -> None:
        is_new = self._queue.submit(attempt.submission_id, entrypoint(target), metadata(target, attempt.tick))
        # A taken id is this very attempt, submitted before a crash or by another scheduler: followed all the same.
        self._state.write(replace(attempt, status=Status.submitted))
        self._say(f"{target.slug}: {'submitted' if is_new else 'found'} {attempt.submission_id}")

    def _end(self, target: ScheduledTarget, ended: Attempt, now: datetime) -> None:
        """Write the outcome down, and the next attempt with it if there is to be one."""
        schedule = target.schedule
        is_worth_it = ended.status == Status.lost or (ended.status == Status.failed and ended.exit_code != EXIT_REFUSED)
        line = f"{target.slug}: {ended.submission_id} {ended.status}"
        line += "" if ended.exit_code is None else f" (exit code {ended.exit_code})"
        if is_worth_it and ended.attempt + 1 < schedule.max_attempts:
            again = now + schedule.backoff(ended.attempt)
            number = ended.attempt + 1
            retry = Attempt(target.slug, ended.tick, number, Status.waiting, "", None, again, None)
            self._state.write(ended, retry)
            line += f", tries again at {_shown(again)}"
            self._say(line)
            return
        self._state.write(ended)
        self._say(line)
        if ended.status in (Status.failed, Status.lost):
            self._alert(target, ended)


@dataclass(frozen=True)
class Submission:
    """What `submit_once` did: the job to follow, or None and why not."""

    submission_id: str | None
    message: str
    is_failed: bool = False


def submit_once(target: ScheduledTarget, queue: JobQueue, now: datetime) -> Submission:
    """Submit the job of the last tick, for a scheduler that is not ours (cron, systemd, Kubernetes); keeps no state.

    What was tried for the tick is read from the cluster's job list. Lateness is that of the first attempt: whoever asks
    again after a run of hours has failed gets the next one. Raises `QueueUnavailable`.
    """
    now = now.astimezone(UTC)
    due = target.schedule.due(now - target.schedule.max_lateness, now)
    jobs = queue.jobs()
    tick = due[-1] if due else _last_submitted(target, jobs)
    if tick is None:
        return Submission(None, f"no tick of {target.slug} in the last {target.schedule.max_lateness_minutes} minutes")
    for attempt in range(target.schedule.max_attempts):
        name = submission_id(target.slug, tick, attempt)
        job = jobs.get(name)
        if job is None:
            if not due and next(target.schedule.ticks(tick)) <= now:
                last = submission_id(target.slug, tick, attempt - 1)
                return Submission(None, f"{last} has failed, and the tick after it is too late too", is_failed=True)
            busy = running(target, jobs)
            if busy is not None:
                return Submission(None, f"skipped the tick {_shown(tick)}, {busy.submission_id} is still at work")
            is_new = queue.submit(name, entrypoint(target), metadata(target, tick))
            return Submission(name, f"{'submitted' if is_new else 'found'} {name}")
        if not job.state.is_finished:
            return Submission(name, f"{name} is at work already")
        if outcome(job) != Status.failed:
            return Submission(None, f"{name} has {outcome(job)} already")
        if job.exit_code == EXIT_REFUSED:
            return Submission(None, f"{name} was refused (exit code {EXIT_REFUSED}): {job.message}", is_failed=True)
    return Submission(None, f"all {target.schedule.max_attempts} attempts at {_shown(tick)} failed", is_failed=True)


def _last_submitted(target: ScheduledTarget, jobs: dict[str, Job]) -> datetime | None:
    """The last tick of which the cluster knows the first attempt."""
    first = re.compile(re.escape(f"retrain-{target.slug}-") + r"(\d{8}T\d{4}Z)")
    ticks = [match[1] for match in map(first.fullmatch, jobs) if match]
    return datetime.strptime(max(ticks), "%Y%m%dT%H%MZ").replace(tzinfo=UTC) if ticks else None


def _shown(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
