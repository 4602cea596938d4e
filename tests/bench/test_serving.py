"""The measurement of serving: what it claims, and that nothing stays, and all could write, whatever interrupts it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import serving
from graft_dist.config import TargetConfig

WAITING = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "ready").touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.5)
    (folder / "written").touch()
"""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """As `main` sets them: where the tests run in the background, children would inherit that SIGINT is ignored."""
    before = {number: signal.signal(number, serving.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_folder_that_is_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.arguments([str(tmp_path)])
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["command", "server"])
def test_a_signal_lets_what_runs_write_and_ends_it(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    monkeypatch.setattr(serving, "GRAFT", command)

    def serve() -> None:
        with serving.Server("tiny", "none", 1, tmp_path / "serve.log"):
            raise AssertionError("it never says where it is")

    act: Callable[[], object] = serve if what == "server" else lambda: serving.run(command)
    is_waited_for = threading.Event()

    class Watched(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            is_waited_for.set()
            return super().wait(timeout)

        def poll(self) -> int | None:
            is_waited_for.set()
            return super().poll()

    def interrupt() -> None:
        """As a supervisor would, once the command is there and waited for."""
        is_waited_for.wait()
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit) as caught:
        act()
    assert caught.value.code == 128 + signal.SIGTERM
    assert (tmp_path / "written").exists()


def row(load: str, ratio: float | None, low: float | None, high: float | None, differs: int = 0) -> dict[str, Any]:
    fields = {"throughput_ratio": ratio, "throughput_low": low, "throughput_high": high}
    return {"load": load, "arm": "graft", "differs_from_plain": differs} | fields


@pytest.mark.parametrize(
    ("rows", "is_float32", "shown"),
    [
        ([row("closed-1", 1.6, 1.5, 1.7), row("closed-16", 0.99, 0.97, 1.0)], True, [True] * 5),
        ([row("closed-1", 1.49, 1.4, 1.6)], False, [True, False]),
        ([row("closed-4", 0.98, 0.96, 0.999)], False, [False]),
        ([row("closed-4", 1.2, 1.1, 1.3, differs=1)], True, [True, False]),
        ([row("closed-4", 1.2, 1.1, 1.3, differs=1)], False, [True]),
        ([row("closed-4", 1.2, None, None)], False, [False]),  # one block has no interval
        ([row("closed-1", None, None, None)], False, [False, False]),
        ([row("poisson-0.1", 0.9, 0.8, 0.95), row("closed-4", 1.2, 1.1, 1.3) | {"arm": "ddtree"}], False, [False]),
    ],
)
def test_claims_are_judged_by_the_summary(rows: list[dict[str, Any]], is_float32: bool, shown: list[bool]) -> None:
    assert [claim.holds for claim in serving.judge(rows, "graft", is_float32)] == shown


@pytest.mark.ray
@pytest.mark.slow
def test_the_whole_measurement_of_a_tiny_target(
    reciting_config: TargetConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a relative configuration to the last line; how fast a tiny target is is nobody's claim."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(reciting_config.model_dump(mode="json")))
    lines = [{"id": f"p{index}", "task": "chat", "turns": [f"Question {index}?"]} for index in range(4)]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["out", "--config", "tiny.yaml", "--policy", "none", "--prompts", "prompts.jsonl", "--max-new-tokens", "8"]
    words += ["--concurrency", "2", "--rates", "20", "--blocks", "1", "--minutes", "0.05", "--soak-users", "2"]
    assert serving.main(words) == 1  # of one block nothing can be said
    said = capsys.readouterr().out
    assert "not shown: closed-2: default is not slower than plain: too few blocks" in said
    assert "shown: closed-2: default answers as plain does: 0 differ" in said
    for folder, load in (("load", "closed-2"), ("open", "poisson-20")):
        summary = json.loads((tmp_path / "out" / folder / "summary.json").read_text())
        assert {entry["arm"]: entry["load"] for entry in summary} == dict.fromkeys(["plain", "ddtree", "default"], load)
        assert all(entry["num_ok"] == entry["num_requests"] > 0 for entry in summary)
    soak = json.loads((tmp_path / "out" / "soak" / "soak.json").read_text())
    assert soak["num_compared"] > 0 and soak["problems"] == []
