"""The benchmark of a large store does every step of a small one; how long it takes is nobody's test."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "store_scale.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since it forks: a process of other tests has threads."""
    where = ["--store", str(folder / "store"), "--out", str(folder / "out")]
    command = [sys.executable, str(SCRIPT), *options, *where]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_step_leaves_a_row(tmp_path: Path) -> None:
    done = run(tmp_path, "--rounds", "2000")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "raw.jsonl").read_text().splitlines()]
    by_step = {(row["step"], row["state"]): row["result"] for row in rows}
    written = by_step["write", "empty"]["rounds"]
    assert written >= 2000
    learned, replayed = by_step["stream for training", "merged"], by_step["stream for replay", "merged"]
    assert 0 < learned["rounds"] < replayed["rounds"] < written
    assert learned["lessons_mb"] > 0 and learned["training_steps"] == 20 and not list(tmp_path.glob("*-training"))
    assert by_step["query: runs", "merged"] == {"rows": 8}
    assert by_step["forget a run", "merged"]["files"] == 2 and by_step["forget two days", "merged"]["files"] == 6
    table = (tmp_path / "out" / "summary.md").read_text()
    assert all(f"| {step} | {state} |" in table for step, state in by_step)
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["machine"] and about["options"]["process_memory"] == "4GB"
    goes_on_after_an_interruption(tmp_path, rows)


def goes_on_after_an_interruption(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Before the last two steps, which find the store as the steps after them have left it."""
    raw = folder / "out" / "raw.jsonl"
    raw.write_text("".join(raw.read_text().splitlines(keepends=True)[:-2]) + '{"step": "cut o')
    other = run(folder, "--rounds", "3000", "--memory", "1GB", "--resume")
    assert other.returncode == 2 and "were measured with --rounds 2000, --memory 2GB: --resume takes" in other.stderr
    done = run(folder, "--rounds", "2000", "--process-memory", "5GB", "--resume")
    assert done.returncode == 0, done.stderr
    steps = [(row["step"], row["state"]) for row in map(json.loads, raw.read_text().splitlines())]
    assert steps == [(row["step"], row["state"]) for row in rows]
    about = json.loads((folder / "out" / "run.json").read_text())
    assert about["options"]["process_memory"] == "4GB"
    (resumed,) = about["resumed"]
    assert (resumed["steps_before"], resumed["options"]["process_memory"]) == (len(rows) - 2, "5GB")
    assert f"4GB, 5GB from row {len(rows) - 1} on (RLIMIT_DATA)" in (folder / "out" / "summary.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere RLIMIT_DATA counts other memory, or none")
def test_a_step_that_wants_more_memory_than_it_may_have_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "--rounds", "200", "--process-memory", "20MB")
    assert done.returncode != 0 and "write (empty) failed" in done.stderr
    assert "| step | store |" in (tmp_path / "out" / "summary.md").read_text()
    again = run(tmp_path, "--rounds", "200", "--resume")
    assert again.returncode == 2 and "has no row to go on after" in again.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["machine"]


def test_a_limit_that_is_no_size_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--rounds", "200", "--process-memory", "much")
    assert done.returncode == 2 and "'much' is not a size such as 3GB" in done.stderr
