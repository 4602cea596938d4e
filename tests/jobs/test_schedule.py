"""The scheduler under a clock of the test's own and a job list in memory: each tick once, whatever goes wrong."""

from __future__ import annotations

import fcntl
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from graft_dist.errors import ConfigError
from graft_dist.schedule import Schedule
from jobs import cli
from jobs.job_queue import JobState, QueueUnavailable
from jobs.ray_head import free_ports
from jobs.schedule import ScheduledTarget, Scheduler, submit_once
from jobs.schedule_command import follow, loop, scheduled_targets, with_entrypoint
from jobs.schedule_state import Attempt, ScheduleState, Status
from tests.jobs.fake_queue import FakeQueue

ROOT = Path(__file__).resolve().parents[2]
HOURLY = ScheduledTarget("tiny", "tiny.yaml", Schedule(cron="0 * * * *", max_lateness_minutes=300))
FIRST = "retrain-tiny-20260501T1000Z"


def at(text: str) -> datetime:
    """10:15 of the day on which most tests play, or a whole date."""
    return datetime.fromisoformat(text if "-" in text else f"2026-05-01 {text}").replace(tzinfo=UTC)


class Bench:
    """A scheduler with its file, which can be killed and started again."""

    def __init__(self, folder: Path, *targets: ScheduledTarget) -> None:
        self.queue = FakeQueue()
        self.lines: list[str] = []
        self.alerts: list[tuple[str, str]] = []  # (job id, outcome)
        self._file = folder / "schedule.sqlite"
        self._targets = targets or (HOURLY,)
        self.start()

    def start(self) -> None:
        self.state = ScheduleState(self._file)
        self._scheduler = Scheduler(self._targets, self.state, self.queue, self.lines.append, self._alert)

    def _alert(self, target: ScheduledTarget, attempt: Attempt) -> None:
        assert target.slug == attempt.target and attempt.ended is not None
        self.alerts.append((attempt.submission_id, attempt.status))

    def restart(self) -> None:
        self.state.close()
        self.start()

    def step(self, *moments: str) -> None:
        for moment in moments:
            self._scheduler.step(at(moment))

    def outcomes(self, target: str = "tiny") -> list[tuple[str, Status]]:
        return [(attempt.submission_id, attempt.status) for attempt in self.state.attempts(target)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.step("09:30")
    yield made
    made.state.close()


def test_a_tick_is_submitted_once_with_its_own_id_and_command(bench: Bench) -> None:
    bench.step("09:59", "10:00", "10:00", "10:01", "10:40")
    assert bench.queue.log == [(FIRST, "python jobs/retrain.py --config tiny.yaml")]
    assert bench.queue.jobs()[FIRST].metadata == {
        "graft_retrain": "tiny",
        "graft_tick": "2026-05-01T10:00+00:00",
    }
    assert bench.outcomes() == [(FIRST, Status.submitted)]


def test_a_new_schedule_does_not_make_up_for_the_past(bench: Bench) -> None:
    bench.step("09:31")
    assert bench.queue.log == []


def test_missed_ticks_become_one_run(bench: Bench) -> None:
    bench.step("13:20")
    assert bench.queue.ids == ["retrain-tiny-20260501T1300Z"]
    assert bench.state.attempts("tiny")[0].detail == "stands for 3 earlier ticks too"


def test_ticks_that_are_too_late_are_given_up(tmp_path: Path) -> None:
    daily = ScheduledTarget("tiny", "tiny.yaml", Schedule(cron="0 3 * * *", max_lateness_minutes=60))
    bench = Bench(tmp_path, daily)
    bench.step("2026-05-01 02:00", "2026-05-01 05:00", "2026-05-01 05:01")
    assert bench.queue.log == []
    assert bench.alerts == [("retrain-tiny-20260501T0300Z", Status.missed)]
    assert bench.outcomes() == [("retrain-tiny-20260501T0300Z", Status.missed)]
    bench.step("2026-05-02 03:00")
    assert bench.queue.ids == ["retrain-tiny-20260502T0300Z"]
    bench.state.close()


def test_a_tick_during_a_run_is_skipped(bench: Bench) -> None:
    bench.step("10:00", "11:00")
    assert bench.queue.ids == [FIRST]
    assert bench.outcomes()[1] == ("retrain-tiny-20260501T1100Z", Status.skipped)
    bench.queue.end(FIRST)
    bench.step("11:01", "12:00")
    assert bench.queue.ids == [FIRST, "retrain-tiny-20260501T1200Z"]
    assert bench.outcomes()[0] == (FIRST, Status.succeeded)


def test_a_run_that_somebody_else_submitted_counts_as_overlap(bench: Bench) -> None:
    bench.queue.submit("by-hand", "python jobs/retrain.py", {"graft_retrain": "tiny"})
    bench.queue.submit("another-target", "python jobs/retrain.py", {"graft_retrain": "other"})
    bench.step("10:00")
    assert bench.outcomes() == [(FIRST, Status.skipped)]
    assert "by-hand is still at work" in bench.lines[-1]


def test_two_targets_do_not_wait_for_each_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, HOURLY, ScheduledTarget("other", "other.yaml", HOURLY.schedule))
    bench.step("09:30", "10:00")
    assert bench.queue.ids == [FIRST, "retrain-other-20260501T1000Z"]
    bench.state.close()


