"""Words read back out of rendered prompts, and the splits that hang on them."""

from __future__ import annotations

import pytest

from graft_dist.errors import PromptError
from graft_dist.prompt_text import PromptReader
from graft_dist.prompts import Prompt, is_held_out, learning_split, render
from tests.conftest import build_tokenizer

TURNS = [
    ("Name three colours.",),
    ("one", "two", "three"),
    ("  white space, and\n\nlines \n", "café, naïve, \U0001f600 and a\u0301"),
    ("user", "assistant"),
]


@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
@pytest.mark.parametrize("turns", TURNS)
def test_the_words_come_back(turns: tuple[str, ...], system_prompt: str | None) -> None:
    tokenizer = build_tokenizer()
    ids = render(tokenizer, Prompt("p", "chat", turns), system_prompt)
    assert PromptReader(tokenizer, system_prompt).turns(ids) == turns
    assert PromptReader(tokenizer, "Another.").turns(ids) is None


def test_other_ids_are_no_prompt() -> None:
    reader = PromptReader(build_tokenizer())
    assert reader.turns([]) is None
    assert reader.turns([5, 6, 7]) is None


def test_a_template_that_changes_words_cannot_be_read_back() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    with pytest.raises(PromptError, match="does not show the user's words"):
        PromptReader(tokenizer)


def test_the_learning_split_is_fixed_and_independent_of_the_drafter_s() -> None:
    assert [learning_split([f"prompt {number}"]) for number in range(6)] == [
        "tune",
        "fit",
        "tune",
        "fit",
        "test",
        "fit",
    ]
    held_out = [text for text in (f"prompt {number}" for number in range(20_000)) if is_held_out([text])]
    splits = [learning_split([text]) for text in held_out]
    shares = [splits.count(name) / len(splits) for name in ("fit", "tune", "test")]
    assert shares == pytest.approx([0.65, 0.15, 0.2], abs=0.02)
