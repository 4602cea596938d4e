"""`graft bench`: load once, let the arms take turns, keep every row, summarise."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graft_dist.bench import (
    ALL_TASKS,
    ORACLE,
    PEERS,
    Arm,
    Decoder,
    Measurement,
    SummaryRow,
    arms_for,
    check_baseline,
    run_prompts,
)
from graft_dist.config import TargetConfig
from graft_dist.decoder import load_timed
from graft_dist.drafter import DFlashDrafter
from graft_dist.errors import PolicyError
from graft_dist.generate import Request
from graft_dist.policy import COSTED_METHODS
from graft_dist.policy_maker import PolicyMaker
from graft_dist.prompts import BadPrompt, Prompt
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs.arm_decoder import ArmDecoder
from jobs.bench_folder import BenchFolder
from jobs.generate_command import new_maker, report_failures, to_requests
from jobs.out_file import make_out_folder
from jobs.policy_option import Learned, caps_of
from jobs.provenance import commit, file_identity, machine, provenance, public_config


def run_bench(  # noqa: PLR0913 - each argument is one option of the command
    config: TargetConfig,
    prompts: Sequence[Prompt | BadPrompt],
    prompt_file: Path,
    methods: Sequence[str],
    budgets: Sequence[int],
    params: SamplingParams,
    num_warmup: int,
    out: Path,
    learned: Learned,
) -> int:
    """Measure; returns the exit code: 0, or 1 if some prompt could not be measured on every arm."""
    check_baseline(methods)
    greedy = [method for method in methods if method in PEERS]
    if greedy and not params.is_greedy:
        raise PolicyError(f"the method {greedy[0]} is transformers' greedy generate: leave it out above temperature 0")
    make_out_folder(out)  # said before the models take their time to load
    target, drafter, loading = load_timed(config, *methods)
    maker = new_maker(config, target, drafter, learned)
    arms = arms_for(methods, budgets, drafter.draft_depth if drafter else 0, caps_of(learned))
    folder = BenchFolder(out, arms)
    settings = _settings(config, prompts, arms, params, target, drafter)
    settings |= {"policy_fingerprint": learned.fingerprint, "prompt_file": file_identity(prompt_file)}
    folder.open(settings, provenance() | _cost_of(maker, methods))
    requests, failed = to_requests(prompts, target.tokenizer, config)
    decoder = ArmDecoder(config, target, drafter, arms, params, maker, loading=loading)
    waiting = [(turn, request) for turn, request in enumerate(requests) if request.prompt_id not in folder.done_prompts]
    _warm_up(arms, [request for _, request in waiting[:num_warmup]], decoder.answer)
    exit_code = report_failures(failed)
    measuring = run_prompts(arms, waiting, decoder.answer, params.temperature, decoder.load_s)
    for request, measured, problem in measuring:
        if problem is not None:
            print(f"graft: {request.prompt_id} was left out: {problem}", file=sys.stderr, flush=True)
            exit_code = 1
            continue
        folder.append(measured)
        print(_progress_line(len(folder.done_prompts), len(requests), request, measured), file=sys.stderr, flush=True)
    summary, _ = folder.finish()
    print(render_overall(summary))
    print(f"rows, summary and tables of each task: {out}", file=sys.stderr)
    return exit_code


def _cost_of(maker: PolicyMaker, methods: Sequence[str]) -> dict[str, Any]:
    """The cost curve that budgets were chosen with, for people; measured here if need be, before anything is timed."""
    is_needed = any(method in (*COSTED_METHODS, "graft", ORACLE) for method in methods)
    return {"cost": asdict(maker.cost)} if is_needed else {}


def _warm_up(arms: Sequence[Arm], requests: Sequence[Request], decode: Decoder) -> None:
    """Compile, grow caches, touch memory; the rows are dropped and the prompts measured again."""
    for _ in run_prompts(arms, list(enumerate(requests)), decode):
        pass


def _settings(
    config: TargetConfig,
    prompts: Sequence[Prompt | BadPrompt],
    arms: Sequence[Arm],
    params: SamplingParams,
    target: Target,
    drafter: DFlashDrafter | None,
) -> dict[str, Any]:
    """What two runs must share for their rows to stand in one table."""
    listed = json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False).encode()
    return {
        "config": public_config(config),
        "arms": [asdict(arm) for arm in arms],
        "sampling": asdict(params),
        "prompts_sha256": hashlib.sha256(listed).hexdigest(),
        "num_prompts": len(prompts),
        "target_fingerprint": target.fingerprint,
        "dtype": target.dtype_name,
        "drafter_fingerprint": drafter.fingerprint if drafter else None,
        "threads": torch.get_num_threads(),
        "cpu": machine()["cpu"],
        "commit": commit(),
    }


def _progress_line(num_done: int, total: int, request: Request, measured: Sequence[Measurement]) -> str:
    rates = [
        f"{row.arm.name} {row.num_decoded / row.decode_s:.1f}"
        for row in sorted((measurement.raw for measurement in measured), key=lambda row: (row.method, row.budget))
        if row.decode_s > 0
    ]
    return f"{num_done} of {total}: {request.prompt_id}: tokens/s: {', '.join(rates)}"


def render_overall(summary: Sequence[SummaryRow]) -> str:
    """The rows over all prompts, aligned for a terminal; overhead in milliseconds per round, the last two seconds."""
    lines = [
        f"{'method':<12}{'budget':>7}{'speedup':>9}{'95 % interval':>17}{'MAT':>7}{'tokens/s':>10}{'prompts':>9}"
        f"{'mismatch':>10}{'overhead':>10}{'decoding':>10}{'end to end':>12}"
    ]
    for row in summary:
        if row.task == ALL_TASKS:
            interval = f"{row.speedup_low:.2f} to {row.speedup_high:.2f}"
            lines.append(
                f"{row.method:<12}{row.budget:>7}{row.speedup:>9.2f}{interval:>17}{shown(row.mat, 2):>7}"
                f"{row.tokens_per_s:>10.1f}{row.num_prompts:>9}{shown(row.mismatch_rate, 3):>10}"
                f"{shown(row.overhead_ms, 2):>10}{row.decode_s:>10.1f}{shown(row.end_to_end_s, 1):>12}"
            )
    return "\n".join(lines)


def shown(value: float | None, digits: int) -> str:
    """A number of a table, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"
