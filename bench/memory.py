"""Peak memory of everything that a command starts: Ray's actors, a server's replica, training workers.

    python bench/memory.py --name collect [--out FOLDER] -- python jobs/collect.py --config smollm2-135m ...

Runs the command and looks twice a second at every process that it started, directly or not: they are found by a mark in
their environment, which is inherited. Shows each process's peak of resident memory (VmHWM, in MB of a million bytes;
memory that processes share counts in each). `--seconds` ends a command that would not end by itself, such as a server,
with an interrupt. With `--out` a row for each process is added to FOLDER/rows.jsonl. Linux only. The exit code is the
command's; 0 if it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.provenance import provenance

MARK = "GRAFT_BENCH_MEMORY"
LOOK_S = 0.5


def marked(mark: str) -> list[Path]:
    """The folders in /proc of processes whose environment holds the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is somebody else's
        if f"{MARK}={mark}".encode() in variables:
            found.append(entry)
    return found


def peak_mb(process: Path) -> float | None:
    """A process's peak of resident memory; None if it has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024 / 1e6


def title(process: Path) -> str:
    """What a process calls itself: Ray's have the class of their actor, others their program and script."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return ""
    if words and words[0].startswith("ray::"):
        return words[0].split(".")[0].split("(")[0]
    return " ".join(Path(word).name for word in words[:2])


def watch(command: Sequence[str], seconds: float | None) -> tuple[int, dict[int, tuple[str, float]]]:
    """Run a command; returns its exit code, and each process's title and peak by its number."""
    mark, peaks = uuid.uuid4().hex, dict[int, tuple[str, float]]()
    process = subprocess.Popen(command, env=os.environ | {MARK: mark}, start_new_session=True)
    deadline, was_interrupted = None if seconds is None else time.monotonic() + seconds, False
    try:
        while process.poll() is None:
            for entry in marked(mark):
                peak, name = peak_mb(entry), title(entry)
                if peak is not None and name:
                    before = peaks.get(int(entry.name), (name, 0.0))
                    # An idle worker of Ray's is called so until it is something.
                    peaks[int(entry.name)] = before[0] if name.startswith("ray::IDLE") else name, peak
            if deadline is not None and time.monotonic() > deadline and not was_interrupted:
                process.send_signal(signal.SIGINT)
                was_interrupted = True
            time.sleep(LOOK_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()
    return 0 if was_interrupted else process.returncode, peaks


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of what is measured, in the rows")
    parser.add_argument("--seconds", type=float, help="interrupt the command after so long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("command", nargs="+", help="behind --")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    chosen = arguments(words)
    code, peaks = watch(chosen.command, chosen.seconds)
    rows = [
        {"process": f"{chosen.name} {name}", "peak_mb": round(peak, 1)}
        for name, peak in sorted(peaks.values(), key=lambda entry: -entry[1])
    ]
    for row in rows:
        print(f"{row['peak_mb']:10.1f} MB  {row['process']}")
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        with (chosen.out / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        run = {"command": list(chosen.command), **provenance()}
        (chosen.out / f"{chosen.name}.run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
