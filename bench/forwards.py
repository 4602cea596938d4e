"""Time the two forwards of a round with plain and with packed weights, taking turns in one process.

    python bench/forwards.py [--config smollm2-135m] [--dtype float32] [--threads 2] [--turns 6] [--out FOLDER]

One sequence, trees of 0, 8, 16, 32 and 64 nodes; medians in milliseconds. `--out` keeps every round's times
(raw.jsonl), the medians (summary.jsonl) and the machine they were taken on (run.json). On a machine that does anything
else the numbers mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from torch import nn

from graft_dist.config import TargetConfig
from graft_dist.cost_probe import probe_rounds
from graft_dist.decoder import load_decoder
from graft_dist.packed_linear import PackedLinear
from graft_dist.prompts import read_prompts, render, starter_prompts_path
from jobs.measurement_folder import keep_measurement
from jobs.measurement_options import chosen_config, target_parser

BUDGETS = (8, 16, 32, 64)


@contextmanager
def plain_weights() -> Iterator[None]:
    """A block in which packed layers compute as `nn.Linear` does."""
    packed = PackedLinear.forward
    PackedLinear.forward = nn.Linear.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedLinear.forward = packed  # type: ignore[method-assign]


def measure(config: TargetConfig, num_turns: int) -> list[dict[str, Any]]:
    """A row per round: `weights`, `budget`, `draft_ms`, `verify_ms`."""
    target, drafter = load_decoder(config)
    assert drafter is not None
    prompts = [render(target.tokenizer, prompt) for prompt in read_prompts(starter_prompts_path())[::8]]
    rows = []
    for turn in range(2 * num_turns):
        weights = ("plain", "packed")[turn % 2]
        with plain_weights() if weights == "plain" else nullcontext():
            records = probe_rounds(
                target, drafter, prompts, budgets=BUDGETS, num_candidates=16, num_rounds=4, limit_s=3600.0
            )
        for record in records:
            milliseconds = {"draft_ms": record.draft_ns / 1e6, "verify_ms": record.verify_ns / 1e6}
            rows.append({"weights": weights, "budget": record.budget} | milliseconds)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kind of weights: medians of verification by budget and of drafting, in milliseconds."""
    medians = []
    for weights in ("plain", "packed"):
        own = [row for row in rows if row["weights"] == weights]
        cells: dict[str, Any] = {"weights": weights}
        for budget in sorted({row["budget"] for row in own}):
            cells[f"verify_{budget}"] = round(median(row["verify_ms"] for row in own if row["budget"] == budget), 3)
        cells["draft"] = round(median(row["draft_ms"] for row in own if row["budget"] > 0), 3)
        medians.append(cells)
    return medians


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = target_parser(__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    rows = measure(chosen_config(chosen), chosen.turns)
    medians = summary(rows)
    for row in medians:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if chosen.out is not None:
        settings = {"dtype": chosen.dtype, "threads": chosen.threads, "turns": chosen.turns}
        keep_measurement(chosen.out, settings, rows, medians)


if __name__ == "__main__":
    main()
