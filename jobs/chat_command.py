"""`graft chat`: a conversation on the terminal, whose answers are streamed as `graft generate` streams them.

Owns the messages so far: each turn renders them anew, and the engine reads them anew.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer

from graft_dist.config import TargetConfig
from graft_dist.engine import Engine
from graft_dist.generate import Request, answer_all
from graft_dist.prompts import render_messages
from graft_dist.sampling import SamplingParams
from jobs.generate_command import AnswerPrinter, load_engine, report_failures
from jobs.policy_option import Learned

_HINT = "/reset forgets the conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer"

Message = dict[str, str]
"""`role` and `content`, as chat templates take them."""


def run_chat(config: TargetConfig, method: str, budget: int | None, params: SamplingParams, learned: Learned) -> int:
    """Answer the user's turns until they end; returns the exit code, 0."""
    conversation = _Conversation(load_engine(config, method, budget, learned, max_slots=1), config, params)
    for text in _user_turns():
        if text == "/reset":
            conversation.reset()
        else:
            conversation.answer(text)
    return 0


class _Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, engine: Engine, config: TargetConfig, params: SamplingParams) -> None:
        self._engine, self._config, self._params = engine, config, params
        self._messages: list[Message] = []  # user and assistant in turns, without the system message

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = []

    def answer(self, text: str) -> None:
        """Stream the answer to the user's next message; Ctrl-C ends it early. A message without an answer is undone."""
        messages, token_ids = self._within_context([*self._messages, {"role": "user", "content": text}])
        request, printer = Request("this message", "chat", token_ids), AnswerPrinter()
        with _noted_interrupt() as is_interrupted:
            arriving = answer_all(self._engine, [request], self._params, printer.print_text, is_interrupted)
            answers = printer.print_all(arriving)
        if report_failures(answers) == 0:
            self._messages = [*messages, {"role": "assistant", "content": answers[0].text}]

    def _within_context(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The newest of the messages that leave room for an answer, at least the last, and their token ids."""
        for start in range(0, len(messages), 2):
            token_ids = self._render(messages[start:])
            if self._leaves_room(len(token_ids)):
                break
        if start > 0:
            left_out = f"its {start} oldest messages are left out"
            limit = self._engine.max_length
            print(f"graft: the conversation no longer fits the {limit} tokens of context: {left_out}", file=sys.stderr)
        return messages[start:], token_ids

    def _render(self, messages: list[Message]) -> list[int]:
        config = self._config
        return render_messages(self._engine.target.tokenizer, messages, config.system_prompt, config.enable_thinking)

    def _leaves_room(self, num_tokens: int) -> bool:
        """Whether a whole answer fits behind so many tokens; one that may be very long, to a quarter of the context."""
        longest, limit = self._params.max_new_tokens, self._engine.max_length
        return num_tokens + min(longest, limit // 4) <= limit and self._engine.fits(min(num_tokens + longest, limit))


def _user_turns() -> Iterator[str]:
    """What the user types, a turn a line, until /exit or the end of stdin; with a prompt where that is a terminal."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        with suppress(ImportError):  # not on every system
            import readline  # noqa: F401 - gives input() arrow keys and a history
        typer.secho(_HINT, dim=True, err=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        while (text := input(prompt).strip()) != "/exit":
            if text:
                yield text
    except EOFError:
        pass
    finally:
        if prompt:
            print()  # Ctrl-D and Ctrl-C leave the cursor behind the prompt


@contextmanager
def _noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed inside, where it raises nothing: the engine must not end in a round's middle.

    Pressed once more it raises KeyboardInterrupt as ever, for an answer that does not stop.
    """
    is_interrupted = False

    def note(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)
