"""The job itself: a plan through an actor on a Ray cluster of its own, and a cluster that is too small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graft_dist.config import TargetConfig
from graft_dist.prompts import is_held_out

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = Path(__file__).resolve().parents[2]


def benchmark(folder: Path, config: TargetConfig) -> subprocess.CompletedProcess[str]:
    """Run a small plan of two prompts, one of them held out."""
    questions = [f"add {index}" for index in range(40)]
    kinds = {is_held_out((question,)): question for question in questions}
    rows = [{"id": f"p{kind:d}", "task": "a", "turns": [question]} for kind, question in kinds.items()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    source = [{"path": "prompts.jsonl"}]
    plan = {"targets": [str(folder / "tiny.yaml")], "prompts": source, "tuning": source, "held_out": True}
    plan |= {"methods": ["plain", "ddtree"], "budgets": [2, 4], "max_new_tokens": 4, "warmup": 0}
    (folder / "plan.yaml").write_text(json.dumps(plan))
    command = [sys.executable, "jobs/benchmark.py", "--plan", str(folder / "plan.yaml"), "--address", "local"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    return subprocess.run(
        [*command, "--out", str(folder / "out")], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_a_plan_is_measured_by_an_actor(tmp_path: Path, tiny_config: TargetConfig) -> None:
    done = benchmark(tmp_path, tiny_config)
    assert done.returncode == 0, done.stderr
    [cell] = (tmp_path / "out" / tiny_config.slug).iterdir()
    ids = [
        {json.loads(line)["prompt_id"] for line in (folder / "raw.jsonl").open()} for folder in (cell, cell / "tuning")
    ]
    assert ids == [{"p1"}, {"p0"}]
    run = json.loads((cell / "run.json").read_text())
    assert run["settings"]["frozen_budgets"] == json.loads((cell / "frozen.json").read_text())
    assert run["machine"]["torch_threads"] == 1
    assert "| ddtree |" in (tmp_path / "out" / "table.md").read_text()


def test_a_cluster_that_is_too_small_is_said(tmp_path: Path, tiny_config: TargetConfig) -> None:
    done = benchmark(tmp_path, tiny_config.model_copy(update={"threads": 1000}))
    assert done.returncode == 2
    assert "1 benchmark actors need 1000 CPUs" in done.stderr
