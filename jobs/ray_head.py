"""RayHead: a Ray head node with dashboard on this machine, as a child process that takes everything it started with it.

For the quickstart and for tests. Ports are free ones and the temporary folder is its own, so it neither disturbs nor
joins another Ray on the machine. Never uses `ray stop`, which would end every Ray of the user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from graft_dist.errors import GraftError

START_TIMEOUT_S = 120.0
START_TRIES = 3
STOP_TIMEOUT_S = 4.0


class RayHead:
    """A running head; a context manager. Raises `GraftError` when it does not come up."""

    def __init__(
        self,
        num_cpus: int | None = None,
        object_store_bytes: int = 150_000_000,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        options = [f"--object-store-memory={object_store_bytes}"]
        options += [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
        # Ray gives a node 30 s to register and then gives up, which a busy machine may not manage.
        for _ in range(START_TRIES):
            self._start(options, self.environment(environment))
            try:
                is_up = self._wait_until_up()
            except BaseException:
                self.stop()
                raise
            if is_up:
                return
            tail = " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])
            self.stop()
        raise GraftError(f"the local Ray head did not start, tried {START_TRIES} times: {tail}")

    def _start(self, options: list[str], environment: dict[str, str]) -> None:
        # Short: Ray puts sockets below it, whose paths may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="graft-ray-"))
        port, dashboard_port, *others = free_ports(4)
        self.address = f"127.0.0.1:{port}"
        self.dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        self._log = self.folder / "head.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=true"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"]
        command += [f"--dashboard-agent-listen-port={others[0]}", f"--ray-client-server-port={others[1]}"]
        command += [f"--temp-dir={self.folder}", "--disable-usage-stats", *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment | {"TMPDIR": str(self.folder)},  # the dashboard leaves folders behind when it is killed
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for the head and its clients: this machine only, so without authentication; no reporting.

        A job's `python` is this one, as it would be on a cluster.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        ours = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PATH": path}
        return os.environ | ours | dict(more or {})

    def stop(self) -> None:
        """End the head and everything it started; may be called twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        for _ in range(3):  # again, since a raylet may have started a worker meanwhile
            left = self._left()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_for_end(left, 3.0)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RayHead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _left(self) -> list[int]:
        """Processes of this head that still run: those in its session, and those that carry its folder's name."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            pid = int(entry.name)
            try:
                is_ours = (
                    os.getsid(pid) == self._process.pid or str(self.folder).encode() in (entry / "cmdline").read_bytes()
                )
            except (OSError, ProcessLookupError):
                continue
            if is_ours and pid != os.getpid():
                found.append(pid)
        return found

    def _wait_until_up(self) -> bool:
        """True once jobs can be submitted; False if the head has ended instead, or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            # The job server may answer before the node is registered, and the node be registered before it answers.
            if "Ray runtime started" in self._log.read_text(errors="replace"):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{self.dashboard_url}/api/jobs/", timeout=5).close()
                    return True
            time.sleep(0.3)
        return False


def free_ports(number: int) -> list[int]:
    """Different TCP ports of the loopback interface that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for_end(pids: list[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