def test_failures_are_tried_again_after_pauses_that_double(tmp_path: Path) -> None:
    daily = ScheduledTarget("tiny", "tiny.yaml", Schedule(cron="0 10 * * *", backoff_minutes=10, max_attempts=3))
    bench = Bench(tmp_path, daily)
    bench.step("09:30", "10:00")
    bench.queue.fail(FIRST)
    bench.step("10:05", "10:14")
    assert bench.queue.ids == [FIRST]
    bench.step("10:15")
    assert bench.queue.ids == [FIRST, f"{FIRST}-r1"]
    bench.queue.fail(f"{FIRST}-r1", exit_code=None)
    bench.step("10:20", "10:39")
    assert len(bench.queue.ids) == 2
    bench.step("10:40")
    assert bench.queue.ids[2] == f"{FIRST}-r2"
    bench.queue.fail(f"{FIRST}-r2")
    assert bench.alerts == []
    bench.step("10:41", "23:00")
    assert [status for _, status in bench.outcomes()] == [Status.failed] * 3
    assert bench.alerts == [(f"{FIRST}-r2", Status.failed)]  # one for the tick, when nothing more is tried
    assert len(bench.queue.ids) == 3
    bench.state.close()


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        (JobState.succeeded, 0, Status.succeeded),
        (JobState.failed, 75, Status.yielded),
        (JobState.failed, 2, Status.failed),
        (JobState.stopped, None, Status.stopped),
    ],
)
def test_what_another_attempt_would_not_mend_is_not_tried_again(
    bench: Bench, state: JobState, code: int | None, status: Status
) -> None:
    bench.step("10:00")
    bench.queue.end(FIRST, state, code)
    bench.step("10:01", "10:59")
    assert bench.outcomes() == [(FIRST, status)]
    assert bench.alerts == ([(FIRST, status)] if status == Status.failed else [])
    assert bench.queue.ids == [FIRST]


def test_the_next_tick_takes_the_place_of_a_retry(bench: Bench) -> None:
    bench.step("10:00")
    bench.queue.fail(FIRST)
    bench.step("10:55", "11:00")
    assert bench.queue.ids == [FIRST, "retrain-tiny-20260501T1100Z"]
    assert bench.outcomes()[1] == (f"{FIRST}-r1", Status.superseded)
    assert bench.alerts == [(f"{FIRST}-r1", Status.superseded)]


def test_after_a_restart_runs_are_followed_not_repeated(bench: Bench) -> None:
    bench.step("10:00")
    bench.restart()
    bench.step("10:01")
    bench.queue.end(FIRST)
    bench.restart()
    bench.step("10:02")
    assert bench.queue.ids == [FIRST]
    assert bench.outcomes() == [(FIRST, Status.succeeded)]


