"""Where and with what something was measured: machine, versions, commit, command line. JSON-ready, for people to read.

Works anywhere; what cannot be found out is None.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graft_dist.config import TargetConfig
from graft_dist.hardware import cpu_name

PACKAGES = ("graft-dist", "torch", "transformers", "numba", "numpy", "ray", "duckdb", "deltalake")


def provenance() -> dict[str, Any]:
    """Machine, package versions, commit and command of this process."""
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [without_folder(argument) for argument in sys.argv],
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def without_folder(argument: str) -> str:
    """A path that leads out of the working directory as its name alone, also behind `--option=` and in a local URI.

    Results are published: whose home or scratch folder a file lay in is nobody's business.
    """
    option, _, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    if value.startswith(("sqlite:///", "file:///")):
        return argument.replace(value, f"{value.split('//')[0]}//{Path(value).name}")
    if not value.startswith(("/", "~", "..")):
        return argument
    return f"{option}={Path(value).name}" if option else Path(value).name


def file_identity(file: Path) -> dict[str, str]:
    """A file by its name and contents: where it lay is nobody's business, and says nothing to anyone else."""
    return {"name": file.name, "sha256": hashlib.sha256(file.expanduser().read_bytes()).hexdigest()}


def public_config(config: TargetConfig) -> dict[str, Any]:
    """A configuration as JSON, with models that lie in folders by the folders' names."""
    where = {"target": without_folder(config.target), "drafter": without_folder(config.drafter)}
    return config.model_dump(mode="json") | where


def machine() -> dict[str, Any]:
    """The hardware that decides speed. `torch_threads` is what this process uses."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": "-".join(filter(None, (platform.system(), platform.machine(), *platform.libc_ver()))),
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "gpus": gpus,
        "torch_threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the checkout this code runs from, with "-dirty" when tracked files differ; None outside of one."""
    folder = Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (OSError, ValueError, AttributeError):
        return None
