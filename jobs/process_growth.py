"""Memory and open files of processes over time, and whether they grow: by a robust slope, not by first against last.

Reads Linux's /proc, so processes of this machine only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WARM_UP = 0.2
"""Part of a run, from its start, that is left out: caches fill, compilers run."""
MIN_SAMPLES = 20
"""Fewer are not judged."""


@dataclass(frozen=True)
class ProcessSample:
    """One look at one process."""

    at_s: float  # since the start of the run
    pid: int
    memory_mb: float  # resident set
    num_files: int  # open file descriptors


@dataclass(frozen=True)
class Growth:
    """What one quantity of one process did after warming up.

    growth: the Theil-Sen slope (median of the slopes between any two samples) times the time it was watched. noise: the
    standard deviation of what the line leaves, estimated by the median. It grew if `growth` is above `allowed`: three
    times the noise, at least 2 % of the median, at least the quantity's own smallest amount that counts.
    """

    pid: int
    quantity: str  # "memory_mb" or "num_files"
    num_samples: int
    median: float
    growth: float
    noise: float
    allowed: float

    @property
    def has_grown(self) -> bool:
        return self.growth > self.allowed


SMALLEST = {"memory_mb": 16.0, "num_files": 4.0}
"""Growth over a run below this is nothing: an allocator's arena, a log file, a connection."""


def sample_process(pid: int, at_s: float) -> ProcessSample | None:
    """Look at a process; None if it is gone or not ours to look at."""
    folder = Path("/proc") / str(pid)
    try:
        status = (folder / "status").read_text(encoding="utf-8")
        num_files = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    memory = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return ProcessSample(at_s, pid, int(memory[0]) / 1024, num_files) if memory else None  # a zombie has none


def growths(samples: Sequence[ProcessSample]) -> list[Growth]:
    """How every process's memory and open files developed; those with too few samples are left out."""
    found = []
    for pid in sorted({sample.pid for sample in samples}):
        own = [sample for sample in samples if sample.pid == pid]
        first, last = own[0].at_s, own[-1].at_s
        own = [sample for sample in own if sample.at_s >= first + WARM_UP * (last - first)]
        if len(own) >= MIN_SAMPLES:
            found += [growth_of(own, quantity) for quantity in SMALLEST]
    return found


def growth_of(samples: Sequence[ProcessSample], quantity: str) -> Growth:
    """The growth of one quantity over samples of one process, of at least two moments."""
    times = np.array([sample.at_s for sample in samples])
    values = np.array([getattr(sample, quantity) for sample in samples], np.float64)
    slope = theil_sen_slope(times, values)
    residuals = values - slope * times
    noise = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    median = float(np.median(values))
    return Growth(
        pid=samples[0].pid,
        quantity=quantity,
        num_samples=len(samples),
        median=median,
        growth=slope * float(times[-1] - times[0]),
        noise=noise,
        allowed=max(3 * noise, 0.02 * median, SMALLEST[quantity]),
    )


def theil_sen_slope(times: np.ndarray, values: np.ndarray) -> float:
    """The median of the slopes between any two points; nearly a third of the points may be wild."""
    first, second = np.triu_indices(len(times), k=1)
    steps = times[second] - times[first]
    is_apart = steps > 0
    return float(np.median((values[second] - values[first])[is_apart] / steps[is_apart]))