def test_a_crash_between_intent_and_submission_neither_loses_nor_doubles(bench: Bench) -> None:
    bench.queue.is_away = True
    with pytest.raises(QueueUnavailable):
        bench.step("10:00")
    bench.queue.is_away = False

    submit = bench.queue.submit
    bench.queue.submit = crash_before  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        bench.step("10:01")
    bench.queue.submit = submit  # type: ignore[method-assign]
    assert bench.outcomes() == [(FIRST, Status.submitting)]
    bench.restart()
    bench.step("10:02")
    assert bench.queue.ids == [FIRST]


def crash_before(*_: object) -> bool:
    raise RuntimeError("killed")


def test_a_crash_between_submission_and_note_finds_the_job_again(bench: Bench) -> None:
    submit = bench.queue.submit

    def crash_after(*arguments: object) -> bool:
        submit(*arguments)  # type: ignore[arg-type]
        raise RuntimeError("killed")

    bench.queue.submit = crash_after  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        bench.step("10:00")
    bench.queue.submit = submit  # type: ignore[method-assign]
    bench.restart()
    bench.step("10:01")
    assert bench.queue.ids == [FIRST]
    assert bench.outcomes() == [(FIRST, Status.submitted)]


def test_a_cluster_that_is_away_loses_no_tick(bench: Bench) -> None:
    bench.queue.is_away = True
    for moment in ("10:00", "11:00", "12:30"):
        with pytest.raises(QueueUnavailable):
            bench.step(moment)
    bench.queue.is_away = False
    bench.step("12:31")
    assert bench.queue.ids == ["retrain-tiny-20260501T1200Z"]


def test_a_restarted_head_has_lost_the_run_which_is_tried_again(bench: Bench) -> None:
    bench.step("10:00")
    bench.queue.forget_all()
    bench.step("10:10")
    assert bench.outcomes() == [(FIRST, Status.lost), (f"{FIRST}-r1", Status.waiting)]
    bench.step("10:20")
    assert bench.queue.ids == [FIRST, f"{FIRST}-r1"]


def test_a_job_that_is_lost_for_good_and_a_cluster_that_stays_away_are_told(tmp_path: Path) -> None:
    daily = Schedule(cron="0 10 * * *", max_attempts=1, max_lateness_minutes=60)
    bench = Bench(tmp_path, ScheduledTarget("tiny", "tiny.yaml", daily))
    bench.step("09:30", "10:00")
    bench.queue.forget_all()
    bench.step("10:10", "10:11")
    assert bench.alerts == [(FIRST, Status.lost)]

    bench.queue.submit = away  # type: ignore[method-assign]
    with pytest.raises(QueueUnavailable):
        bench.step("2026-05-02 10:00")
    bench.step("2026-05-02 11:01", "2026-05-02 11:02")
    assert bench.alerts[1:] == [("retrain-tiny-20260502T1000Z", Status.missed)]
    bench.state.close()


def test_a_retry_that_nobody_could_start_in_time_is_missed(tmp_path: Path) -> None:
    daily = Schedule(cron="0 10 * * *", backoff_minutes=10, max_lateness_minutes=60)
    bench = Bench(tmp_path, ScheduledTarget("tiny", "tiny.yaml", daily))
    bench.step("09:30", "10:00")
    bench.queue.fail(FIRST)
    bench.step("10:05")
    bench.restart()
    bench.step("11:16")
    assert bench.outcomes() == [(FIRST, Status.failed), (f"{FIRST}-r1", Status.missed)]
    assert bench.alerts == [(f"{FIRST}-r1", Status.missed)] and bench.queue.ids == [FIRST]
    assert bench.lines[-1] == f"tiny: gave up {FIRST}-r1: it could not be tried again in time"
    bench.state.close()


def test_what_keeps_one_target_back_does_not_keep_the_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path, HOURLY, ScheduledTarget("other", "other.yaml", HOURLY.schedule))
    bench.step("09:30")
    submit = bench.queue.submit

    def refuse_tiny(name: str, *rest: object) -> bool:
        return away() if name == FIRST else submit(name, *rest)  # type: ignore[arg-type]

    bench.queue.submit = refuse_tiny  # type: ignore[method-assign]
    with pytest.raises(QueueUnavailable):
        bench.step("10:00")
    assert bench.queue.ids == ["retrain-other-20260501T1000Z"]
    bench.queue.submit = submit  # type: ignore[method-assign]
    bench.step("10:01")
    assert bench.queue.ids[1:] == [FIRST]
    bench.state.close()


