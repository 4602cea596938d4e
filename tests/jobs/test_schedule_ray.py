"""The scheduler against a real Ray head: Ray itself refuses the second job of a tick, and says how each one ended."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from graft_dist.schedule import Schedule
from jobs import cli
from jobs.job_queue import Job, JobState, QueueUnavailable
from jobs.ray_head import RayHead, free_ports
from jobs.ray_jobs import RayJobs
from jobs.schedule import ScheduledTarget, Scheduler
from jobs.schedule_state import ScheduleState, Status

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TIMEOUT_S = 180.0
JOB = """import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.1)
sys.exit(int(pathlib.Path(sys.argv[1]).read_text()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is sent along with a job: one that waits for a file, and ends with the exit code in it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "job.py").write_text(JOB)
    return sent


def until_finished(queue: RayJobs, submission_id: str) -> Job:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        job = queue.jobs()[submission_id]
        if job.state.is_finished:
            return job
        time.sleep(0.2)
    pytest.fail(f"{submission_id} did not end")


def test_ray_refuses_the_second_job_of_a_tick_and_a_restarted_scheduler_follows_the_first(
    ray_head: RayHead, folder: Path, tmp_path: Path
) -> None:
    ending = tmp_path / "ending"
    schedule = Schedule(cron="0 * * * *", entrypoint=f"python job.py {ending}", backoff_minutes=1)
    target = ScheduledTarget("tiny", "tiny.yaml", schedule)
    first, retry = "retrain-tiny-20260501T1000Z", "retrain-tiny-20260501T1000Z-r1"
    queue = RayJobs(ray_head.dashboard_url, str(folder))

    def step(file: str, minute: int, hour: int = 10) -> list[tuple[str, Status]]:
        with ScheduleState(tmp_path / file) as state:  # a new process each time, as far as the scheduler can tell
            jobs = RayJobs(ray_head.dashboard_url, str(folder))
            Scheduler([target], state, jobs, print).step(datetime(2026, 5, 1, hour, minute, tzinfo=UTC))
            return [(attempt.submission_id, attempt.status) for attempt in state.attempts("tiny")]

    assert step("one", 59, hour=9) == step("two", 59, hour=9) == []
    assert step("one", 0) == [(first, Status.submitted)]
    assert not queue.submit(first, "python job.py /no/where", {})  # refused by Ray
    assert [name for name in queue.jobs() if name.startswith("retrain-tiny-")] == [first]
    assert step("one", 1) == [(first, Status.submitted)]
    assert step("two", 1)[0][1] == Status.skipped  # another scheduler sees the run in Ray's list

    ending.write_text("3")
    job = until_finished(queue, first)
    assert (job.state, job.exit_code, job.metadata["graft_retrain"]) == (JobState.failed, 3, "tiny")
    assert step("one", 2) == [(first, Status.failed), (retry, Status.waiting)]
    ending.write_text("0")
    assert step("one", 3)[1] == (retry, Status.submitted)
    assert until_finished(queue, retry).state == JobState.succeeded
    assert step("one", 4) == [(first, Status.failed), (retry, Status.succeeded)]


def test_a_submission_for_cron_is_followed_to_its_end_and_not_repeated(
    ray_head: RayHead, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = tmp_path / "ending"
    ending.write_text("75")
    now = datetime.now(UTC)
    schedule = {"cron": f"{now.minute} {now.hour} * * *", "entrypoint": f"python job.py {ending}"}
    config = tmp_path / "tiny.yaml"
    keys = {"target": "builtin:smollm2-135m", "drafter": "builtin:smollm2-135m", "schedule": schedule}
    config.write_text(json.dumps(keys))
    command = ["schedule", "submit", "--config", str(config), "--address", ray_head.dashboard_url]
    command += ["--working-dir", str(folder), "--wait", "--interval", "0.2"]
    assert cli.run(command) == 0  # another run of the target was at work, which is no failure
    assert "yielded, exit code 75" in capsys.readouterr().out
    assert cli.run(command) == 0
    assert "has yielded already" in capsys.readouterr().out


def test_a_cluster_that_is_not_there_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(QueueUnavailable):
        RayJobs(address).jobs()
    config = tmp_path / "tiny.yaml"
    keys = {"target": "builtin:smollm2-135m", "drafter": "builtin:smollm2-135m", "schedule": {"cron": "* * * * *"}}
    config.write_text(json.dumps(keys))
    assert cli.run(["schedule", "submit", "--config", str(config), "--address", address]) == 2
    shown = capsys.readouterr().err
    assert f"the Ray cluster at {address} does not take the request" in shown and shown.count("\n") == 1
