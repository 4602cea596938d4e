"""`graft generate`: answers on the terminal as they arrive, or as JSON lines in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from graft_dist.config import TargetConfig
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.drafter import DFlashDrafter
from graft_dist.engine import Engine
from graft_dist.errors import GraftError
from graft_dist.generate import Answer, Request, answer_all, failed_answer, to_request
from graft_dist.policy_maker import PolicyMaker
from graft_dist.prompts import BadPrompt, ChatTokenizer, Prompt
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs.out_file import check_out_file, write_aside
from jobs.policy_option import Learned


def run_generate(
    config: TargetConfig,
    prompts: Sequence[Prompt | BadPrompt],
    method: str,
    budget: int | None,
    params: SamplingParams,
    out: Path | None,
    slots: int,
    learned: Learned,
) -> int:
    """Answer the prompts; returns the exit code: 0, or 1 if some prompt could not be answered.

    Without `out`, answers go to the terminal one after the other, whatever `slots` says.
    """
    if out is not None:
        check_out_file(out)
    engine = load_engine(config, method, budget, learned, max_slots=1 if out is None else slots)
    requests, answers = to_requests(prompts, engine.target.tokenizer, config)
    if out is None:
        printer = AnswerPrinter(several=len(prompts) > 1)
        answers += printer.print_all(answer_all(engine, requests, params, on_text=printer.print_text))
    else:
        answers += _with_progress(answer_all(engine, requests, params), len(requests))
        by_id = {answer.request.prompt_id: answer for answer in answers}
        rows = [json.dumps(by_id[prompt.id].to_row(), ensure_ascii=False) for prompt in prompts]
        write_aside(out, "".join(f"{row}\n" for row in rows))
    return report_failures(answers)


def load_engine(config: TargetConfig, method: str, budget: int | None, learned: Learned, max_slots: int) -> Engine:
    """The engine of a command that decodes by one method, with models and policy loaded."""
    target, drafter = load_decoder(config, method)
    policy = new_maker(config, target, drafter, learned).make(method, budget)
    # Under a memory limit the engine makes room for the largest tree: the budget asked for, or the policy's own.
    largest = max(
        config.budget, *config.budgets, budget or 0, 0 if learned.policy is None else learned.policy.max_budget
    )
    return new_engine(config, target, drafter, policy, max_slots=max_slots, max_budget=largest)


def new_maker(
    config: TargetConfig, target: Target, drafter: DFlashDrafter | None, learned: Learned, num_slots: int = 1
) -> PolicyMaker:
    """What makes the policies of a command's methods; measuring costs is said on stderr."""
    return PolicyMaker(
        target,
        drafter,
        config.num_candidates,
        learned=learned.policy,
        cost=learned.cost,
        num_slots=num_slots,
        say=lambda line: print(f"graft: {line}", file=sys.stderr, flush=True),
    )


def report_failures(answers: Sequence[Answer]) -> int:
    """Name the prompts without an answer on stderr; returns 1 if there are any, else 0."""
    failed = [answer for answer in answers if answer.finish_reason == "error"]
    for answer in failed:
        print(f"graft: no answer to {answer.request.prompt_id}: {answer.error}", file=sys.stderr)
    return 1 if failed else 0


def to_requests(
    prompts: Sequence[Prompt | BadPrompt], tokenizer: ChatTokenizer, config: TargetConfig
) -> tuple[list[Request], list[Answer]]:
    """Render the prompts; those that cannot be rendered come back as failed answers."""
    requests: list[Request] = []
    failed: list[Answer] = []
    for prompt in prompts:
        try:
            requests.append(to_request(prompt, tokenizer, config))
        except GraftError as error:
            task = prompt.task if isinstance(prompt, Prompt) else "other"
            failed.append(failed_answer(Request(prompt.id, task, []), str(error)))
    return requests, failed


def describe(answer: Answer) -> str:
    """One line of numbers about an answer; rates are over the rounds, the prompt's own pass excluded."""
    num_decoded = sum(answer.acceptance_lengths)
    line = f"{len(answer.token_ids)} tokens, prefill {answer.prefill_s:.2f} s, decoding {answer.decode_s:.2f} s"
    if num_decoded and answer.decode_s > 0:
        rate, mat = num_decoded / answer.decode_s, num_decoded / answer.num_rounds
        line += f" ({rate:.1f} tokens/s), {answer.num_rounds} rounds, MAT {mat:.2f}"
    return f"{line}, finished by {answer.finish_reason}"


class AnswerPrinter:
    """Text to stdout as it arrives, a line of numbers about each answer to stderr, dim on a terminal."""

    def __init__(self, several: bool = False) -> None:
        self.several = several
        self.current: str | None = None

    def print_text(self, request: Request, text: str) -> None:
        if self.several and request.prompt_id != self.current:
            print(f"== {request.prompt_id}")
        self.current = request.prompt_id
        print(text, end="", flush=True)

    def print_all(self, arriving: Iterable[Answer]) -> list[Answer]:
        answers: list[Answer] = []
        for answer in arriving:
            if answer.finish_reason != "error":
                print(flush=True)
                typer.secho(f"[{describe(answer)}]", dim=True, err=True)
            answers.append(answer)
        return answers


def _with_progress(arriving: Iterable[Answer], total: int) -> list[Answer]:
    answers: list[Answer] = []
    for answer in arriving:
        answers.append(answer)
        if sys.stderr.isatty():
            print(f"\r{len(answers)} of {total} prompts", end="", file=sys.stderr, flush=True)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"\r{len(answers)} prompts answered, {num_tokens} tokens", file=sys.stderr)
    return answers
