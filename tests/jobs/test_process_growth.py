"""A leak is found under noise and jumps, and what only fluctuates or warms up is none."""

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from jobs.process_growth import Growth, ProcessSample, growths, sample_process, theil_sen_slope

TIMES = np.arange(0.0, 1800.0, 10.0)


def samples_of(memory_mb: np.ndarray, num_files: int | np.ndarray = 40) -> list[ProcessSample]:
    files = np.broadcast_to(num_files, TIMES.shape)
    return [
        ProcessSample(float(at), 7, float(memory), int(count))
        for at, memory, count in zip(TIMES, memory_mb, files, strict=True)
    ]


def memory_of(samples: list[ProcessSample]) -> Growth:
    return next(growth for growth in growths(samples) if growth.quantity == "memory_mb")


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).normal(0.0, 4.0, len(TIMES))


def test_what_fluctuates_has_not_grown(noise: np.ndarray) -> None:
    growth = memory_of(samples_of(600.0 + noise))
    assert not growth.has_grown and abs(growth.growth) < 3.0
    assert growth.noise == pytest.approx(4.0, rel=0.3) and growth.median == pytest.approx(600.0, abs=2.0)


def test_a_steady_leak_has_grown(noise: np.ndarray) -> None:
    growth = memory_of(samples_of(600.0 + noise + 60.0 * TIMES / 1800.0))
    assert growth.has_grown and growth.growth == pytest.approx(48.0, rel=0.1)  # the first fifth is not looked at


def test_warming_up_and_single_spikes_are_no_leak(noise: np.ndarray) -> None:
    memory = 600.0 + noise - 300.0 * np.exp(-TIMES / 60.0)
    memory[-3:] += 500.0
    assert not memory_of(samples_of(memory)).has_grown


def test_one_leaked_file_per_minute_has_grown(noise: np.ndarray) -> None:
    found = {growth.quantity: growth for growth in growths(samples_of(600.0 + noise, 40 + (TIMES // 60).astype(int)))}
    assert found["num_files"].has_grown and not found["memory_mb"].has_grown


def test_too_few_samples_are_not_judged(noise: np.ndarray) -> None:
    assert growths(samples_of(600.0 + noise)[:20]) == []
    assert growths([]) == []


def test_the_slope_withstands_wild_points() -> None:
    values = 3.0 * TIMES
    values[::5] = 1e6
    assert theil_sen_slope(TIMES, values) == pytest.approx(3.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_this_process_can_be_looked_at() -> None:
    before = sample_process(os.getpid(), 1.5)
    assert before is not None and before.at_s == 1.5 and before.memory_mb > 10
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(open(os.devnull))
        after = sample_process(os.getpid(), 2.0)
    assert after is not None and 40 <= after.num_files - before.num_files <= 60  # other threads have files too
    assert sample_process(2**22 + 1, 0.0) is None
