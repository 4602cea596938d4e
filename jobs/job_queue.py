"""JobQueue: where a scheduler hands its jobs in, and what it can learn of them. `RayJobs` is the real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from graft_dist.errors import GraftError


class QueueUnavailable(GraftError):
    """The cluster does not answer, or refuses this client; nothing is known of the jobs."""


class JobState(StrEnum):
    """Where a job stands; the last three are for good."""

    pending = "pending"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    stopped = "stopped"

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change any more."""
        return self in (JobState.succeeded, JobState.failed, JobState.stopped)


@dataclass(frozen=True)
class Job:
    """What the cluster says of one job."""

    submission_id: str
    state: JobState
    exit_code: int | None  # of the driver; None while it runs, and when it was killed
    message: str
    metadata: Mapping[str, str]


class JobQueue(Protocol):
    """A cluster's job list. Both methods raise `QueueUnavailable`."""

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        """Hand a job in; False if the id is taken already, and then nothing was started."""
        ...

    def jobs(self) -> dict[str, Job]:
        """Every job the cluster remembers, by submission id. A cluster that was restarted remembers none."""
        ...
