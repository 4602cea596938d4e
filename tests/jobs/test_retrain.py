"""Retraining on a real Ray head, a real store and a real MLflow registry, with a tiny random target.

The random drafter is right by chance only, so the challenger that learns not to draft beats DDTree.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from graft_dist.config import TargetConfig
from jobs.lease import Lease
from jobs.ray_head import RayHead
from jobs.retrain import main
from storage import connect
from storage.registry import Registry

pytestmark = [pytest.mark.slow, pytest.mark.ray]

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = ("choose", "collect", "compact", "train", "evaluate", "decide", "report", "clean")


@dataclass
class Project:
    """A configuration with its prompts, store, runs and registry."""

    folder: Path
    head: RayHead

    @property
    def arguments(self) -> list[str]:
        return ["--config", str(self.folder / "tiny.yaml"), "--address", self.head.address]

    @property
    def registry(self) -> Registry:
        return Registry(f"sqlite:///{self.folder / 'mlflow.db'}", cache_dir=self.folder / "cache")

    @property
    def slug(self) -> str:
        (folder,) = (self.folder / "runs").iterdir()
        return folder.name

    def write_prompts(self, count: int) -> None:
        lines = [
            json.dumps({"id": f"p{number}", "task": ("code", "chat")[number % 2], "turns": [f"Say {number} in words."]})
            for number in range(count)
        ]
        (self.folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    @property
    def environment(self) -> dict[str, str]:
        return self.head.environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)})

    def run(self, *more: str, kill_at: str = "nowhere") -> tuple[int, str]:
        """The exit code and the output of a process of its own; it dies at the failpoint `kill_at`."""
        driver = str(Path(__file__).with_name("retrain_driver.py"))
        done = subprocess.run(
            [sys.executable, driver, kill_at, *self.arguments, *more],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
        print(done.stdout)
        return done.returncode, done.stdout

    def run_here(self, *more: str) -> tuple[int, str]:
        """The same in this process, for a run that comes to no step that needs the cluster."""
        handler, shown = signal.getsignal(signal.SIGTERM), StringIO()
        try:
            with redirect_stdout(shown):
                code = main([*self.arguments, *more])
        finally:
            signal.signal(signal.SIGTERM, handler)
        print(shown.getvalue())
        return code, shown.getvalue()


def last_line(output: str) -> str:
    return [line for line in output.splitlines() if line.startswith("retrain: ")][-1]


@pytest.fixture(scope="module")
def project(ray_head: RayHead, tiny_config: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("retrain")
    config = tiny_config.model_dump(mode="json")
    config["retrain"] = {
        "prompts": [{"path": str(folder / "*.jsonl")}],
        "store": str(folder / "store"),
        "runs": str(folder / "runs"),
        "tracking_uri": f"sqlite:///{folder / 'mlflow.db'}",
        "num_prompts": 40,
        "max_new_tokens": 16,
        "explore": [0, 3, 6],
        "every_prompt": True,
        "steps": 20,
        "min_rounds": 10,
        "num_live_prompts": 3,
        "num_audit_prompts": 2,
    }
    (folder / "tiny.yaml").write_text(json.dumps(config))  # JSON is YAML
    made = Project(folder, ray_head)
    made.write_prompts(40)
    return made


@pytest.mark.timeout(1800)  # nine processes, each of which imports everything and loads the models anew
def test_a_run_that_is_killed_at_every_step_ends_as_if_it_never_was(project: Project) -> None:
    # After the step's work and before its record: what was done must be found, not done twice.
    for point in (f"after {step}" for step in STEPS):
        code, output = project.run(kill_at=point)
        assert code == -9, output
        if point == "after decide":
            (version,) = project.registry.versions(project.slug)
            assert "champion" in version.aliases and "graft.gate.decision" not in version.tags
    code, output = project.run()
    assert code == 0, output
    assert last_line(output).startswith("retrain: promoted v1: replay: challenger v1")
    with connect(project.folder / "store") as connection:
        counts = connection.execute("SELECT count(*), count(DISTINCT prompt_id) FROM sequences").fetchall()
    assert counts == [(40, 40)]
    (version,) = project.registry.versions(project.slug)
    assert version.aliases == ("challenger", "champion")
    assert version.tags["graft.drift"] == "unknown"
    assert version.tags["graft.gate.decision"] == "promoted" and version.tags["graft.gate.champion"] == "none"
    (end,) = (project.folder / "runs").glob("*/*/end.json")
    assert json.loads(end.read_text())["exit_code"] == 0
    page = (end.parent / "report.html").read_text()
    assert "promoted v1" in page and "data:image/" in page and "2 answers against transformers" in page
    assert "there is no champion yet" in page


def test_nothing_new(project: Project) -> None:
    code, output = project.run_here("--run-id", "idle")
    assert code == 0 and last_line(output).startswith("retrain: nothing new: 0 fresh prompts")
    assert "no drift seen (no traffic was recorded since" in output
    code, output = project.run_here("--run-id", "idle")
    assert code == 0 and "has ended already" in output


def test_sigterm_stops_and_the_next_start_goes_on_and_keeps_the_champion_against_its_equal(project: Project) -> None:
    project.write_prompts(52)
    command = [sys.executable, str(REPOSITORY / "jobs" / "retrain.py"), *project.arguments]
    process = subprocess.Popen(
        command, env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "to decode:" in line:
                os.kill(process.pid, signal.SIGTERM)
    assert process.returncode == 143, "".join(lines)
    (stopped,) = [path for path in (project.folder / "runs" / project.slug).glob("2*") if not has_ended(path)]
    code, output = project.run()
    assert code == 0 and last_line(output).startswith("retrain: kept v1 because"), output
    assert has_ended(stopped)
    assert project.registry.resolve(project.slug, "champion") == 1
    with connect(project.folder / "store") as connection:
        assert connection.execute("SELECT count(*) FROM sequences").fetchall() == [(52,)]


def has_ended(run: Path) -> bool:
    return (run / "end.json").is_file() and json.loads((run / "end.json").read_text())["exit_code"] == 0


def test_a_second_run_of_the_target_leaves(project: Project) -> None:
    lease = Lease(project.folder / "runs" / project.slug / "lease.json", "first")
    lease.acquire()
    try:
        code, output = project.run_here("--run-id", "late")
        assert code == 75 and "run first is at work" in output
        assert not (project.folder / "runs" / project.slug / "late").exists()
    finally:
        lease.release()


def test_a_step_that_cannot_work_is_the_last_line(project: Project) -> None:
    project.write_prompts(0)
    (project.folder / "prompts.jsonl").unlink()
    code, output = project.run_here("--run-id", "lost")
    assert code == 1 and last_line(output).startswith("retrain: failed at step choose: there is no prompt file")


def test_mistakes_are_one_sentence(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((project.folder / "tiny.yaml").read_text())
    del config["retrain"]
    (tmp_path / "bare.yaml").write_text(json.dumps(config))
    assert main(["--config", str(tmp_path / "bare.yaml")]) == 2
    assert "no section retrain: say with --prompts" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
