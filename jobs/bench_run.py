"""A whole benchmark of one target: for each cell budgets are chosen and frozen, then everything is measured.

    OUT/TARGET/t0-b1/            what `graft bench` writes, for one temperature and batch: see bench_folder
    OUT/TARGET/t0-b1/tuning/     the same for the tuning prompts and all budgets
    OUT/TARGET/t0-b1/frozen.json the budget of each method, read off the tuning rows before the first measured prompt
    OUT/table.md                 the speed-ups of all cells

A run that was stopped goes on where it was, group by group; budgets that were frozen stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from graft_dist.bench import ALL_TASKS, BASELINE, Arm, Measurement, SummaryRow
from graft_dist.config import TargetConfig
from graft_dist.prompts import Prompt
from jobs.bench_command import shown
from jobs.bench_folder import BenchFolder
from jobs.bench_plan import BUDGETED_METHODS, BenchPlan, Cell, Group, grouped
from jobs.out_file import to_json, write_aside
from jobs.provenance import commit, provenance, public_config

_MIN_ITEMS = 5
"""Fewest work items for an interval to be shown: that of two or three is as good as none."""
_HEADS = ("method", "budget", "MAT", "tokens/s", "mismatch", "overhead ms", "decoding s", "end to end s")
_COLUMNS = {"mat": 2, "tokens_per_s": 1, "mismatch_rate": 3, "overhead_ms": 2, "decode_s": 1, "end_to_end_s": 1}
"""What the table shows of a summary's row over all prompts, with its digits, below the last of these heads."""


class Worker(Protocol):
    """What measures: a `BenchWorker`, here or behind a cluster."""

    def describe(self, cell: Cell) -> dict[str, Any]: ...
    def arms(self, methods: Sequence[str], budgets: Sequence[int]) -> list[Arm]: ...
    def measure(self, cell: Cell, arms: Sequence[Arm], turn: int, group: Group) -> list[Measurement] | str: ...


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One target's part of a plan."""

    plan: BenchPlan
    config: TargetConfig
    worker: Worker
    measured: list[Prompt]
    tuning: list[Prompt]  # none: all budgets are measured, and nobody chose among them
    out: Path
    say: Callable[[str], None] = _say

    def run(self) -> int:
        """Measure all cells; returns how many groups could not be decoded."""
        return sum(self._run_cell(cell) for cell in self.plan.cells)

    def _run_cell(self, cell: Cell) -> int:
        folder = self.out / self.config.slug / cell.name
        methods, num_failed = self.plan.methods_of(cell), 0
        frozen: dict[str, int] = {}
        if self.tuning:
            frozen, num_failed = self._freeze(cell, methods, folder)
        arms = [
            arm
            for arm in self.worker.arms(methods, self.plan.budgets)
            if arm.budget == frozen.get(arm.method, arm.budget) or arm.method in self.plan.all_budgets
        ]
        return num_failed + self._measure(cell, arms, self.measured, folder, {"frozen_budgets": frozen})[1]

    def _freeze(self, cell: Cell, methods: Sequence[str], folder: Path) -> tuple[dict[str, int], int]:
        """The budget of each method that takes one: chosen once, whatever is started again."""
        file = folder / "frozen.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8")), 0
        budgeted = [method for method in methods if method in BUDGETED_METHODS]
        if not budgeted:
            return {}, 0
        arms = self.worker.arms([BASELINE, *budgeted], self.plan.budgets)
        summary, num_failed = self._measure(cell, arms, self.tuning, folder / "tuning", {})
        frozen = best_budgets(summary)
        write_aside(file, to_json(frozen))
        self.say(f"{cell.name}: budgets frozen: {frozen}")
        return frozen, num_failed

    def _measure(
        self, cell: Cell, arms: Sequence[Arm], prompts: list[Prompt], path: Path, choices: dict[str, Any]
    ) -> tuple[list[SummaryRow], int]:
        folder = BenchFolder(path, arms)
        facts = self.worker.describe(cell)
        where = {key: facts.pop(key) for key in ("machine", "cost")}
        folder.open(self._settings(cell, arms, prompts) | facts | choices, provenance() | where)
        groups = list(enumerate(grouped(prompts, cell.batch)))
        waiting = [(turn, group) for turn, group in groups if _name(group) not in folder.done_prompts]
        for turn, group in waiting[: self.plan.warmup]:
            self.worker.measure(cell, arms, turn, group)
        num_failed = 0
        for turn, group in waiting:
            measured = self.worker.measure(cell, arms, turn, group)
            if isinstance(measured, str):
                self.say(f"{_name(group)} was left out: {measured}")
                num_failed += 1
                continue
            folder.append(measured)
            self.say(f"{path.relative_to(self.out)}: {len(folder.done_prompts)} of {len(groups)}")
        return folder.finish()[0], num_failed

    def _settings(self, cell: Cell, arms: Sequence[Arm], prompts: list[Prompt]) -> dict[str, Any]:
        listed = json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False).encode()
        return {
            "config": public_config(self.config),
            "arms": [asdict(arm) for arm in arms],
            "temperature": cell.temperature,
            "batch": cell.batch,
            "seed": self.plan.seed,
            "max_new_tokens": self.plan.max_new_tokens,
            "prompts_sha256": hashlib.sha256(listed).hexdigest(),
            "num_prompts": len(prompts),
            "commit": commit(),
        }


