"""The measurement of serving: whatever interrupts it, nothing that it started stays, and all that ran could write."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "serving.py"
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


@pytest.fixture
def serving() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("serving", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # As `main` does: where the tests run in the background, children would inherit that SIGINT is ignored.
    before = {number: signal.signal(number, module.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    yield module
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("what", ["command", "server"])
def test_a_signal_lets_what_runs_write_and_ends_it(
    serving: ModuleType, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
