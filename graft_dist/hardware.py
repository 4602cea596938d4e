"""The hardware that timings belong to, as one line of text: the key under which cost curves are kept."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def describe_hardware(dtype: str, device: torch.device | None = None) -> str:
    """Return what decides the speed of this process, such as "AMD EPYC 7B13 with AVX2, 2 threads, bfloat16".

    A CPU counts with the instructions and the threads that PyTorch uses now: virtual machines give many processors one
    name, "AMD EPYC" with and without AVX512 alike. A GPU counts by its name. `dtype` is the models' number format;
    `device` None means a GPU where there is one.
    """
    is_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    if is_cuda:
        return f"{torch.cuda.get_device_name(device)}, {dtype}"
    threads = torch.get_num_threads()
    name = f"{cpu_name() or 'unknown CPU'} with {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}, {dtype}"


def cpu_name() -> str | None:
    """Return the processor's name; None where it cannot be found out."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