def _name(group: Group) -> str:
    return ",".join(prompt.id for prompt in group)


def best_budgets(summary: Iterable[SummaryRow]) -> dict[str, int]:
    """For each method that takes budgets the one with the largest speed-up over all prompts."""
    best: dict[str, SummaryRow] = {}
    for row in summary:
        if row.method in BUDGETED_METHODS and row.task == ALL_TASKS:
            held = best.get(row.method)
            if held is None or row.speedup > held.speedup:
                best[row.method] = row
    return {method: row.budget for method, row in best.items()}


def render_table(out: Path) -> str:
    """The speed-ups of every cell under `out`, by task; read from the cells' own summaries."""
    lines = []
    for file in sorted(out.glob("*/*/summary.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        tasks = [ALL_TASKS, *sorted({row["task"] for row in rows} - {ALL_TASKS})]
        lines += [f"## {file.parent.parent.name}, {file.parent.name}", ""]
        heads = [*_HEADS, *tasks]
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        frozen = _frozen(file.parent)
        for arm in dict.fromkeys((row["method"], row["budget"]) for row in rows):
            own = {row["task"]: row for row in rows if (row["method"], row["budget"]) == arm}
            if ALL_TASKS in own:
                lines.append(_table_line(own, tasks, is_frozen=frozen.get(arm[0]) == arm[1]))
        lines.append("")
    return "\n".join(
        [
            "Speed-up over plain decoding on the same prompts, and the middle 95 % when work items are drawn anew.",
            "In a folder tX-bY prompts were decoded Y at a time at temperature X, and such a group is one work item.",
            f"Below {_MIN_ITEMS} items no interval is shown. A star marks the budget that was chosen on other prompts.",
            "mismatch: rounds that stopped at a token which the tree had under another parent. overhead: milliseconds "
            "per round of a sequence beside drafting and verifying. end to end: with prefill, tokenising and one "
            "loading of the models.",
            "",
            *lines,
        ]
    )


def _frozen(cell_folder: Path) -> dict[str, int]:
    file = cell_folder / "frozen.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _table_line(own: dict[str, dict[str, Any]], tasks: Sequence[str], is_frozen: bool) -> str:
    whole = own[ALL_TASKS]
    cells = [whole["method"], f"{whole['budget']}{'*' if is_frozen else ''}"]
    cells += [shown(whole.get(column), digits) for column, digits in _COLUMNS.items()]
    cells += ["" if row is None else _speedup(row) for row in map(own.get, tasks)]
    return f"| {' | '.join(cells)} |"


def _speedup(row: dict[str, Any]) -> str:
    speedup = f"{row['speedup']:.2f}"
    if row["num_prompts"] < _MIN_ITEMS:
        return speedup
    return f"{speedup} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
