"""Recompute a benchmark's published numbers from its raw rows, with nothing but the standard library.

    python bench/verify.py FOLDER...

Each folder holds what `graft bench --out FOLDER` wrote. Every cell of `summary.json` that is a function of the rows
is computed again, in other code than the one that made it; the interval's bounds, which come from random
resampling, are checked against a resampling of our own. `summary.md` has to show the same numbers. Exit code 1, and
a line for each, when something differs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]

RELATIVE_TOLERANCE = 1e-9
INTERVAL_TOLERANCE = 0.05  # of the speed-up: two resamplings of the same rows differ by chance


def read_lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def key_of(row: Row) -> tuple[str, str, int]:
    return row["prompt_id"], row["method"], row["budget"]


def pairs_of(raw: list[Row], cell: Row) -> list[tuple[Row, Row]]:
    """Plain decoding's row and the arm's, for every prompt of the cell on which both decoded something."""
    plain = {row["prompt_id"]: row for row in raw if row["method"] == "plain"}
    pairs = []
    for row in raw:
        is_arm = (row["method"], row["budget"]) == (cell["method"], cell["budget"])
        if is_arm and cell["task"] in (row["task"], "all") and row["prompt_id"] in plain:
            pair = plain[row["prompt_id"]], row
            if all(one["num_output_tokens"] > 1 for one in pair):
                pairs.append(pair)
    return pairs


def speedup_of(pairs: list[tuple[Row, Row]]) -> float:
    seconds_per_token = [
        sum(pair[side]["decode_s"] for pair in pairs) / sum(pair[side]["num_output_tokens"] - 1 for pair in pairs)
        for side in (0, 1)
    ]
    return float(seconds_per_token[0] / seconds_per_token[1])


def recompute(raw: list[Row], outputs: dict[tuple[str, str, int], Row], cell: Row) -> Row:
    """The cell's numbers, the interval excepted."""
    pairs = pairs_of(raw, cell)
    own = [row for _, row in pairs]
    num_decoded = sum(row["num_output_tokens"] - 1 for row in own)
    num_rounds = sum(row["num_rounds"] for row in own)
    return {
        "speedup": speedup_of(pairs),
        "mat": num_decoded / num_rounds if num_rounds else None,
        "tokens_per_s": num_decoded / sum(row["decode_s"] for row in own),
        "mean_budget": sum(outputs[key_of(row)]["num_drafted"] for row in own) / num_rounds if num_rounds else 0.0,
        "num_prompts": len(pairs),
    }


def interval_of(pairs: list[tuple[Row, Row]], num_resamples: int = 1000) -> tuple[float, float]:
    generator = random.Random(1)
    ratios = sorted(speedup_of(generator.choices(pairs, k=len(pairs))) for _ in range(num_resamples))
    return ratios[int(0.025 * num_resamples)], ratios[int(0.975 * num_resamples) - 1]


def differences(folder: Path) -> list[str]:
    """One line for each number that does not follow from the rows."""
    raw = read_lines(folder / "raw.jsonl")
    outputs = {key_of(row): row for row in read_lines(folder / "outputs.jsonl")}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    tables = (folder / "summary.md").read_text(encoding="utf-8")
    found = [f"outputs.jsonl and raw.jsonl disagree on {key}" for key in _disagreeing(raw, outputs)]
    for cell in summary:
        name = f"{cell['method']} {cell['budget']} {cell['task']}"
        for column, value in recompute(raw, outputs, cell).items():
            if not _is_close(cell[column], value, RELATIVE_TOLERANCE):
                found.append(f"{name}: {column} is {cell[column]}, the rows give {value}")
        low, high = interval_of(pairs_of(raw, cell))
        for column, value in (("speedup_low", low), ("speedup_high", high)):
            if abs(cell[column] - value) > INTERVAL_TOLERANCE * cell["speedup"]:
                found.append(f"{name}: {column} is {cell[column]}, another resampling gives {value}")
        if _table_line(cell) not in tables:
            found.append(f"{name}: summary.md does not have the line of summary.json")
    return found


def _disagreeing(raw: list[Row], outputs: dict[tuple[str, str, int], Row]) -> list[tuple[str, str, int]]:
    return [
        key_of(row)
        for row in raw
        if key_of(row) not in outputs
        or len(outputs[key_of(row)]["acceptance_lengths"]) != row["num_rounds"]
        or sum(outputs[key_of(row)]["acceptance_lengths"]) != row["num_output_tokens"] - 1
    ]


def _is_close(first: float | None, second: float | None, tolerance: float) -> bool:
    if first is None or second is None:
        return first is second
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def _table_line(cell: Row) -> str:
    shown = [
        "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in cell.values()
    ]
    return f"| {' | '.join(shown)} |"


def main() -> int:
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders:
        print("usage: python bench/verify.py FOLDER...", file=sys.stderr)
        return 2
    failed = False
    for folder in folders:
        found = differences(folder)
        failed = failed or bool(found)
        print(f"{folder}: {'every number follows from the rows' if not found else f'{len(found)} differences'}")
        for line in found:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
