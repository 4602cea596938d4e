"""Files that commands leave behind: whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from graft_dist.errors import GraftError


def check_out_file(path: Path, option: str = "--out") -> None:
    """Raise `GraftError` if no file can be written at `path`: to be said before the work, not after it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise GraftError(f"{option} is {path}, but there is no folder {folder}")
    if path.is_dir():
        raise GraftError(f"{option} is {path}, which is a folder: name a file")
    if path.exists() and not path.is_file():
        raise GraftError(f"{option} is {path}, which is a device and would be replaced: name a file")
    _check_writable(folder, path, option)


def make_out_folder(path: Path) -> None:
    """Make the folder `path`, or find it there. Raises `GraftError` if no file can be written in it."""
    if path.exists() and not path.is_dir():
        raise GraftError(f"--out is {path}, which is a file: name a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GraftError(f"--out is {path}, but that folder cannot be made ({error.strerror})") from error
    _check_writable(path, path, "--out")


def _check_writable(folder: Path, out: Path, option: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"graft")
    except OSError as error:
        raise GraftError(f"{option} is {out}, but nothing can be written there ({error.strerror})") from error


def to_json(value: Any) -> str:
    """Indented JSON with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_aside(path: Path, text: str) -> None:
    """Write a file beside its place, flush it to the disk and rename it: readers see the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
