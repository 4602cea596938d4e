"""Peak memory of what a command starts: grandchildren too, and after they have let go of it."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "memory.py"
CHILD = "import time; big = bytearray(200_000_000); big = None; time.sleep(1.5)"
PARENT = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {CHILD!r}], start_new_session=True))"


@pytest.fixture
def memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_peak_of_a_grandchild_in_a_session_of_its_own_is_seen(memory: ModuleType, tmp_path: Path) -> None:
    assert memory.main(["--name", "child", "--out", str(tmp_path), "--", sys.executable, "-c", PARENT]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) >= 2 and rows[0]["peak_mb"] > 200 > rows[1]["peak_mb"] > 0
    assert all(row["process"].startswith("child python") for row in rows)
    assert json.loads((tmp_path / "child.run.json").read_text())["machine"]["cpu"]


def test_a_command_that_does_not_end_is_interrupted(memory: ModuleType) -> None:
    forever = "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    raise SystemExit(3)"
    assert memory.main(["--name", "server", "--seconds", "1", "--", sys.executable, "-c", forever]) == 0


def test_the_commands_exit_code_is_kept(memory: ModuleType) -> None:
    assert memory.main(["--name", "bad", "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
