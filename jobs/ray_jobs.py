"""RayJobs: the job list of a Ray cluster, as a `JobQueue`, over the HTTP address of its dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from jobs.cluster import without_addresses
from jobs.job_queue import Job, JobState, QueueUnavailable

_STATES = {
    JobStatus.PENDING: JobState.pending,
    JobStatus.RUNNING: JobState.running,
    JobStatus.SUCCEEDED: JobState.succeeded,
    JobStatus.FAILED: JobState.failed,
    JobStatus.STOPPED: JobState.stopped,
}


def job_client(address: str) -> JobSubmissionClient:
    """Ray's client of the jobs at `address`, whatever the environment says."""
    with without_addresses():
        return JobSubmissionClient(address)


class RayJobs:
    """Connects when it is first asked, and anew after the cluster did not answer.

    `working_dir` is sent along with each job, as `ray job submit --working-dir` does; without it a job runs in the
    installation that the cluster has.
    """

    def __init__(self, address: str, working_dir: str | None = None) -> None:
        self.address = address
        self._runtime_env: dict[str, Any] = {} if working_dir is None else {"working_dir": working_dir}
        self._client: JobSubmissionClient | None = None

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        """See `JobQueue`. Asks for no entry point resources: a job that waits for them can hardly be stopped."""
        try:
            self._connected().submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=dict(self._runtime_env),
                metadata=dict(metadata),
            )
        except (OSError, RuntimeError, ValueError, AuthenticationError) as error:  # the third: no folder
            if f"{submission_id} already exists" in str(error):
                return False
            raise self._unavailable(error) from error
        return True

    def jobs(self) -> dict[str, Job]:
        """See `JobQueue`. Drivers that connected by themselves have no submission id and are left out."""
        try:
            listed = self._connected().list_jobs()
        except (OSError, RuntimeError, AuthenticationError) as error:
            raise self._unavailable(error) from error
        return {
            job.submission_id: Job(
                submission_id=job.submission_id,
                state=_STATES[JobStatus(job.status)],
                exit_code=job.driver_exit_code,
                message=" ".join((job.message or "").split()),
                metadata=job.metadata or {},
            )
            for job in listed
            if job.submission_id
        }

    def _connected(self) -> JobSubmissionClient:
        if self._client is None:
            self._client = job_client(self.address)
        return self._client

    def _unavailable(self, error: Exception) -> QueueUnavailable:
        self._client = None
        reason = " ".join(str(error).split())
        return QueueUnavailable(f"the Ray cluster at {self.address} does not take the request: {reason[:300]}")
