"""A job list in memory that keeps the contract of `JobQueue`, as the tests of the real one show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jobs.job_queue import Job, JobState, QueueUnavailable


class FakeQueue:
    """Jobs run until a test says otherwise; `log` has every accepted submission as (id, entry point)."""

    def __init__(self) -> None:
        self.is_away = False
        self.log: list[tuple[str, str]] = []
        self._jobs: dict[str, Job] = {}

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        if self.is_away:
            raise QueueUnavailable("nobody answers")
        if submission_id in self._jobs:
            return False
        self._jobs[submission_id] = Job(submission_id, JobState.running, None, "", dict(metadata))
        self.log.append((submission_id, entrypoint))
        return True

    def jobs(self) -> dict[str, Job]:
        if self.is_away:
            raise QueueUnavailable("nobody answers")
        return dict(self._jobs)

    @property
    def ids(self) -> list[str]:
        return [submission_id for submission_id, _ in self.log]

    def end(self, submission_id: str, state: JobState = JobState.succeeded, exit_code: int | None = 0) -> None:
        self._jobs[submission_id] = replace(self._jobs[submission_id], state=state, exit_code=exit_code)

    def fail(self, submission_id: str, exit_code: int | None = 1) -> None:
        self.end(submission_id, JobState.failed, exit_code)

    def forget_all(self) -> None:
        """What a restarted head node does."""
        self._jobs.clear()
