"""infra/schedule: systemd units and crontab fit the targets' own schedules and our command's options."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from datetime import UTC, datetime, timedelta
from itertools import pairwise
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
    parser.read_string((FOLDER / name).read_text(encoding="utf-8").replace("\\\n", " "))
    return parser


def schedule_of(target: str) -> Schedule:
    schedule = load_config(target).schedule
    assert schedule is not None
    return schedule


def check_command(words: list[str]) -> None:
    """Let our command parse the words after `graft`, without doing anything; what it refuses is raised."""
    assert words[0] == "schedule"
    group = typer.main.get_command(cli.app).commands["schedule"]  # type: ignore[attr-defined]
    group.commands[words[1]].make_context(words[1], words[2:])


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
        assert "graft schedule submit" in command
        target = Path(words[words.index("--config") + 1]).stem
        assert f"graft-{target}.lock" in command
        theirs = Schedule(cron=" ".join(fields)).ticks(START)
        ours = schedule_of(target).ticks(START)
        assert [next(theirs) - next(ours) for _ in range(5)] == [timedelta(minutes=1)] * 5


def test_the_service_submits_and_waits() -> None:
    service = unit("graft-retrain@.service")["Service"]
    words = shlex.split(service["ExecStart"])
    check_command(words[1:])
    assert words[2] == "submit" and "--wait" in words and "targets/%i.yaml" in words
    assert (service["Type"], service["User"]) == ("oneshot", "graft")


def test_the_scheduler_stays_up_and_keeps_its_state() -> None:
    service = unit("graft-schedule.service")["Service"]
    words = shlex.split(service["ExecStart"])
    check_command(words[1:])
    assert words[2] == "run"
    targets = [Path(following) for word, following in pairwise(words) if word == "--config"]
    assert targets and all(load_config(ROOT / target) == load_config(target.stem) for target in targets)
    assert all(schedule_of(target.stem) for target in targets)
    state = Path(words[words.index("--state") + 1])
    assert state.parent == Path("/var/lib") / service["StateDirectory"]
    assert service["Restart"] == "always" and int(service["RestartSec"]) > 0
    assert unit("graft-schedule.service")["Install"]["WantedBy"] == "multi-user.target"


def test_both_services_are_confined_alike() -> None:
    run, submit = (dict(unit(f"{name}.service")["Service"]) for name in ("graft-schedule", "graft-retrain@"))
    own = {"Type", "ExecStart", "StateDirectory", "Restart", "RestartSec", "TimeoutStartSec"}
    shared = {key: value for key, value in submit.items() if key not in own}
    assert shared == {key: value for key, value in run.items() if key not in own}
    assert shared["User"] == "graft" and shared["ProtectSystem"] == "strict" and "EnvironmentFile" in shared


def test_the_timer_starts_a_minute_after_the_built_in_targets_tick() -> None:
    timer = unit("graft-retrain@.timer")["Timer"]
    assert timer["OnCalendar"] == "*-*-* 03:31:00 UTC"
    assert schedule_of("smollm2-135m").cron == "30 3 * * *"
    assert timer["Persistent"] == "true"


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here: the units are not parsed")
    for file in FOLDER.glob("graft-*"):
        # The command itself is not installed where tests run.
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    units = sorted(map(str, tmp_path.iterdir()))
    assert len(units) == 3
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "graft-" in line] == []


def test_systemd_understands_the_calendar() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here: the timer's calendar is not parsed")
    text = (FOLDER / "graft-retrain@.timer").read_text()
    calendars = [value for value in re.findall(r"OnCalendar=(.+)", text) if value]
    assert len(calendars) == 2
    for calendar in calendars:
        done = subprocess.run(["systemd-analyze", "calendar", calendar], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
