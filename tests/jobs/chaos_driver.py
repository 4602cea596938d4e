"""A collection driver with one planned accident: `chaos_driver.py ACTION:POINT:COUNT ARGUMENTS-OF-COLLECT...`

At the COUNT-th call of failpoint POINT it does ACTION: `kill` this process, `kill-actors` of the head at RAY_ADDRESS,
`kill-all` of these, `term` (SIGTERM to itself), or `pause` until the file in CHAOS_GO exists.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from jobs.collect import main


def actor_pids() -> list[int]:
    """The actors of this driver's Ray head: children of the raylet that has its port on the command line."""
    port = os.environ["RAY_ADDRESS"].rpartition(":")[2]
    raylets = set()
    workers = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if "raylet/raylet" in command and f":{port}" in command:
            raylets.add(int(entry.name))
        if command.startswith("ray::CollectActor"):
            workers.append((int(entry.name), parent))
    return [pid for pid, parent in workers if parent in raylets]


def act(action: str) -> None:
    if action == "pause":
        print("chaos: paused", flush=True)
        while not Path(os.environ["CHAOS_GO"]).exists():
            time.sleep(0.05)
    if action in ("kill-actors", "kill-all"):
        pids = actor_pids()
        assert pids, "no actor found"
        for pid in pids:
            with suppress(ProcessLookupError):  # one of a driver that was killed before, on its way out
                os.kill(pid, signal.SIGKILL)
    if action in ("kill", "kill-all"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "term":
        os.kill(os.getpid(), signal.SIGTERM)


class Plan:
    """Acts once, at the chosen call of the chosen failpoint."""

    def __init__(self, text: str) -> None:
        self.action, self.point, count = text.split(":")
        self.num_left = int(count)

    def __call__(self, point: str) -> None:
        self.num_left -= point == self.point
        if point == self.point and self.num_left == 0:
            act(self.action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Plan(sys.argv[1])))
