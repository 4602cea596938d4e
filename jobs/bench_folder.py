"""The folder that `graft bench --out` writes.

    run.json       what was run: settings, machine, versions, commit, command
    raw.jsonl      one row per prompt and arm, appended as soon as a prompt is done
    outputs.jsonl  the tokens, acceptance lengths and verified nodes behind each raw row
    summary.json   computed from the two at the end, as are the tables in summary.md
    comparisons.jsonl  the same of learned methods over others that draft, where both were measured

A run that was stopped goes on where it was, prompt by prompt, when it is started again with the same settings; a prompt
whose rows are not all there is measured again, so that its arms always ran side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graft_dist.bench import Arm, Measurement, OutputRow, RawRow, SummaryRow, compare, render_markdown, summarise
from graft_dist.errors import GraftError
from jobs.out_file import make_out_folder, to_json, write_aside


class BenchFolder:
    """One benchmark's files. Construction reads what is there; nothing is written before `open`."""

    def __init__(self, path: Path, arms: Sequence[Arm]) -> None:
        self.path = path
        self.arms = list(arms)
        self.raw: list[RawRow] = []
        self.outputs: list[OutputRow] = []

    def open(self, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Start the folder, or take up an earlier run with equal `settings`.

        Raises `GraftError` when the folder holds a run with other settings.
        """
        make_out_folder(self.path)
        settings = json.loads(json.dumps(settings))
        earlier = self._read_run()
        if earlier is None:
            write_aside(self.path / "run.json", to_json({"settings": settings, **provenance, "resumed": []}))
        else:
            self._check_same(earlier["settings"], settings)
            resumed = [*earlier["resumed"], provenance]
            write_aside(self.path / "run.json", to_json({**earlier, "resumed": resumed}))
        self._keep_whole_prompts()

    @property
    def done_prompts(self) -> set[str]:
        """Ids of the prompts that every arm was measured on."""
        return {row.prompt_id for row in self.raw}

    def append(self, measured: Sequence[Measurement]) -> None:
        """Add one prompt's rows, those of all arms."""
        self.raw += [measurement.raw for measurement in measured]
        self.outputs += [measurement.output for measurement in measured]
        _append_lines(self.path / "outputs.jsonl", [asdict(measurement.output) for measurement in measured])
        _append_lines(self.path / "raw.jsonl", [asdict(measurement.raw) for measurement in measured])

    def finish(self) -> tuple[list[SummaryRow], str]:
        """Write the summary; returns its rows and its tables."""
        summary = summarise(self.raw, self.outputs)
        compared = compare(self.raw)
        tables = render_markdown(summary, compared, self.raw, self.outputs)
        write_aside(self.path / "summary.json", to_json([asdict(row) for row in summary]))
        if compared:
            write_aside(self.path / "comparisons.jsonl", _to_lines([asdict(row) for row in compared]))
        write_aside(self.path / "summary.md", tables)
        return summary, tables

    def _read_run(self) -> dict[str, Any] | None:
        file = self.path / "run.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        if (self.path / "raw.jsonl").exists():
            raise GraftError(
                f"{self.path} holds a raw.jsonl without the run.json that says what it is: use another folder"
            )
        return None

    def _check_same(self, earlier: dict[str, Any], settings: dict[str, Any]) -> None:
        differing = sorted(key for key in {*earlier, *settings} if earlier.get(key) != settings.get(key))
        if differing:
            key = differing[0]
            raise GraftError(
                f"{self.path} holds a benchmark with {key} {earlier.get(key)!r}, not {settings.get(key)!r}: "
                "repeat that one's settings to go on with it, or use another folder"
            )

    def _keep_whole_prompts(self) -> None:
        raw = {(row.prompt_id, row.arm): row for row in _read_rows(self.path / "raw.jsonl", RawRow)}
        outputs = {
            (row.prompt_id, Arm(row.method, row.budget)): row
            for row in _read_rows(self.path / "outputs.jsonl", OutputRow)
        }
        both = raw.keys() & outputs.keys()
        whole = {key for key in both if all((key[0], arm) in both for arm in self.arms)}
        self.raw = [row for key, row in raw.items() if key in whole]
        self.outputs = [row for key, row in outputs.items() if key in whole]
        write_aside(self.path / "raw.jsonl", _to_lines([asdict(row) for row in self.raw]))
        write_aside(self.path / "outputs.jsonl", _to_lines([asdict(row) for row in self.outputs]))


def _to_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _append_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_to_lines(rows))


def _read_rows(path: Path, kind: type[Any]) -> list[Any]:
    """The rows of a JSONL file; a last line that a stopped process left unfinished is dropped."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [kind(**json.loads(line)) for line in text.split("\n")[:-1]]
