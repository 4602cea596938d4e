"""Prompt files: good lines become prompts, bad ones rows with a reason, and the split never moves."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graft_dist.errors import PromptError
from graft_dist.prompts import (
    BadPrompt,
    Prompt,
    is_held_out,
    prompt_hash,
    read_prompts,
    render,
    split_fraction,
    starter_prompts_path,
)


def write(folder: Path, *lines: str | bytes, name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode("utf-8") for line in lines))
    return path


def line(**record: Any) -> str:
    return json.dumps({"id": "a", "task": "chat", "turns": ["Hello"], **record})


class RecordingTokenizer:
    """Stands in for a transformers tokenizer: one id per message, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[dict[str, str]], dict[str, Any]]] = []

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> list[int]:
        self.calls.append((conversation, kwargs))
        return [len(message["content"]) for message in conversation]


def test_good_lines_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, line(id="a"), "", line(id="b", turns=["One", "Two"]), line(id="c", answer=3), "  ")
    assert read_prompts(path) == [
        Prompt("a", "chat", ("Hello",)),
        Prompt("b", "chat", ("One", "Two")),
        Prompt("c", "chat", ("Hello",)),
    ]


def test_task_may_be_left_out(tmp_path: Path) -> None:
    assert read_prompts(str(write(tmp_path, '{"id": "a", "turns": ["Hello"]}'))) == [Prompt("a", "other", ("Hello",))]


def test_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    text = line(id="a", turns=["naïve\u2028 text"]) + "\r\n" + line(id="b") + "\r\n"
    path = write(tmp_path, b"\xef\xbb\xbf" + text.encode("utf-8"))
    assert [prompt.id for prompt in read_prompts(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"id": "x", "turns": ["Hel', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (b'{"id": "x", "turns": ["\xff"]}', "not UTF-8"),
        ("3", "the line holds 3"),
        ('["x"]', "allowed is an object with id, task and turns"),
        ('{"turns": ["Hello"]}', "id is None"),
        (line(id=7), "id is 7"),
        (line(id=" "), "id is ' '"),
        (line(task=None), "task is None"),
        ('{"id": "x"}', "turns is None"),
        (line(turns=[]), "turns is []"),
        (line(turns="Hello"), "turns is 'Hello'"),
        (line(turns=[""]), "a turn is ''"),
        (line(turns=["Hello", "\n "]), "a turn is '\\n '"),
        (line(turns=[None]), "a turn is None"),
        (line(turns=[{"role": "user"}]), "a turn is {'role': 'user'}"),
        (line(turns=["half \ud800 a pair"]), "a turn is 'half \\ud800 a pair'"),
    ],
)
def test_a_bad_line_is_reported_and_the_rest_goes_on(tmp_path: Path, bad: str | bytes, reason: str) -> None:
    first, second, third = read_prompts(write(tmp_path, line(id="a"), bad, line(id="c")))
    assert (first.id, third.id) == ("a", "c")
    assert isinstance(second, BadPrompt)
    assert (second.id, second.line_number) == ("p.jsonl:2", 2)
    assert reason in second.error
    assert len(second.error) < 250 and "\n" not in second.error


def test_an_id_that_stands_twice(tmp_path: Path) -> None:
    one = write(tmp_path, line(id="a"), line(id="a"), name="one.jsonl")
    two = write(tmp_path, line(id="b"), line(id="a"), name="two.jsonl")
    prompts = read_prompts([one, two])
    assert [prompt.id for prompt in prompts] == ["a", "one.jsonl:2", "b", "two.jsonl:2"]
    assert prompts[3] == BadPrompt("two.jsonl:2", 2, "the id 'a' is already taken by one.jsonl:1")


def test_ids_are_unique_whatever_the_file_says(tmp_path: Path) -> None:
    sub = tmp_path / "sub"
    sub.mkdir()
    one = write(tmp_path, line(id="p.jsonl:2"), "broken", "p.jsonl:3")
    two = write(sub, line(id="p.jsonl:2"), "broken", "broken")
    ids = [prompt.id for prompt in read_prompts([one, two])]
    assert len(ids) == 6
    assert len(set(ids)) == 6


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nothing\.jsonl cannot be read"):
        read_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path)


def test_no_lines(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path)) == []
    assert read_prompts([]) == []


def test_render_puts_the_system_prompt_first_and_asks_for_an_answer() -> None:
    tokenizer = RecordingTokenizer()
    ids = render(tokenizer, Prompt("a", "chat", ("Hi", "Again")), system_prompt="Be brief.", enable_thinking=False)
    assert ids == [9, 2, 5]
    messages, options = tokenizer.calls[0]
    assert [message["role"] for message in messages] == ["system", "user", "user"]
    assert options == {
        "tokenize": True,
        "add_generation_prompt": True,
        "return_dict": False,
        "enable_thinking": False,
    }


def test_render_leaves_out_what_is_not_given() -> None:
    tokenizer = RecordingTokenizer()
    render(tokenizer, Prompt("a", "chat", ("Hi",)))
    messages, options = tokenizer.calls[0]
    assert messages == [{"role": "user", "content": "Hi"}]
    assert "enable_thinking" not in options


def test_a_template_that_refuses() -> None:
    class Refusing(RecordingTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> list[int]:
            raise RuntimeError("roles must\nalternate")

    with pytest.raises(PromptError, match="cannot render prompt 'a' \\(roles must alternate\\)"):
        render(Refusing(), Prompt("a", "chat", ("Hi",)))


def test_render_with_a_real_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<user>": 1, "<assistant>": 2, "Hi": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert render(tokenizer, Prompt("a", "chat", ("Hi",))) == [1, 3, 2]


def test_hash_is_of_the_turns_as_json() -> None:
    turns = ("Grüße", 'say "hi"')
    assert prompt_hash(turns) == hashlib.sha256('["Grüße", "say \\"hi\\""]'.encode()).hexdigest()
    assert prompt_hash(["ab"]) != prompt_hash(["a", "b"])


def test_split_is_pinned() -> None:
    # Literal values: a change here would silently move prompts between the two sides of existing stores.
    assert prompt_hash(["Hello"]) == "024650ad788f9b375fc97d1d950c1ba644a4c79445e60a99578d4c1c4e22abfe"
    assert split_fraction(["Hello"]) == pytest.approx(0.00888542399530794, abs=1e-15)
    assert is_held_out(["Hello"])
    assert split_fraction(["prompt 3"]) == pytest.approx(0.7255709321218187, abs=1e-15)
    assert not is_held_out(["prompt 3"])


def test_about_a_fifth_is_held_out() -> None:
    fractions = [split_fraction([f"prompt {number}"]) for number in range(5000)]
    assert all(0.0 <= fraction < 1.0 for fraction in fractions)
    held_out = sum(is_held_out([f"prompt {number}"]) for number in range(5000))
    assert 900 < held_out < 1100
    assert held_out == sum(fraction < 0.2 for fraction in fractions)


def test_starter_prompts() -> None:
    prompts = read_prompts(starter_prompts_path())
    assert all(isinstance(prompt, Prompt) for prompt in prompts)
    good = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
    assert Counter(prompt.task for prompt in good) == {"code": 20, "math": 20, "chat": 20}
    assert good[0].id == "starter-code-01"
    assert all(prompt.id.startswith(f"starter-{prompt.task}-") for prompt in good)
    assert len({prompt_hash(prompt.turns) for prompt in good}) == 60
    assert max(len(turn) for prompt in good for turn in prompt.turns) < 300
