"""Decode with draft vocabularies of several sizes, taking turns on every prompt in one process.

    python bench/draft_vocabulary.py --store DIR --prompts FILE [--sizes 8192,12288,16384,24576] [--out FOLDER]

The vocabularies are counted on the store as `jobs/draft_vocabulary.py` does it; size 0 is the whole vocabulary. DDTree
with the configuration's budget, one sequence at a time, greedy. `--out` keeps a row per prompt and size (raw.jsonl),
the sums (summary.jsonl) and the machine (run.json). On a machine that does anything else the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from graft_dist.config import load_config
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.draft_head import DraftHead
from graft_dist.policy import ddtree
from graft_dist.prompts import Prompt, read_prompts, render
from graft_dist.rounds import RoundTrace
from graft_dist.sampling import SamplingParams
from jobs.draft_vocabulary import choose_tokens, count_tokens
from jobs.measurement_folder import keep_measurement


def measure(chosen: Any) -> Iterator[dict[str, Any]]:
    """A row per prompt and size: `rounds`, `tokens`, and milliseconds of drafting and of whole rounds.

    Raises `RuntimeError` if a float32 answer depends on the vocabulary.
    """
    config = load_config(chosen.config)
    target, drafter = load_decoder(config)
    assert drafter is not None
    counts = count_tokens(chosen.store, config.slug)
    heads, coverage = {0: DraftHead(target)}, {0: 1.0}
    for size in chosen.sizes:
        vocabulary = choose_tokens(counts, size, target.vocab_size)
        heads[size], coverage[size] = DraftHead(target, vocabulary.token_ids), vocabulary.coverage
    prompts = [prompt for prompt in read_prompts(chosen.prompts) if isinstance(prompt, Prompt)]
    # The first prompt comes once more before anything counts: whoever is first pays for compilation and cold caches.
    for turn, prompt in enumerate([prompts[0], *prompts[: chosen.limit]], start=-1):
        answers = set()
        sizes = list(heads)
        for size in sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]:
            drafter.head = heads[size]
            engine = new_engine(config, target, drafter, ddtree(config.budget, config.num_candidates), max_slots=1)
            engine.add(render(target.tokenizer, prompt), SamplingParams(max_new_tokens=chosen.max_new_tokens))
            token_ids: list[int] = []
            traces: list[RoundTrace] = []
            while engine.has_work:
                for event in engine.step():
                    token_ids += event.token_ids
                    traces += [event.trace] if event.trace is not None else []
            answers.add(tuple(token_ids))
            if turn < 0:
                continue
            yield {
                "prompt_id": prompt.id,
                "task": prompt.task,
                "size": size,
                "coverage": round(coverage[size], 6),
                "rounds": len(traces),
                "tokens": sum(trace.num_tokens for trace in traces),
                "draft_ms": sum(trace.draft_ns for trace in traces) / 1e6,
                "round_ms": sum(t.draft_ns + t.build_ns + t.verify_ns + t.commit_ns for t in traces) / 1e6,
            }
        if target.dtype == torch.float32 and len(answers) > 1:
            raise RuntimeError(f"the answers to prompt {prompt.id} depend on the draft vocabulary")


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each size: acceptance length, milliseconds a round, tokens per second, and that over size 0's."""

    def total(size: int, name: str) -> float:
        return float(sum(row[name] for row in rows if row["size"] == size))

    def rate(size: int) -> float:
        return 1e3 * total(size, "tokens") / total(size, "round_ms")

    return [
        {
            "size": size,
            "mat": round(total(size, "tokens") / total(size, "rounds"), 4),
            "draft_ms": round(total(size, "draft_ms") / total(size, "rounds"), 3),
            "round_ms": round(total(size, "round_ms") / total(size, "rounds"), 3),
            "tokens_per_s": round(rate(size), 3),
            "ratio": round(rate(size) / rate(0), 4),
        }
        for size in sorted({row["size"] for row in rows})
    ]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--store", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--sizes", type=_sizes, default=(8192, 12288, 16384, 24576))
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    torch.set_num_threads(chosen.threads)
    rows = list(measure(chosen))
    sums = summary(rows)
    for row in sums:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if chosen.out is not None:
        settings = {name: str(value) for name, value in vars(chosen).items() if name not in ("store", "prompts", "out")}
        keep_measurement(chosen.out, settings, rows, sums)


if __name__ == "__main__":
    main()
