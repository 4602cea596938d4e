"""Time how fast a target answers prompts for training a drafter: the engine and transformers' own batches, in turns.

    python bench/answering.py OUT.json --prompts FILE.jsonl [--config smollm2-135m] [--dtype float32] [--slots 64]
        [--max-new-tokens 128] [--limit 64] [--turns 2] [--threads 2]

Both arms answer the same prompts greedily, in one process with the same threads: the engine decodes plainly with
`--slots` slots, as `jobs/train_drafter.py` lets it; `generate` of the unmodified model takes as many prompts at a time,
padded on the left. Only tokens up to and including an answer's stop token count, but the seconds are of everything,
reading the prompts included. OUT.json gets a row for each arm and turn, how many answers both arms gave alike in the
last turn (in bfloat16 a batch's shape decides how numbers are rounded), and the machine. On a machine that does
anything else the numbers mean nothing. Not covered: Ray and the store, which `jobs/collect.py --summary` measures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import GenerationConfig

from graft_dist.config import TargetConfig
from graft_dist.decoder import load_target, new_engine
from graft_dist.engine import Engine
from graft_dist.errors import PromptError
from graft_dist.generate import Request, answer_all, to_request
from graft_dist.policy import plain
from graft_dist.prompts import read_prompts
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs.measurement_options import chosen_config, target_parser
from jobs.out_file import to_json
from jobs.provenance import provenance

Row = dict[str, Any]
Arm = Callable[[Sequence[Request], int], list[list[int]]]
"""Answers prompts with at most so many tokens each: ids up to and including the stop token, in the prompts' order."""

WARM_UP_TOKENS = 4


def engine_answers(engine: Engine, requests: Sequence[Request], max_new_tokens: int) -> list[list[int]]:
    """The engine's answers; its slots are filled again as they fall free."""
    answers = {}
    for answer in answer_all(engine, requests, SamplingParams(max_new_tokens=max_new_tokens)):
        assert answer.error is None, answer.error
        answers[answer.request.prompt_id] = answer.token_ids
    return [answers[request.prompt_id] for request in requests]


@torch.inference_mode()
def batched_answers(
    reference: Reference, batch: int, requests: Sequence[Request], max_new_tokens: int
) -> list[list[int]]:
    """The answers of transformers' `generate`, `batch` prompts at a time."""
    stops, device = reference.stop_token_ids, reference.model.device
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
    )
    answers = []
    for start in range(0, len(requests), batch):
        prompts = [request.token_ids for request in requests[start : start + batch]]
        longest = max(map(len, prompts))
        ids = [[settings.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        produced = reference.model.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=settings,
        )
        answers += [up_to_stop(row, stops) for row in produced[:, longest:].tolist()]
    return answers


def up_to_stop(token_ids: list[int], stops: Sequence[int]) -> list[int]:
    """The tokens up to and including the first of `stops`; all where there is none."""
    end = next((index + 1 for index, token in enumerate(token_ids) if token in stops), len(token_ids))
    return token_ids[:end]


def load_arms(config: TargetConfig, target: Target, num_slots: int) -> dict[str, Arm]:
    """Both arms by name; transformers' has the target's weights once more."""
    engine = new_engine(config, target, None, plain(), max_slots=num_slots, max_budget=0, detokenize=False)
    reference = Reference.load(config, target, SamplingParams())
    return {"engine": partial(engine_answers, engine), "transformers": partial(batched_answers, reference, num_slots)}


def read_requests(file: Path, config: TargetConfig, target: Target, max_new_tokens: int, limit: int) -> list[Request]:
    """The first `limit` prompts that leave room for whole answers. Raises `PromptError` if there is none."""
    room = min(config.max_length, target.max_position_embeddings) - max_new_tokens
    every = (to_request(prompt, target.tokenizer, config) for prompt in read_prompts(file))
    requests = list(islice((request for request in every if len(request.token_ids) <= room), limit))
    if not requests:
        raise PromptError(f"{file} has no prompt of at most {room} tokens")
    return requests


def measure(
    arms: Mapping[str, Arm], requests: Sequence[Request], max_new_tokens: int, num_turns: int
) -> tuple[list[Row], int]:
    """A row per turn and arm, and how many answers all arms gave alike in the last turn."""
    for answer in arms.values():
        answer(requests[:1], WARM_UP_TOKENS)  # the engine's first round compiles
    rows, latest = [], {}
    for turn in range(num_turns):
        for name, answer in arms.items():
            started = time.perf_counter()
            latest[name] = answer(requests, max_new_tokens)
            seconds = time.perf_counter() - started
            num_tokens = sum(map(len, latest[name]))
            counts = {"num_prompts": len(requests), "num_output_tokens": num_tokens}
            rows.append(
                {"arm": name, "turn": turn} | counts | {"seconds": seconds, "tokens_per_s": num_tokens / seconds}
            )
            print(f"{name:12} turn {turn}: {num_tokens} tokens, {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s")
    num_alike = sum(all(one == answers[0] for one in answers) for answers in zip(*latest.values(), strict=True))
    return rows, num_alike


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = target_parser(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    config = chosen_config(chosen)
    about = provenance()
    target = load_target(config)
    requests = read_requests(chosen.prompts, config, target, chosen.max_new_tokens, chosen.limit)
    rows, num_alike = measure(load_arms(config, target, chosen.slots), requests, chosen.max_new_tokens, chosen.turns)
    print(f"{num_alike} of {len(requests)} answers are the same in both arms, in {target.dtype_name}")
    settings = {
        "target": config.slug,
        "dtype": target.dtype_name,
        "slots": chosen.slots,
        "max_new_tokens": chosen.max_new_tokens,
        "threads": chosen.threads,
    }
    kept = {"settings": settings, **about, "num_alike": num_alike, "rows": rows}
    chosen.out.write_text(to_json(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
