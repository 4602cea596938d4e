"""`schedule.on_failure`: what the command is told, and that nothing it does reaches the scheduler."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from graft_dist.schedule import Schedule
from jobs import failure_hook
from jobs.failure_hook import tell
from jobs.schedule import ScheduledTarget
from jobs.schedule_state import Attempt, Status

TICK = datetime(2026, 5, 1, 10, tzinfo=UTC)
FAILED = Attempt("tiny", TICK, 1, Status.failed, "out of memory", 1, TICK, TICK)


def told(*command: str, attempt: Attempt = FAILED) -> list[str]:
    """What the scheduler says of a command that was started for an attempt."""
    lines: list[str] = []
    schedule = Schedule(cron="0 * * * *", on_failure=command or None)
    tell(ScheduledTarget("tiny", "tiny.yaml", schedule), attempt, lines.append)
    return lines


def test_it_is_told_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "kept")
    file = tmp_path / "told.json"
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    assert told(sys.executable, "-c", script, str(file)) == []
    found = json.loads(file.read_text())
    assert {name: value for name, value in found.items() if name.startswith("GRAFT_")} == {
        "GRAFT_TARGET": "tiny",
        "GRAFT_TICK": "2026-05-01T10:00Z",
        "GRAFT_OUTCOME": "failed",
        "GRAFT_SUBMISSION_ID": "retrain-tiny-20260501T1000Z-r1",
        "GRAFT_EXIT_CODE": "1",
        "GRAFT_DETAIL": "out of memory",
    }
    assert found["OURS"] == "kept"
    missed = Attempt("tiny", TICK, 0, Status.missed, "", None, TICK, TICK)
    assert told(sys.executable, "-c", script, str(file), attempt=missed) == []
    assert json.loads(file.read_text())["GRAFT_EXIT_CODE"] == ""


def test_without_one_nothing_happens() -> None:
    assert told() == []


def test_one_that_fails_hangs_or_is_not_there_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(sys.executable, "-c", "raise SystemExit(3)") == ["tiny: on_failure ended with exit code 3"]
    (line,) = told(str(tmp_path / "nowhere"))
    assert line.startswith("tiny: on_failure could not be started (") and "nowhere" in line
    (line,) = told("true", "a\0b")
    assert "null" in line
    monkeypatch.setattr(failure_hook, "TIMEOUT_S", 0.1)
    assert told("sleep", "60") == ["tiny: on_failure was ended after 0.1 s"]


def test_one_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "child"
    monkeypatch.setattr(failure_hook, "TIMEOUT_S", 1.0)
    (line,) = told("sh", "-c", f"sleep 60 & echo $! > {file}; wait")
    assert line == "tiny: on_failure was ended after 1 s"
    child, deadline = Path(f"/proc/{file.read_text().strip()}"), time.monotonic() + 30
    while not _has_ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _has_ended(process: Path) -> bool:
    """An orphan that nobody has waited for stays as a zombie."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
