"""How a retraining run ends when a step meets trouble or is killed, with what its steps call replaced."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.errors import GraftError, RegistryError, RegistryUnavailableError, StoreError
from graft_dist.prompt_source import PromptSource
from graft_dist.retraining import Retraining
from jobs import retraining
from jobs.cluster import ClusterBusyError
from jobs.driver import Ending
from jobs.lease import Lease, hold_all
from jobs.policy_training import PolicyRequest
from jobs.retraining import RetrainRequest
from tests.jobs.fake_loop import STEPS, Killed, Loop

Run = Callable[..., int]
"""Starts a run of this id, or goes on with it; a second argument is the failpoint that it is killed at."""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    made.install(monkeypatch)
    return made


@pytest.fixture
def run(tmp_path: Path, tiny_config: TargetConfig) -> Run:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello?"]}) + "\n")
    settings = Retraining(
        prompts=(PromptSource(path=str(tmp_path / "prompts.jsonl")),),
        store=str(tmp_path / "store"),
        runs=str(tmp_path / "runs"),
        every_prompt=True,
        keep_days=30,
    )

    def policy_request(out: Path) -> PolicyRequest:
        return None  # type: ignore[return-value]  # nothing is trained

    def start(run_id: str, kill_at: str = "nowhere") -> int:
        def failpoint(point: str) -> None:
            if point == kill_at:
                raise Killed(point)

        request = RetrainRequest(
            config=tiny_config, settings=settings, tracking_uri="", policy_request=policy_request, run_id=run_id
        )
        return retraining.run(request, failpoint)

    return start


def records(tmp_path: Path, run_id: str) -> dict[str, Any]:
    """The results of a run's finished steps, and its end if it has come to one."""
    (folder,) = (tmp_path / "runs").glob(f"*/{run_id}")
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name.rpartition("-")[2]: record.get("result", record) for name, record in found.items()}


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


KILL_POINTS = [f"{when} {step}" for step in STEPS for when in ("before", "after")] + ["before end"]
INSIDE = ("collect", "compact", "train", "evaluate", "promote", "tag", "log_report", "forget", "vacuum")


