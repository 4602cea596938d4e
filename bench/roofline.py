"""What bounds the two forwards of a round here: the memory that is read, the multiplications, or everything between.

    python bench/roofline.py [--config smollm2-135m] [--dtype float32] [--threads 2] [--rounds 12] [--out FOLDER]

For passes of the target over 1, 9, 17, 33 and 65 rows (no tree, and trees of 8 to 64 nodes) and one of the drafter:
the weights that are read and the multiplications, each at the best rate that this machine shows (the sum of a large
tensor, the product of two large matrices); the matrix products alone, one after the other as in the pass; and the pass
as it is decoded. The larger of the first two is a bound that no program gets under; what the products alone take above
it is the library's, and the rest of the pass is ours. Medians in milliseconds. `--out` keeps every measurement
(raw.jsonl), the medians (summary.jsonl) and the machine (run.json).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn

from graft_dist.cost_probe import probe_rounds
from graft_dist.decoder import load_decoder
from graft_dist.drafter import DFlashDrafter
from graft_dist.fused_layer import FusedForward
from graft_dist.prompts import read_prompts, render, starter_prompts_path
from graft_dist.target import Target
from jobs.measurement_folder import keep_measurement
from jobs.measurement_options import chosen_config, target_parser

BUDGETS = (8, 16, 32, 64)
LARGE = 2048
"""Rows and columns of the product that shows the machine's best rate."""


def timed_ms(work: Callable[[], object], num_rounds: int) -> list[float]:
    """Milliseconds of each of some calls, after one that is not counted."""
    work()
    spent = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        work()
        spent.append((time.perf_counter() - started) * 1e3)
    return spent


def rates(dtype: torch.dtype, num_rounds: int) -> dict[str, list[float]]:
    """`read_gb_s`: memory read by two threads' sum; `gflop_s`: the product of two large matrices."""
    large = torch.ones(128 * 1024 * 1024, dtype=dtype)
    read = timed_ms(large.sum, num_rounds)
    left, right = torch.randn(LARGE, LARGE).to(dtype), torch.randn(LARGE, LARGE).to(dtype)
    product = timed_ms(lambda: left @ right, num_rounds)
    return {
        "read_gb_s": [large.numel() * large.element_size() / ms / 1e6 for ms in read],
        "gflop_s": [2 * LARGE**3 / ms / 1e6 for ms in product],
    }


def linears_of(model: nn.Module, head: nn.Linear) -> list[nn.Linear]:
    """The linear layers that a model's pass multiplies by, layer by layer, and the head that is used with them."""
    fused = [module.forward for module in model.modules() if isinstance(module.forward, FusedForward)]
    joined = {linear for forward in fused for linear in forward.joined}
    own: list[nn.Linear] = []
    for module in model.modules():
        if isinstance(module.forward, FusedForward):
            own += module.forward.products
        elif isinstance(module, nn.Linear) and module not in joined:
            own.append(module)
    return [*(module for module in own if module.out_features != head.out_features), head]


def products_ms(linears: Sequence[nn.Linear], num_rows: int, num_head_rows: int, num_rounds: int) -> list[float]:
    """Milliseconds of all products of a pass, without anything between them."""
    rows = [num_rows] * (len(linears) - 1) + [num_head_rows]
    inputs = [
        torch.randn(count, layer.in_features).to(layer.weight.dtype) for count, layer in zip(rows, linears, strict=True)
    ]

    def work() -> None:
        for layer, values in zip(linears, inputs, strict=True):
            layer(values)

    return timed_ms(work, num_rounds)


@torch.inference_mode()
def measure(target: Target, drafter: DFlashDrafter, num_rounds: int) -> list[dict[str, Any]]:
    """A row for each pass: its rows, bytes, multiplications, and every measurement of its products and of itself."""
    head = target.lm_head_of(torch.arange(target.vocab_size))
    draft_head = head if drafter.head.token_ids is None else target.lm_head_of(drafter.head.token_ids)
    prompts = [render(target.tokenizer, prompt) for prompt in read_prompts(starter_prompts_path())[::8]]
    records = probe_rounds(
        target, drafter, prompts, budgets=BUDGETS, num_candidates=16, num_rounds=num_rounds, limit_s=3600.0
    )
    rows = []
    for budget in (0, *BUDGETS):
        spent = [record.verify_ns / 1e6 for record in records if record.budget == budget]
        rows.append(_row(f"verify {budget}", linears_of(target.model, head), budget + 1, budget + 1, spent, num_rounds))
    block, depth = drafter.block_size, drafter.draft_depth
    spent = [record.draft_ns / 1e6 for record in records if record.budget > 0]
    rows.append(_row("draft", linears_of(drafter.model, draft_head), block, depth, spent, num_rounds))
    return rows


def _row(
    name: str, linears: Sequence[nn.Linear], num_rows: int, num_head_rows: int, pass_ms: list[float], num_rounds: int
) -> dict[str, Any]:
    sizes = [layer.weight.numel() for layer in linears]
    return {
        "pass": name,
        "rows": num_rows,
        "weight_bytes": sum(sizes) * linears[0].weight.element_size(),
        "flops": 2 * (num_rows * sum(sizes[:-1]) + num_head_rows * sizes[-1]),
        "products_ms": products_ms(linears, num_rows, num_head_rows, num_rounds),
        "pass_ms": pass_ms,
    }


def summary(machine: dict[str, list[float]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each pass: milliseconds to read its weights, to multiply, of its products, and of the whole of it."""
    read, flops = median(machine["read_gb_s"]), median(machine["gflop_s"])
    return [
        {
            "pass": row["pass"],
            "read": row["weight_bytes"] / read / 1e6,
            "multiply": row["flops"] / flops / 1e6,
            "products": median(row["products_ms"]),
            "whole": median(row["pass_ms"]),
            "read_gb_s": read,
            "gflop_s": flops,
        }
        for row in rows
    ]


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = target_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    target, drafter = load_decoder(chosen_config(chosen))
    assert drafter is not None
    machine = rates(target.dtype, chosen.rounds)
    rows = measure(target, drafter, chosen.rounds)
    shown = summary(machine, rows)
    for row in shown:
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if chosen.out is not None:
        settings = {"dtype": target.dtype_name, "threads": chosen.threads, "rounds": chosen.rounds}
        keep_measurement(chosen.out, settings, [machine, *rows], shown)


if __name__ == "__main__":
    main()
