"""The numbers that are published in bench/ follow from the rows beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graft_dist.bench import Arm, Measurement, to_measurement
from graft_dist.generate import Answer, Request
from jobs.bench_folder import BenchFolder

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted(file.parent for file in (ROOT / "bench").rglob("summary.json"))


def verify(*folders: Path) -> subprocess.CompletedProcess[str]:
    # -S -I: without site-packages, so that it shows that the standard library is enough.
    command = [sys.executable, "-S", "-I", "bench/verify.py", *map(str, folders)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_numbers_follow_from_their_rows(folder: Path) -> None:
    done = verify(folder)
    assert done.returncode == 0, done.stdout


def measurements(index: int) -> list[Measurement]:
    request = Request(f"p{index}", "ab"[index % 2], [1, 2])
    tokens = list(range(13))
    plain = Answer(request, tokens, "", "length", None, [1] * 12, 0, 0.1, 1.0 + 0.1 * index)
    tree = Answer(request, tokens, "", "length", None, [3] * 4, 32, 0.1, 0.5 + 0.07 * (index % 3))
    return [to_measurement(Arm("plain", 0), plain), to_measurement(Arm("ddtree", 8), tree)]


def test_true_numbers_pass_and_each_false_one_is_named(tmp_path: Path) -> None:
    folder = BenchFolder(tmp_path, [Arm("plain", 0), Arm("ddtree", 8)])
    folder.open({}, {})
    for index in range(8):
        folder.append(measurements(index))
    folder.finish()
    assert verify(tmp_path).returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for column in ("speedup", "speedup_low", "mat", "tokens_per_s", "mean_budget", "num_prompts"):
        false = [{**row, column: row[column] * 2} for row in summary]
        (tmp_path / "summary.json").write_text(json.dumps(false))
        done = verify(tmp_path)
        assert done.returncode == 1
        assert f"ddtree 8 all: {column} is" in done.stdout