def away(*_: object) -> bool:
    raise QueueUnavailable("nobody answers")


def test_jitter_puts_off_a_tick_and_not_its_id(tmp_path: Path) -> None:
    schedule = Schedule(cron="0 * * * *", max_lateness_minutes=300, jitter_s=1800)
    late, early = (datetime.fromisoformat(f"2026-05-01T{hour}:00Z") for hour in ("10", "11"))
    bench = Bench(tmp_path, ScheduledTarget("tiny", "tiny.yaml", schedule))
    bench.step("09:30")
    delay = schedule.delay("tiny", late)
    assert timedelta(minutes=1) < delay < timedelta(minutes=30)
    for moment in (late, late + delay - timedelta(seconds=1)):
        bench._scheduler.step(moment)
        assert bench.queue.log == []
    bench.restart()
    bench._scheduler.step(late + delay)
    assert bench.queue.ids == [FIRST]
    bench.queue.end(FIRST)
    bench._scheduler.step(early + schedule.delay("tiny", early))
    assert bench.queue.ids == [FIRST, "retrain-tiny-20260501T1100Z"]
    bench.state.close()


def test_with_jitter_missed_ticks_are_still_one_run(tmp_path: Path) -> None:
    schedule = Schedule(cron="*/10 * * * *", max_lateness_minutes=300, jitter_s=3600)
    bench = Bench(tmp_path, ScheduledTarget("tiny", "tiny.yaml", schedule))
    bench.step("09:30", "14:00")
    (submitted,) = bench.queue.ids
    ready = [
        tick for tick in schedule.due(at("09:30"), at("14:00")) if tick + schedule.delay("tiny", tick) <= at("14:00")
    ]
    assert submitted == f"retrain-tiny-{ready[-1]:%Y%m%dT%H%MZ}"
    bench.state.close()


def test_two_schedulers_with_files_of_their_own_submit_a_tick_once(tmp_path: Path) -> None:
    one, two = Bench(tmp_path / "one"), Bench(tmp_path / "two")
    two.queue = one.queue
    two.restart()
    for bench in (one, two):
        bench.step("09:30")
    # Both looked at the list before either had submitted.
    two.queue = Stale(one.queue)
    two.restart()
    one.step("10:00")
    two.step("10:00")
    assert one.queue.ids == [FIRST]
    assert one.outcomes() == two.outcomes() == [(FIRST, Status.submitted)]
    for bench in (one, two):
        bench.state.close()


class Stale(FakeQueue):
    """A job list that was read before another scheduler submitted to the same cluster."""

    def __init__(self, real: FakeQueue) -> None:
        super().__init__()
        self._jobs_of_the_cluster = real._jobs

    def submit(self, submission_id: str, *_: object) -> bool:
        return submission_id not in self._jobs_of_the_cluster


def test_spring_and_autumn_each_night_has_one_run(tmp_path: Path) -> None:
    nightly = ScheduledTarget("tiny", "x", Schedule(cron="30 2 * * *", timezone="Europe/Berlin"))
    bench = Bench(tmp_path, nightly)
    for start, expected in (
        ("2026-03-27 12:00", ["0328T0130Z", "0329T0100Z", "0330T0030Z"]),
        ("2026-10-23 12:00", ["1024T0030Z", "1025T0030Z", "1026T0130Z"]),
    ):
        bench.queue.log.clear()
        bench.state.write(watermark=at(start), target="tiny")
        for minutes in range(0, 3 * 24 * 60, 15):
            bench._scheduler.step(at(start) + timedelta(minutes=minutes))
            for submission_id in bench.queue.ids:
                bench.queue.end(submission_id)
        assert bench.queue.ids == [f"retrain-tiny-2026{tick}" for tick in expected]
    bench.state.close()


