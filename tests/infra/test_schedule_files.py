"""infra/schedule: systemd units and crontab fit the targets' own schedules and our command's options."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException

from graft_dist.config import load_config
from graft_dist.schedule import Schedule
from jobs import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "infra" / "schedule"
START = datetime(2026, 12, 1, tzinfo=UTC)


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(FOLDER / name)
    return parser


def schedule_of(target: str) -> Schedule:
    schedule = load_config(target).schedule
    assert schedule is not None
    return schedule


def check_command(words: list[str]) -> None:
    """Let our command parse the words after `graft`, without doing anything; what it refuses is raised."""
    assert words[:2] == ["schedule", "submit"]
    group = typer.main.get_command(cli.app).commands["schedule"]  # type: ignore[attr-defined]
    group.commands["submit"].make_context("submit", words[2:])


@pytest.mark.parametrize("mistake", ["--intervall=30", "--interval=soon", "--waiting", "now"])
def test_a_command_line_with_a_mistake_is_found(mistake: str) -> None:
    with pytest.raises(TyperException):
        check_command(["schedule", "submit", "--config=x.yaml", mistake])


def test_cron_starts_a_minute_after_each_tick() -> None:
    lines = [line for line in (FOLDER / "crontab").read_text().splitlines() if re.match(r"[\d*]", line)]
    assert len(lines) == 2
    for line in lines:
        fields, command = line.split(maxsplit=5)[:5], line.split(maxsplit=5)[5]
        words = shlex.split(command)
        check_command(words[words.index(".venv/bin/graft") + 1 :])
        target = Path(words[words.index("--config") + 1]).stem
        assert f"graft-{target}.lock" in command
        theirs = Schedule(cron=" ".join(fields)).ticks(START)
        ours = schedule_of(target).ticks(START)
        assert [next(theirs) - next(ours) for _ in range(5)] == [timedelta(minutes=1)] * 5


def test_the_service_submits_and_waits() -> None:
    service = unit("graft-retrain@.service")["Service"]
    words = shlex.split(service["ExecStart"])
    check_command(words[1:])
    assert "--wait" in words and "targets/%i.yaml" in words
    assert (service["Type"], service["User"]) == ("oneshot", "graft")


def test_the_timer_starts_a_minute_after_the_built_in_targets_tick() -> None:
    timer = unit("graft-retrain@.timer")["Timer"]
    assert timer["OnCalendar"] == "*-*-* 03:31:00 UTC"
    assert schedule_of("smollm2-135m").cron == "30 3 * * *"
    assert timer["Persistent"] == "true"


def test_systemd_understands_the_calendar() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here: the timer's calendar is not parsed")
    text = (FOLDER / "graft-retrain@.timer").read_text()
    calendars = [value for value in re.findall(r"OnCalendar=(.+)", text) if value]
    assert len(calendars) == 2
    for calendar in calendars:
        done = subprocess.run(["systemd-analyze", "calendar", calendar], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
