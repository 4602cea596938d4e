"""`graft chat` as a user types it, with a tiny target and a fake drafter in place of what the configuration names."""

import io
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from graft_dist.engine import Engine, SequenceEvent
from graft_dist.generate import Answer, Request, answer_all
from graft_dist.policy import ddtree, plain
from graft_dist.prompts import render_messages
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs import chat_command, cli
from tests.conftest import FakeDrafter

NUM_NEW = 12


class ListeningEngine(Engine):
    """Keeps the prompts it is given, and calls `on_step` with the number of the step before each."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heard: list[list[int]] = []
        self.num_steps = 0
        self.on_step: Callable[[int], None] = lambda number: None

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sequence_id: str | None = None) -> str:
        added = super().add(prompt_token_ids, params, sequence_id)
        self.heard.append(list(prompt_token_ids))
        return added

    def step(self) -> list[SequenceEvent]:
        self.num_steps += 1
        self.on_step(self.num_steps)
        return super().step()


class Terminal(io.StringIO):
    """A stdin that says it is a terminal; Ctrl-C is pressed where the text has \x03."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:
        line = super().readline(size)
        if "\x03" in line:
            raise KeyboardInterrupt
        return line


Chat = Callable[..., int]


@pytest.fixture
def engine(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> ListeningEngine:
    """The engine that the command gets."""
    return use_engine(tiny_llama, monkeypatch)


def use_engine(target: Target, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ListeningEngine:
    made = ListeningEngine(target, FakeDrafter(target), ddtree(8), max_slots=1, **options)
    monkeypatch.setattr(chat_command, "load_engine", lambda *arguments, **options: made)
    return made


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Run the command on what a user types, or on a stdin; returns the exit code."""
    (tmp_path / "tiny.yaml").write_text(json.dumps({"target": "./x", "drafter": "./y"}))

    def run(typed: str | io.TextIOBase, *options: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed) if isinstance(typed, str) else typed)
        fixed = ["--config", f"{tmp_path}/tiny.yaml", "--max-new-tokens", str(NUM_NEW), "--ignore-eos"]
        return cli.run(["chat", *fixed, *options])

    return run


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer_to(target: Target, messages: list[dict[str, str]]) -> Answer:
    """Plain decoding's answer to a conversation."""
    request = Request("reference", "chat", render_messages(target.tokenizer, messages))
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    return next(answer_all(Engine(target, None, plain(), max_slots=1), [request], params))


def talk(target: Target, *texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation as it should go."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for text in texts:
        messages.append(user(text))
        messages.append({"role": "assistant", "content": answer_to(target, messages).text})
    return messages


def test_each_turn_follows_from_the_whole_conversation(
    chat: Chat, engine: ListeningEngine, tiny_llama: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("add two\n\n  and three \n", "--system", "be brief") == 0
    messages = talk(tiny_llama, "add two", "and three", system="be brief")
    shown = capsys.readouterr()
    assert shown.out == f"{messages[2]['content']}\n{messages[4]['content']}\n"  # no prompt characters either
    assert engine.heard == [render_messages(tiny_llama.tokenizer, messages[:end]) for end in (2, 4)]
    lines = shown.err.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"\[12 tokens, .* tokens/s\), \d+ rounds, MAT .*, finished by length\]", x) for x in lines)


def test_reset_forgets_the_conversation_but_not_the_system_message(
    chat: Chat, engine: ListeningEngine, tiny_llama: Target
) -> None:
    assert chat("one\n/reset\ntwo\n/exit\nthree\n", "--system", "be brief") == 0
    first = {"role": "system", "content": "be brief"}
    assert engine.heard == [render_messages(tiny_llama.tokenizer, [first, user(text)]) for text in ("one", "two")]


def test_ctrl_c_stops_an_answer_which_stays_as_the_models_turn(
    chat: Chat, engine: ListeningEngine, tiny_llama: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine.on_step = lambda number: signal.raise_signal(signal.SIGINT) if number == 3 else None
    assert chat("one\ntwo\n") == 0
    assert signal.getsignal(signal.SIGINT) is before
    shown = capsys.readouterr()
    assert "finished by abort" in shown.err.splitlines()[0] and "finished by length" in shown.err.splitlines()[1]
    whole = answer_to(tiny_llama, [user("one")]).text
    prefixes = {whole[:end] for end in range(len(whole))}
    heard = tiny_llama.tokenizer.decode(engine.heard[1])
    found = re.search(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", heard, re.DOTALL)
    assert found and found[1] and found[1] in prefixes
    assert shown.out.startswith(f"{found[1]}\n")


def test_ctrl_c_twice_in_an_answer_ends(
    chat: Chat, engine: ListeningEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_twice(number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        engine.on_step = press_twice
        assert chat("one\ntwo\n") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "graft: interrupted\n"


def test_at_a_terminal_there_is_a_prompt_and_ctrl_d_ends(
    chat: Chat, engine: ListeningEngine, tiny_llama: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(Terminal("one\n")) == 0
    shown = capsys.readouterr()
    assert shown.out == f"> {answer_to(tiny_llama, [user('one')]).text}\n> \n"
    assert "/reset" in shown.err.splitlines()[0] and "Ctrl-C" in shown.err.splitlines()[0]


def test_ctrl_c_at_the_prompt_ends(chat: Chat, engine: ListeningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Terminal("\x03\n")) == 130
    assert engine.heard == []
    assert capsys.readouterr().err.endswith("\ngraft: interrupted\n")


def least_bytes(engine: Engine, num_tokens: int) -> int:
    """The smallest memory limit, to a kilobyte, under which a sequence of `num_tokens` fits."""
    for engine.memory_limit_bytes in range(0, 1 << 30, 1 << 10):
        if engine.fits(num_tokens):
            return engine.memory_limit_bytes
    raise AssertionError("no limit is large enough")


@pytest.mark.parametrize("limit", ["context", "memory"])
def test_the_oldest_turns_make_room(
    limit: str,
    chat: Chat,
    tiny_llama: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"max_length": 200}
    if limit == "memory":
        options = {"memory_limit_bytes": least_bytes(use_engine(tiny_llama, monkeypatch), num_tokens=200)}
    engine = use_engine(tiny_llama, monkeypatch, **options)
    texts = ["the first", "the second", "the third", "the fourth", "the fifth", "the sixth"]
    assert chat("\n".join(texts), "--system", "be brief") == 0
    shown = capsys.readouterr().err
    said = re.findall(
        r"^graft: the conversation no longer fits .* its (\d+) oldest messages are left out$", shown, re.M
    )
    assert said and all(int(number) % 2 == 0 for number in said)
    assert shown.count("finished by length") == len(engine.heard) == len(texts)
    for token_ids, text in zip(engine.heard, texts, strict=True):
        heard = tiny_llama.tokenizer.decode(token_ids)
        assert len(token_ids) + NUM_NEW <= 200
        assert heard.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
        assert heard.endswith(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    assert "the first" not in heard


def test_a_message_that_can_never_fit_is_undone(
    chat: Chat, tiny_llama: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = use_engine(tiny_llama, monkeypatch, max_length=200)
    assert chat(f"one\n{'x' * 400}\ntwo\n") == 0
    shown = capsys.readouterr().err
    assert re.search(r"^graft: no answer to this message: the prompt has \d+ tokens, which leaves no room", shown, re.M)
    messages = [*talk(tiny_llama, "one"), user("two")]
    assert engine.heard == [render_messages(tiny_llama.tokenizer, messages[:end]) for end in (1, 3)]


def test_bytes_that_are_no_text_do_not_end_it(chat: Chat, engine: ListeningEngine, tiny_llama: Target) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    assert chat(stdin) == 0
    assert engine.heard == [render_messages(tiny_llama.tokenizer, [user("caf\N{REPLACEMENT CHARACTER}")])]