def test_a_single_submission_needs_no_file(tmp_path: Path) -> None:
    queue = FakeQueue()
    done = submit_once(HOURLY, queue, at("10:20"))
    assert (done.submission_id, done.message) == (FIRST, f"submitted {FIRST}")
    assert "at work already" in submit_once(HOURLY, queue, at("10:21")).message
    assert "still at work" in submit_once(HOURLY, queue, at("11:00")).message
    queue.fail(FIRST)
    assert submit_once(HOURLY, queue, at("10:22")).submission_id == f"{FIRST}-r1"
    queue.end(f"{FIRST}-r1")
    again = submit_once(HOURLY, queue, at("10:23"))
    assert (again.submission_id, again.is_failed) == (None, False)
    assert again.message == f"{FIRST}-r1 has succeeded already"


def test_a_single_submission_gives_up_after_the_last_attempt() -> None:
    queue = FakeQueue()
    for _ in range(HOURLY.schedule.max_attempts):
        done = submit_once(HOURLY, queue, at("10:20"))
        assert done.submission_id is not None
        queue.fail(done.submission_id)
    assert submit_once(HOURLY, queue, at("10:20")).is_failed
    weekly = ScheduledTarget("tiny", "x", Schedule(cron="0 3 * * 1", max_lateness_minutes=60))
    assert submit_once(weekly, FakeQueue(), at("10:20")).message == "no tick of tiny in the last 60 minutes"


def test_a_run_of_hours_that_failed_is_tried_again_and_stays_a_failure() -> None:
    queue, daily = FakeQueue(), ScheduledTarget("tiny", "x", Schedule(cron="0 10 * * *", max_lateness_minutes=60))
    assert submit_once(daily, queue, at("10:00")).submission_id == FIRST
    assert submit_once(daily, queue, at("13:00")).message == f"{FIRST} is at work already"  # whoever asked is gone
    queue.fail(FIRST)
    assert submit_once(daily, queue, at("14:00")).submission_id == f"{FIRST}-r1"
    queue.fail(f"{FIRST}-r1")
    late = submit_once(daily, queue, at("2026-05-02 11:30"))  # the next tick has come and gone
    assert (late.submission_id, late.is_failed) == (None, True)
    assert late.message == f"{FIRST}-r1 has failed, and the tick after it is too late too"
    assert submit_once(daily, queue, at("20:00")).submission_id == f"{FIRST}-r2"
    queue.fail(f"{FIRST}-r2", exit_code=2)
    assert submit_once(daily, queue, at("21:00")).is_failed
    other = ScheduledTarget("tin", "x", daily.schedule)
    assert submit_once(other, queue, at("21:00")).message == "no tick of tin in the last 60 minutes"


def test_following_ends_with_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    queue = FakeQueue()
    queue.submit("a", "python x", {})

    def turns(*moves: object) -> Iterator[object]:
        yield from moves

    moves = turns(lambda: setattr(queue, "is_away", True), lambda: setattr(queue, "is_away", False),
                  lambda: queue.fail("a", 3))  # fmt: skip
    assert follow(queue, "a", lambda _: next(moves)(), 1.0) == 1  # type: ignore[operator]
    assert "a failed, exit code 3" in capsys.readouterr().out
    queue.fail("a", 75)
    assert follow(queue, "a", lambda _: None, 1.0) == 0
    assert follow(queue, "unknown", lambda _: None, 1.0) == 1
    queue.is_away = True
    assert follow(queue, "a", lambda _: None, 1.0) == 1
    assert "cannot be followed any longer" in capsys.readouterr().out


def test_another_entry_point_keeps_the_rest_of_the_schedule() -> None:
    other = with_entrypoint(HOURLY.schedule, "python jobs/retrain.py --config {config} --store /data")
    assert other.command("x.yaml") == "python jobs/retrain.py --config x.yaml --store /data"
    assert (other.cron, other.max_lateness) == (HOURLY.schedule.cron, HOURLY.schedule.max_lateness)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    keys = {"target": "builtin:smollm2-135m", "drafter": "builtin:smollm2-135m", "schedule": {"cron": "0 3 * * *"}}
    path.write_text(json.dumps(keys))
    return path


