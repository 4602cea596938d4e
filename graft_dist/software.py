"""The software that decides what is computed, as one line of text."""

from __future__ import annotations

from importlib import metadata

_PACKAGES = ("graft-dist", "torch", "transformers")


def describe_software() -> str:
    """Return the versions, such as "graft-dist 0.1.0, torch 2.13.0, transformers 5.24.0"."""
    return ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
