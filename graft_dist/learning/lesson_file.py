"""Lessons on disk: written in parts as rounds stream by, read back through memory maps.

What a round teaches takes a few kilobytes, and millions of rounds do not fit into memory. A folder holds each column as
plain numbers, one file each, and `lessons.json`, written last, with types and shapes. Nothing is loaded when it is
opened: the operating system reads the pages that a batch touches, and drops them when memory is wanted elsewhere.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from graft_dist.errors import PolicyError
from graft_dist.learning.tdes import Edges, Lessons, Pairs, Parents, Share

INDEX_NAME = "lessons.json"

_TABLES = {"parents": Parents, "edges": Edges, "pairs": Pairs}
# Smaller than in memory, where indices are int64; `rounds` are searched and stay what they are.
_INT32 = ("candidate_ids", "depths", "tokens", "parents", "children")


class LessonWriter:
    """Writes one worker's lessons into a new folder, part by part; the folder appears when the writer is closed whole.

    A context manager: left by an exception, it leaves nothing behind.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._aside = folder.with_name(folder.name + ".writing")
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        self._files: dict[str, BinaryIO] = {}
        self._columns: dict[str, dict[str, Any]] = {}
        self._num_rounds = 0

    def add(self, part: Lessons, numbers: npt.NDArray[np.int64]) -> None:
        """Append lessons; `numbers` [S], each once, are their places among the rounds of all workers."""
        self._append("numbers", numbers)
        self._append("candidate_ids", part.candidate_ids)
        self._append("log_probs", part.log_probs)
        if part.hidden is not None:
            self._append("hidden", part.hidden.astype(np.float16))
        for table in _TABLES:
            for field in fields(getattr(part, table)):
                column = getattr(getattr(part, table), field.name)
                if field.name == "rounds":
                    column = column + self._num_rounds
                self._append(f"{table}.{field.name}", column)
        self._num_rounds += len(part)

    def __enter__(self) -> LessonWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        if kind is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            return
        (self._aside / INDEX_NAME).write_text(json.dumps(self._columns, indent=1), encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._aside.rename(self._folder)

    def _append(self, name: str, values: npt.NDArray[Any]) -> None:
        kept = values.astype(np.int32 if name.split(".")[-1] in _INT32 else values.dtype, copy=False)
        if name not in self._files:
            self._files[name] = (self._aside / f"{name}.bin").open("wb")
            self._columns[name] = {"dtype": kept.dtype.str, "shape": [0, *kept.shape[1:]]}
        self._columns[name]["shape"][0] += len(kept)
        self._files[name].write(np.ascontiguousarray(kept).tobytes())


def open_share(folder: Path, num_rounds: int) -> Share:
    """Open what a `LessonWriter` wrote, as the share of one worker of `num_rounds` rounds.

    Raises:
        PolicyError: the folder is not one, or not whole.
    """
    try:
        columns = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        arrays = {name: _mapped(folder / f"{name}.bin", **column) for name, column in columns.items()}
    except (OSError, ValueError, TypeError) as error:
        raise PolicyError(f"the lessons in {folder} cannot be read ({' '.join(str(error).split())})") from error
    tables = {
        table: kind(**{field.name: arrays[f"{table}.{field.name}"] for field in fields(kind)})
        for table, kind in _TABLES.items()
    }
    lessons = Lessons(
        candidate_ids=arrays["candidate_ids"], log_probs=arrays["log_probs"], hidden=arrays.get("hidden"), **tables
    )
    numbers: npt.NDArray[np.int64] = np.array(arrays["numbers"])
    rows = np.argsort(numbers)  # they were written as they were read
    return Share(lessons, rows, numbers[rows], num_rounds)


def empty_lessons(depth: int, num_candidates: int, num_hidden: int) -> Lessons:
    """Lessons of no round: a worker's part where there are fewer sequences than workers."""
    nothing: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    chances = np.zeros((0, num_candidates), np.float32)
    two: npt.NDArray[np.int64] = np.zeros((0, 2), np.int64)
    return Lessons(
        candidate_ids=np.zeros((0, depth, num_candidates), np.int64),
        log_probs=np.zeros((0, depth, num_candidates), np.float32),
        hidden=np.zeros((0, depth, num_hidden), np.float16) if num_hidden else None,
        parents=Parents(nothing, nothing, nothing, chances, np.zeros(0, np.bool_)),
        edges=Edges(nothing, nothing, nothing, nothing, np.zeros(0, np.float32)),
        pairs=Pairs(nothing, nothing, two, two),
    )


def _mapped(file: Path, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if file.stat().st_size != size:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes instead of {size}")
    if size == 0:
        return np.zeros(shape, np.dtype(dtype))  # an empty file cannot be mapped
    # As a plain array: memmap's own class makes every indexing slower.
    return np.asarray(np.memmap(file, np.dtype(dtype), "r", shape=tuple(shape)))
