"""Answers to prompts: many sequences through one engine, and the row that `graft generate` writes for each.

Owns what one answer is (`Answer`) and how a list of prompts is kept flowing through an engine. Files and terminals
belong to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graft_dist.config import TargetConfig
from graft_dist.engine import Engine, SequenceEvent
from graft_dist.errors import PromptError
from graft_dist.prompts import BadPrompt, ChatTokenizer, Prompt, render
from graft_dist.rounds import FinishReason
from graft_dist.sampling import SamplingParams

TextListener = Callable[["Request", str], None]
"""Called with each piece of text as soon as it is certain."""


@dataclass(frozen=True)
class Request:
    """One prompt as the engine takes it."""

    prompt_id: str
    task: str
    token_ids: list[int]
    render_s: float = field(default=0.0, compare=False)  # what the chat template and the tokenizer took


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds spent in the stages of a sequence's rounds, summed over the rounds."""

    draft_ms: float = 0.0
    build_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What came back for one request.

    acceptance_lengths: tokens committed in each round; the first output token comes from the prompt's own forward pass
    and
        belongs to no round, so their sum is `len(token_ids) - 1`.
    decode_s: everything after the target's prefill, the drafter's prefill included.
    stages: of whole rounds, whoever shared them; shared_stages: each round's time divided by its sequences.
    num_mismatched: rounds whose walk stopped at a token that the tree had under another parent; None: not counted.
    total_s: by the clock, from the prompt's token ids to the last token and its text.
    """

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None
    acceptance_lengths: list[int]
    num_drafted: int
    prefill_s: float
    decode_s: float
    stages: StageTimes = field(default_factory=StageTimes)
    shared_stages: StageTimes = field(default_factory=StageTimes)
    num_mismatched: int | None = None
    total_s: float = 0.0

    @property
    def num_rounds(self) -> int:
        """Rounds that committed something."""
        return len(self.acceptance_lengths)

    def to_row(self) -> dict[str, Any]:
        """The JSON object that `graft generate --out` writes."""
        return {
            "id": self.request.prompt_id,
            "task": self.request.task,
            "prompt_token_ids": self.request.token_ids,
            "output_token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "num_rounds": self.num_rounds,
            "acceptance_lengths": self.acceptance_lengths,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
        }


def failed_answer(request: Request, error: str) -> Answer:
    """The answer to a prompt that could not be decoded, with the sentence that says why."""
    return Answer(request, [], "", "error", error, [], 0, 0.0, 0.0)


def to_request(prompt: Prompt | BadPrompt, tokenizer: ChatTokenizer, config: TargetConfig) -> Request:
    """The prompt in the target's chat template. Raises `PromptError` for a bad line or a template that refuses."""
    if isinstance(prompt, BadPrompt):
        raise PromptError(f"{prompt.id}: {prompt.error}")
    started = time.perf_counter()
    token_ids = render(tokenizer, prompt, config.system_prompt, config.enable_thinking)
    return Request(prompt.id, prompt.task, token_ids, time.perf_counter() - started)


def answer_all(
    engine: Engine,
    requests: Iterable[Request],
    params: SamplingParams,
    on_text: TextListener | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Answer]:
    """Decode `requests` with every slot of `engine` busy; answers come in the order in which they finish.

    A request that the engine refuses (too long, empty) becomes an answer with finish reason "error"; the rest goes on.
    `is_stopped` is asked before each round: once true, answers in hand end with the reason "abort" and no others begin.
    """
    waiting = iter(requests)
    active: dict[str, _Growing] = {}
    exhausted = False
    while True:
        while not exhausted and len(active) < engine.max_slots:
            request = next(waiting, None)
            if request is None:
                exhausted = True
                break
            try:
                active[engine.add(request.token_ids, params)] = _Growing(request)
            except ValueError as error:
                yield failed_answer(request, str(error))
        if not active:
            return
        if is_stopped():
            exhausted = True
            for sequence_id in active:
                engine.abort(sequence_id)
        for event in engine.step():
            growing = active[event.sequence_id]
            growing.take(event)
            if on_text is not None and event.text:
                on_text(growing.request, event.text)
            if event.finish_reason is not None:
                yield active.pop(event.sequence_id).finished(event)


class _Growing:
    """An answer while its events arrive."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = time.perf_counter()
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.acceptance_lengths: list[int] = []
        self.num_mismatched = 0
        self.shared_ms = [0.0] * 4

    def take(self, event: SequenceEvent) -> None:
        # The first token is the prefill's; every later event with tokens is one round.
        if self.token_ids and event.token_ids:
            self.acceptance_lengths.append(len(event.token_ids))
        self.token_ids += event.token_ids
        self.pieces.append(event.text)
        if event.trace is not None:
            trace = event.trace
            self.num_mismatched += trace.is_mismatch
            stages_ns = trace.draft_ns, trace.build_ns, trace.verify_ns, trace.commit_ns
            self.shared_ms = [
                ms + ns / trace.batch_size / 1e6 for ms, ns in zip(self.shared_ms, stages_ns, strict=True)
            ]

    def finished(self, event: SequenceEvent) -> Answer:
        assert event.finish_reason is not None
        summary = event.summary
        assert summary is not None, "the last event of a sequence carries its summary"
        return Answer(
            request=self.request,
            token_ids=self.token_ids,
            text="".join(self.pieces),
            finish_reason=event.finish_reason,
            error=event.error,
            acceptance_lengths=self.acceptance_lengths,
            num_drafted=summary.num_drafted,
            prefill_s=summary.prefill_s,
            decode_s=summary.decode_s,
            stages=StageTimes(
                draft_ms=summary.draft_s * 1e3,
                build_ms=summary.build_s * 1e3,
                verify_ms=summary.verify_s * 1e3,
                commit_ms=summary.commit_s * 1e3,
            ),
            shared_stages=StageTimes(*self.shared_ms),
            num_mismatched=self.num_mismatched,
            total_s=time.perf_counter() - self.started,
        )
