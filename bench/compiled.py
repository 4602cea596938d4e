"""Is there a faster way to run the target here? Its pass as we run it, as transformers does, and compiled, in turns.

    python bench/compiled.py [--config smollm2-135m] [--dtype float32] [--threads 2] [--rounds 12] [--rows 1,9,17]
        [--out FOLDER]

Each pass reads so many tokens in one sequence after 200 others, and computes the logits of all of them: 1 is a step of
plain decoding, 9 and 17 are as many rows as verifying 8 and 16 nodes has. Four ways:

    ours          `Target.forward`, as rounds are verified
    transformers  the unmodified model with PyTorch's attention and a static cache
    compiled      the same through `torch.compile`
    frozen        compiled with inductor's `freezing`, which lays the weights out for the kernels

Medians in milliseconds, and the seconds of each way's first pass, which for the last two is the compilation. `--out`
keeps every pass (raw.jsonl), the medians (summary.jsonl) and the machine (run.json). On a machine that does anything
else the numbers mean nothing.
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

import numpy as np
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from transformers import PreTrainedModel, StaticCache

from graft_dist.decoder import load_target
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target, tree_mask
from jobs.measurement_folder import keep_measurement
from jobs.measurement_options import chosen_config, target_parser

CONTEXT = 200
"""Tokens before a pass."""

MAX_LENGTH = 256
"""Of the static caches, whose every row takes part in attention: little more than is needed, in their favour."""

WAYS = ("ours", "transformers", "compiled", "frozen")

Pass = Callable[[], torch.Tensor]
"""Runs over its tokens and returns their logits [R, V]; each call begins after the same context."""


def our_pass(target: Target, token_ids: Sequence[int]) -> Pass:
    """A pass over the tokens after `CONTEXT`, none of which is committed."""
    num_rows = len(token_ids) - CONTEXT
    cache = target.new_cache(1, MAX_LENGTH)
    slot = cache.add()
    target.prefill(token_ids[:CONTEXT], cache, slot)
    ids = torch.tensor([token_ids[CONTEXT:]])
    rows = torch.arange(CONTEXT, CONTEXT + num_rows)[None]
    width = CONTEXT + num_rows
    seen = np.tri(num_rows, dtype=np.bool_)[None]

    def run() -> torch.Tensor:
        cache.begin(rows, width, slots=[slot])
        mask = tree_mask([CONTEXT], seen, width, target.dtype, target.device, target.groups)
        return target.forward(ids, rows, mask, cache).logits

    return run


def their_pass(model: PreTrainedModel, forward: Callable[..., Any], token_ids: Sequence[int]) -> Pass:
    """The same by `forward`, which is the model's own or compiled."""
    cache = StaticCache(config=model.config, max_cache_len=MAX_LENGTH)
    model(input_ids=torch.tensor([token_ids[:CONTEXT]]), cache=cache, use_cache=True)
    ids = torch.tensor([token_ids[CONTEXT:]])
    positions = torch.arange(CONTEXT, len(token_ids))[None]

    def run() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)
        output = forward(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
        logits: torch.Tensor = output.logits[0]
        return logits

    return run


def passes(target: Target, model: PreTrainedModel, num_rows: int, seed: int = 0) -> dict[str, Pass]:
    """A pass over the same random tokens by each way."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(target.vocab_size, (CONTEXT + num_rows,), generator=generator).tolist()
    compiled = torch.compile(model.forward, dynamic=False)
    return {
        "ours": our_pass(target, token_ids),
        "transformers": their_pass(model, model.forward, token_ids),
        "compiled": their_pass(model, compiled, token_ids),
        "frozen": their_pass(model, frozen_forward(model), token_ids),
    }


def frozen_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's forward, compiled with its weights as constants.

    The options of `torch.compile` reach the compiler alone; the tracer, which has to leave the weights in the graph,
    reads the setting itself. Without the options it would find code that was compiled without it. Needs `no_grad`.
    """
    compiled = torch.compile(model.forward, dynamic=False, options={"freezing": True})

    def forward(**inputs: Any) -> Any:
        with inductor_config.patch(freezing=True):
            return compiled(**inputs)

    return forward


@torch.no_grad()
def measure(target: Target, model: PreTrainedModel, sizes: Sequence[int], num_rounds: int) -> list[dict[str, Any]]:
    """A row for each size and way: seconds of the first pass, milliseconds of the others, and the logits' distance."""
    rows = []
    for num_rows in sizes:
        ways = passes(target, model, num_rows)
        first_s: dict[str, float] = {}
        logits = {}
        for way, run in ways.items():
            started = time.perf_counter()
            logits[way] = run().float()
            first_s[way] = time.perf_counter() - started
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(2 + num_rounds):
            for way, run in ways.items():
                started = time.perf_counter()
                run()
                if turn >= 2:  # the first two warm up
                    spent[way].append((time.perf_counter() - started) * 1e3)
        for way in ways:
            distance = float((logits[way] - logits["transformers"]).abs().max())
            rows.append(
                {"way": way, "rows": num_rows, "first_s": first_s[way], "max_difference": distance, "ms": spent[way]}
            )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way: median milliseconds by number of rows, and the seconds of its first passes together."""
    shown = []
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        cells = {f"rows_{row['rows']}": round(median(row["ms"]), 3) for row in own}
        shown.append({"way": way} | cells | {"first_s": round(sum(row["first_s"] for row in own), 1)})
    return shown


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = target_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 9, 17])
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    config = chosen_config(chosen).model_copy(update={"device": "cpu"})
    target = load_target(config)
    model = Reference.load(config, target, SamplingParams()).model
    with fresh_cache():  # nothing that was compiled before
        rows = measure(target, model, chosen.rows, chosen.rounds)
    shown = summary(rows)
    for row in shown:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if chosen.out is not None:
        settings = {"dtype": target.dtype_name, "threads": chosen.threads, "rounds": chosen.rounds, "rows": chosen.rows}
        keep_measurement(chosen.out, settings, rows, shown)


if __name__ == "__main__":
    main()
