"""Peak memory of what a command starts: grandchildren too, and after they have let go of it."""

import json
import sys
from pathlib import Path

from bench.memory import main

CHILD = "import time; big = bytearray(200_000_000); big = None; time.sleep(1.5)"
PARENT = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {CHILD!r}], start_new_session=True))"


def test_the_peak_of_a_grandchild_in_a_session_of_its_own_is_seen(tmp_path: Path) -> None:
    assert main(["--name", "child", "--out", str(tmp_path), "--", sys.executable, "-c", PARENT]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) >= 2 and rows[0]["peak_mb"] > 200 > rows[1]["peak_mb"] > 0
    assert all(row["process"].startswith("child python") for row in rows)
    assert json.loads((tmp_path / "child.run.json").read_text())["machine"]["cpu"]


def test_a_command_that_does_not_end_is_interrupted() -> None:
    forever = "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    raise SystemExit(3)"
    assert main(["--name", "server", "--seconds", "1", "--", sys.executable, "-c", forever]) == 0


def test_the_commands_exit_code_is_kept() -> None:
    assert main(["--name", "bad", "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
