"""The benchmark of a large store does every step of a small one; how long it takes is nobody's test."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "store_scale.py"


def test_every_step_leaves_a_row(tmp_path: Path) -> None:
    # In a process of its own, since it forks: a process of other tests has threads.
    where = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "2000", *where], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "raw.jsonl").read_text().splitlines()]
    by_step = {(row["step"], row["state"]): row["result"] for row in rows}
    written = by_step["write", "empty"]["rounds"]
    assert written >= 2000
    streamed = by_step["stream for training", "merged"]
    assert 0 < streamed["rounds"] < written and by_step["stream for replay", "merged"] == streamed
    assert by_step["query: runs", "merged"] == {"rows": 8}
    assert by_step["forget a run", "merged"]["files"] == 2 and by_step["forget two days", "merged"]["files"] == 6
    table = (tmp_path / "out" / "summary.md").read_text()
    assert all(f"| {step} | {state} |" in table for step, state in by_step)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["machine"]