@pytest.mark.parametrize("point", [*KILL_POINTS, *(f"inside {name}" for name in INSIDE)])
def test_a_run_that_is_killed_anywhere_ends_as_if_it_never_was(
    point: str, run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    when, _, name = point.partition(" ")
    if when == "inside":
        loop.trouble[name] = Killed()
    with pytest.raises(Killed):
        run("1", point)
    loop.trouble.clear()
    is_promoted = loop.champion == 1
    assert is_promoted == (
        point == "after decide" or STEPS.index("decide") < _steps_done(tmp_path) or name == "promote"
    )
    assert run("1") == 0
    line = last_line(capsys)
    assert line.startswith("retrain: promoted v1: replay: challenger v1") and loop.champion == 1
    assert loop.reports == ["report.html"] and loop.tags["graft.gate.decision"] == "promoted"
    found = records(tmp_path, "1")
    assert found.keys() == {*STEPS, "end"} and found["end"] == {"line": line.removeprefix("retrain: "), "exit_code": 0}
    assert len(set(loop.asked)) == 1 and loop.calls["train"] <= 2 and sum(loop.calls.values()) <= len(INSIDE) + 2


def _steps_done(tmp_path: Path) -> int:
    return len(list((tmp_path / "runs").glob("*/1/[0-9]-*.json")))


def test_a_run_that_has_ended_says_the_same_again(
    run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("1") == 0
    line, calls = last_line(capsys), dict(loop.calls)
    assert run("1") == 0
    assert last_line(capsys) == line and loop.calls == calls


@pytest.mark.parametrize(
    ("call", "error", "code", "line"),
    [
        ("collect", KeyboardInterrupt(), 130, "stopped at step collect: it was interrupted"),
        ("train", SystemExit(143), 143, "stopped at step train: it was told to end"),
        ("train", OSError(28, "No space left"), 1, "failed at step train: OSError: [Errno 28] No space left"),
        ("train", RegistryUnavailableError("the registry is away"), 1, "stopped at step train: the registry is away"),
        ("evaluate", RegistryUnavailableError("it is away"), 1, "stopped at step evaluate: it is away"),
        ("evaluate", ClusterBusyError("there was no room"), 1, "stopped at step evaluate: there was no room"),
        (
            "promote",
            RegistryUnavailableError("the registry is away"),
            1,
            "stopped at step decide: it is not known whether v1 is promoted, for the registry is away",
        ),
        (
            "tag",
            RegistryUnavailableError("the registry is away"),
            1,
            "stopped at step report: v1 is promoted, but its tags and report are not all kept: the registry is away",
        ),
        (
            "log_report",
            RegistryUnavailableError("the registry is away"),
            1,
            "stopped at step report: v1 is promoted, but its tags and report are not all kept: the registry is away",
        ),
    ],
)
def test_what_breaks_a_run_off_names_the_step_and_the_next_start_goes_on(
    call: str,
    error: BaseException,
    code: int,
    line: str,
    run: Run,
    loop: Loop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop.trouble[call] = error
    assert run("1") == code
    assert last_line(capsys) == f"retrain: {line}; the same command goes on there"
    assert "end" not in records(tmp_path, "1")
    loop.trouble.clear()
    assert run("1") == 0
    assert last_line(capsys).startswith("retrain: promoted v1") and loop.champion == 1
    assert loop.tags["graft.gate.decision"] == "promoted" and loop.reports == ["report.html"]


def test_a_collection_that_is_cut_off_is_gone_on_with(
    run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.collects = Ending.CUT_OFF.value
    assert run("1") == Ending.CUT_OFF.value
    assert last_line(capsys) == (
        "retrain: stopped at step collect: the collection was cut off; the same command goes on there"
    )
    assert records(tmp_path, "1").keys() == {"choose"}
    loop.collects, loop.trouble["evaluate"] = Ending.PARTIAL.value, GraftError("enough")
    assert run("1") == 1
    assert records(tmp_path, "1")["collect"] == {"exit_code": 3}
    assert len(loop.asked) == 2 and loop.asked[0] == loop.asked[1]


def test_a_promotion_that_is_refused_ends_the_run(
    run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.during["promote"] = lambda _: setattr(loop, "champion", None)
    loop.trouble["promote"] = RegistryError("the champion is another now")
    assert run("1") == 1
    assert last_line(capsys) == "retrain: failed at step decide: the champion is another now"
    assert records(tmp_path, "1")["end"]["exit_code"] == 1 and not loop.tags


@pytest.mark.parametrize("call", ["tag", "log_report"])
def test_a_version_that_somebody_has_deleted_does_not_keep_the_run_from_its_end(
    call: str, run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No later start could do better, and the next run of the target would never come."""
    loop.trouble[call] = RegistryError("version 1 is gone")
    assert run("1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "retrain: report: not all kept, version 1 is gone" in lines
    assert lines[-1].startswith("retrain: promoted v1")
    found = records(tmp_path, "1")
    assert found["report"]["skipped"] == "version 1 is gone" and Path(found["report"]["report"]).is_file()


def test_a_promotion_is_not_repeated_for_the_sake_of_its_tags(run: Run, loop: Loop) -> None:
    """Somebody may have rolled it back meanwhile."""
    loop.trouble["tag"] = RegistryUnavailableError("the registry is away")
    assert run("1") == 1
    loop.trouble.clear()
    loop.champion = None
    assert run("1") == 0
    assert loop.champion is None and loop.calls["promote"] == 1 and loop.reports


def test_what_a_person_has_rolled_back_meanwhile_is_not_promoted_again(
    run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.trouble["promote"] = Killed()
    with pytest.raises(Killed):
        run("1")
    assert loop.champion == 1  # it is live, and the run does not know
    loop.trouble.clear()
    loop.champion, loop.rolled_back = None, True
    assert run("1") == 0
    assert last_line(capsys).startswith("retrain: kept DDTree because v1 was rolled back by hand")
    assert loop.champion is None and loop.tags["graft.gate.decision"] == "kept"


def test_a_run_that_loses_its_lease_in_a_long_step_stops_there(
    run: Run, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    reached: list[str] = []

    def lose_it(request: object) -> None:
        (lease,) = (tmp_path / "runs").glob("*/lease.json")
        Lease(lease, "other", stale_after_s=0).acquire()
        for _ in range(600):
            time.sleep(0.1)  # until the signal comes
        reached.append("the end of the step")

    monkeypatch.setattr(retraining, "hold_all", partial(hold_all, beat_s=0.05))
    former = signal.signal(signal.SIGTERM, terminate)
    try:
        loop.during["train"] = lose_it
        assert run("1") == 75
    finally:
        signal.signal(signal.SIGTERM, former)
    assert last_line(capsys).startswith("retrain: run 1 has lost its lease to run other on ")
    assert "compact" in records(tmp_path, "1") and "train" not in records(tmp_path, "1") and reached == []


def test_a_step_that_fails_for_the_loss_of_the_lease_does_not_end_the_run(
    run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_it(request: object) -> None:
        (lease,) = (tmp_path / "runs").glob("*/lease.json")
        Lease(lease, "1", stale_after_s=0).acquire()  # another start of the same run

    loop.during["collect"], loop.collects = lose_it, Ending.FENCED.value
    assert run("1") == 75
    assert last_line(capsys).startswith("retrain: run 1 has lost its lease to run 1 on ")
    assert "end" not in records(tmp_path, "1")


def on_a_full_disk(*_: object) -> Path:
    raise OSError(28, "No space left on device")


def test_a_full_disk_before_the_first_step_is_no_mistake_of_the_user(
    run: Run, loop: Loop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", on_a_full_disk)
        assert run("1") == 1
    assert last_line(capsys) == (
        "retrain: failed: OSError: [Errno 28] No space left on device; the same command tries again"
    )
    assert run("1") == 0


def test_a_disk_that_is_full_for_the_lease_too_does_not_hide_what_the_step_met(
    run: Run, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(request: object) -> None:
        monkeypatch.setattr(Path, "replace", on_a_full_disk)

    loop.during["train"], loop.trouble["train"] = fill, StoreError("the store cannot be written")
    assert run("1") == 1
    assert last_line(capsys) == "retrain: failed at step train: the store cannot be written"
    monkeypatch.undo()
    assert "end" not in records(tmp_path, "1")


def test_upkeep_that_meets_anothers_is_left_out(run: Run, loop: Loop, tmp_path: Path) -> None:
    loop.trouble["compact"] = StoreError("another one was faster")
    assert run("1") == 0
    assert records(tmp_path, "1")["compact"] == {"skipped": "another one was faster"}


@pytest.mark.parametrize("call", ["forget", "vacuum"])
@pytest.mark.parametrize("error", [StoreError("another one was faster"), OSError("a disk"), KeyError("a bug")])
def test_what_cannot_be_cleaned_does_not_hide_the_decision(
    call: str, error: Exception, run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.trouble[call] = error
    assert run("1") == 0
    *_, said, line = capsys.readouterr().out.splitlines()
    assert said.startswith(f"retrain: clean: left for the next run, {type(error).__name__}: ")
    assert line.startswith("retrain: promoted v1")
    others = {"num_forgotten_files": 3, "num_deleted_files": 1, "num_emptied_runs": 0}
    del others["num_forgotten_files" if call == "forget" else "num_deleted_files"]
    cleaned = records(tmp_path, "1")["clean"]
    assert len(cleaned.pop("skipped")) == 1 and cleaned == others


def test_an_end_that_cannot_be_written_down_is_said_all_the_same(
    run: Run, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(retraining, "write_aside", on_a_full_disk)
        assert run("1") == 0
    line = last_line(capsys)
    assert line.startswith("retrain: promoted v1") and "end" not in records(tmp_path, "1")
    assert run("1") == 0
    assert last_line(capsys) == line and "end" in records(tmp_path, "1")


def test_the_numbers_become_tags_and_a_report(run: Run, loop: Loop, tmp_path: Path) -> None:
    assert run("1") == 0
    gate = {name.removeprefix("graft.gate."): value for name, value in loop.tags.items() if "gate." in name}
    reason = gate.pop("reason")
    assert gate == {
        "decision": "promoted", "champion": "none", "run": "1", "ratio": "1.2500", "low": "1.2500", "high": "1.2500",
        "mat": "2.5000", "champion_mat": "2.0000", "mismatch": "0.0500", "champion_mismatch": "0.1000",
        "live_ratio": "1.2500", "live_low": "1.2500", "live_high": "1.2500", "audited": "4", "bugs": "0",
    }  # fmt: skip
    for part in (
        "MAT 2.50 against 2.00 (1.200 to 1.300 times)",
        "mismatch 5.0% against 10.0% (-6.0 to -4.0 points)",
        "; live: challenger v1",
        "audit: 0 of 4 answers are not the target's own",
    ):
        assert part in reason
    (report,) = (tmp_path / "runs").glob("*/1/report.html")
    page = report.read_text()
    assert "Tokens a round: 1.250 times, between 1.200 and 1.300" in page
    assert "Mismatch: -5.00 points, between -6.00 and -4.00" in page


def test_old_runs_give_their_room_back(run: Run, loop: Loop, tmp_path: Path, tiny_config: TargetConfig) -> None:
    old = tmp_path / "runs" / tiny_config.slug / "0"
    (old / "training").mkdir(parents=True)
    (old / "end.json").write_text(json.dumps({"line": "kept v1", "exit_code": 0}))
    os.utime(old / "end.json", (time.time() - 86400 * 31,) * 2)
    assert run("1") == 0
    assert records(tmp_path, "1")["clean"]["num_emptied_runs"] == 1 and not (old / "training").exists()


def test_a_challenger_that_was_not_judged_is_trained_again(
    run: Run, loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.trouble["evaluate"] = GraftError("a file was gone")
    assert run("1") == 1
    assert records(tmp_path, "1")["end"]["line"] == "failed at step evaluate: a file was gone"
    assert run("2") == 1  # with no prompt left to ask, the rounds of run 1 are what is new
    assert "failed at step evaluate" in last_line(capsys)
    assert records(tmp_path, "2")["choose"]["num_prompts"] == 0 and len(loop.asked) == 1
