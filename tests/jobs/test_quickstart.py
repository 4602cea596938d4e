"""Following a job's log, whatever the cluster answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from graft_dist.errors import GraftError
from jobs.quickstart import follow


@dataclass
class Client:
    """Answers as listed: a status, or an error; the log grows by a letter at each answer. The last one goes on."""

    answers: list[JobStatus | Exception]
    stopped: list[str] = field(default_factory=list)
    num_asked: int = 0

    def get_job_info(self, job: str) -> Any:
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status=answer)

    def get_job_logs(self, job: str) -> str:
        return "abcdefgh"[: self.num_asked]

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


def followed(client: Client, **options: Any) -> tuple[Any, str]:
    written: list[str] = []
    details = follow(cast(JobSubmissionClient, client), "one", poll_s=0.0, write=written.append, **options)
    return details, "".join(written)


def test_some_polls_may_fail() -> None:
    client = Client([JobStatus.RUNNING, ConnectionError("busy"), RuntimeError("503"), JobStatus.SUCCEEDED])
    details, written = followed(client)
    assert details.status == JobStatus.SUCCEEDED and written == "abcd"


def test_a_cluster_that_is_gone_is_said() -> None:
    client = Client([JobStatus.RUNNING, ConnectionError("nobody\nthere")])
    with pytest.raises(GraftError, match="the job one cannot be followed: nobody there"):
        followed(client)
    assert 10 < client.num_asked < 100


def test_a_job_that_takes_too_long_is_stopped() -> None:
    client = Client([JobStatus.RUNNING])
    with pytest.raises(GraftError, match="the job one is not over after 0 s and is stopped"):
        followed(client, timeout_s=0.0)
    assert client.stopped == ["one"]
