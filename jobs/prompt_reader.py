"""Reading prompt sources: JSONL and Parquet files, local or on the Hugging Face hub, as the same prompts everywhere.

The hub is read through `huggingface_hub`'s file system, file by file; no code of a data set is ever run.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet

from graft_dist.errors import PromptError
from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import BadPrompt, Prompt, read_prompts

TrafficReader = Callable[[PromptSource], Iterable[Prompt]]
"""Reads what users asked of a target; see `jobs/traffic_prompts.py`."""

_ROWS = 1024  # read from Parquet at a time
_HUB_FILES = ("**/*.parquet", "**/*.jsonl")  # of a data set, where the source names none


class FileSystem(Protocol):
    """The part of an fsspec file system that reading needs."""

    def glob(self, path: str) -> list[str]: ...
    def open(self, path: str, mode: str) -> IO[bytes]: ...


def read_sources(
    sources: Iterable[PromptSource], hub: FileSystem | None = None, traffic: TrafficReader | None = None
) -> Iterator[Prompt | BadPrompt]:
    """Read sources one after the other; a prompt that was there before under its id is left out.

    Another prompt with a taken id gets a free one: two data sets that both number their rows lose none.

    `hub` stands for the Hugging Face hub in tests; without `traffic`, sources of recorded traffic are refused.

    Raises:
        PromptError: a source that is not there, or cannot be read at all; a row that does not fill the templates.
    """
    seen: dict[str, object] = {}  # what stands under an id
    for source in sources:
        for prompt in islice(_read(source, hub, traffic), source.limit):
            content = prompt.turns if isinstance(prompt, Prompt) else prompt
            name = prompt.id
            while seen.setdefault(name, content) != content:
                name += "'"
            if seen[name] is content:
                yield replace(prompt, id=name)


def _read(source: PromptSource, hub: FileSystem | None, traffic: TrafficReader | None) -> Iterator[Prompt | BadPrompt]:
    if source.traffic is not None:
        if traffic is None:
            raise PromptError(f"recorded traffic ({source.traffic}) is a source of prompts for retraining only")
        yield from traffic(source)
        return
    if source.hub is not None:
        yield from _from_rows(source, _hub_rows(source, _hugging_face() if hub is None else hub))
        return
    assert source.path is not None
    paths = sorted(glob.glob(str(Path(source.path).expanduser()), recursive=True))
    if not paths:
        raise PromptError(f"there is no prompt file {source.path}")
    if source.turns is None and not any(path.endswith(".parquet") for path in paths):
        yield from read_prompts(paths)
        return
    yield from _from_rows(source, (row for path in paths for row in _local_rows(path)))


def _from_rows(source: PromptSource, rows: Iterable[Mapping[str, Any]]) -> Iterator[Prompt | BadPrompt]:
    for index, row in enumerate(rows):
        if source.turns is not None:
            yield source.prompt(row, index)
        else:
            yield _own_form(source, row, index)


def _own_form(source: PromptSource, row: Mapping[str, Any], index: int) -> Prompt | BadPrompt:
    turns, name, task = row.get("turns"), row.get("id"), row.get("task") or source.task
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns) and name:
        return Prompt(str(name), str(task), tuple(turns))
    return BadPrompt(f"{source.name}:{index}", index + 1, f"row {index} of {source.name} has no id and turns")


def _local_rows(path: str) -> Iterator[Mapping[str, Any]]:
    try:
        with open(path, "rb") as file:
            yield from _rows_of(file, path)
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read ({error.strerror or error})") from error


def _hub_rows(source: PromptSource, hub: FileSystem) -> Iterator[Mapping[str, Any]]:
    patterns = _HUB_FILES if source.files is None else (source.files,)
    try:
        found = [hub.glob(f"datasets/{source.hub}@{source.revision}/{pattern}") for pattern in patterns]
    except Exception as error:  # the hub's client raises errors of several libraries, and its own
        raise PromptError(f"the data set {source.hub} cannot be reached ({_first_line(error)})") from error
    if not any(found):
        raise PromptError(f"the data set {source.hub} at {source.revision} has no files {' or '.join(patterns)}")
    for path in sorted({path for paths in found for path in paths}):
        try:
            with hub.open(path, "rb") as file:
                yield from _rows_of(file, path)
        except PromptError:
            raise
        except Exception as error:
            raise PromptError(f"{path} of the data set {source.hub} cannot be read ({_first_line(error)})") from error


def _rows_of(file: IO[bytes], path: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a Parquet file, else of a JSONL file."""
    if not path.endswith(".parquet"):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise PromptError(f"line {number} of {path} is not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise PromptError(f"line {number} of {path} is no JSON object")
            yield row
        return
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=_ROWS):
            yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise PromptError(f"{path} is no Parquet file ({_first_line(error)})") from error


def _hugging_face() -> FileSystem:
    from huggingface_hub import HfFileSystem

    return HfFileSystem()  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