def test_status_shows_the_next_run_and_the_last_outcomes(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state" / "schedule.sqlite"
    (target,) = scheduled_targets([str(config)])
    queue = FakeQueue()
    with ScheduleState(file) as state:
        scheduler = Scheduler([target], state, queue, lambda _: None)
        for moment in ("2026-05-01 02:00", "2026-05-01 03:00"):
            scheduler.step(at(moment))
        queue.fail("retrain-smollm2-135m-20260501T0300Z", 4)
        scheduler.step(at("2026-05-01 03:05"))
    assert cli.run(["schedule", "status", "--config", str(config), "--state", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m  next run 20" in shown
    assert "2026-05-01T03:00Z  failed      retrain-smollm2-135m-20260501T0300Z  exit code 4" in shown
    assert cli.run(["schedule", "status", "--config", str(config), "--state", str(file), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [attempt["status"] for attempt in row["attempts"]] == ["failed", "waiting"]


def test_a_second_scheduler_on_the_same_file_is_refused(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schedule.sqlite"
    with (tmp_path / "schedule.sqlite.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cli.run(["schedule", "run", "--config", str(config), "--state", str(file)]) == 2
    assert "another scheduler is at work with this file" in capsys.readouterr().err


def test_the_loop_waits_for_a_cluster_that_is_away_and_ends_when_asked(tmp_path: Path, config: Path) -> None:
    command = [sys.executable, "-m", "jobs.cli", "schedule", "run", "--config", str(config), "--interval", "0.1"]
    command += ["--state", str(tmp_path / "schedule.sqlite"), "--address", f"http://127.0.0.1:{free_ports(1)[0]}"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert running.stdout is not None
        assert "next run" in running.stdout.readline()
        assert "ticks are kept and made up for" in running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 0
    assert output.startswith("stopped; submitted jobs go on")
    with ScheduleState(tmp_path / "schedule.sqlite", is_read_only=True) as state:
        assert state.watermark("smollm2-135m") is not None


def test_the_loop_goes_on_after_a_state_file_that_could_not_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    class Steps(Scheduler):
        def __init__(self, *raised: Exception | None) -> None:
            self.raised = iter(raised)

        def step(self, now: datetime) -> None:
            error = next(self.raised)
            if error is not None:
                raise error

    full, waits = sqlite3.OperationalError("database or disk is full"), iter([False, False, False, True])
    loop(Steps(full, full, None, OSError(5, "Input/output error")), lambda _: next(waits), 1.0)
    assert capsys.readouterr().out.splitlines() == [
        "the scheduler's state: database or disk is full; ticks are kept and made up for",
        "the schedule goes on",
        "the scheduler's state: [Errno 5] Input/output error; ticks are kept and made up for",
    ]
    with pytest.raises(ConfigError, match="can no longer be used"):
        loop(Steps(sqlite3.DatabaseError("database disk image is malformed")), lambda _: False, 1.0)


def test_a_file_of_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_text("no database at all, but quite long enough to be looked at as one" * 20)
    with pytest.raises(ConfigError, match="cannot be used"):
        ScheduleState(broken)
    future = tmp_path / "future.sqlite"
    with ScheduleState(future) as state, state._database as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="version 9"):
        ScheduleState(future)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--config", "qwen3-4b"], "has no schedule"),
        (["run", "--config", "{c}", "--config", "smollm2-135m"], "are the same target"),
        (["run", "--config", "{c}", "--address", "ray://x"], "allowed is the URL of a Ray dashboard"),
        (["run", "--config", "{c}", "--working-dir", "/no/where"], "no such folder"),
        (["status", "--config", "{c}", "--state", "/no/where.sqlite"], "no such file"),
        (["submit", "--config", "nowhere.yaml"], "no such file"),
        (["submit", "--config", "{c}", "--entrypoint", "rm -rf data"], "--entrypoint is 'rm -rf data', allowed is"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["schedule", *(argument.format(c=config) for argument in arguments)]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown and shown.count("\n") == 1
