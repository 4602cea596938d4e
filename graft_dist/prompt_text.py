"""Prompts read back from their token ids: what was asked, and so on which side of a split it belongs.

A trajectory store keeps the token ids that the target was asked with, not the user's words. The chat template around
them is known, so the words can be cut out and checked: rendered again they must give the very same ids. Not covered:
templates that change the words; of those that only trim them, white space at their ends is lost (and with it, for such
a prompt, its true hash).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft_dist.errors import PromptError
from graft_dist.prompts import Prompt, render

_MARKS = ("graftxfirstxmark", "graftxsecondxmark")  # plain words, which no template changes


class PromptReader:
    """Reads the turns back out of rendered prompts, for one tokenizer, system prompt and thinking switch.

    Raises `PromptError` when the template cannot be read backwards at all.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None = None, enable_thinking: bool | None = None) -> None:
        self._tokenizer, self._system_prompt, self._enable_thinking = tokenizer, system_prompt, enable_thinking
        text = self._decode(self._render(_MARKS))
        before, first, rest = text.partition(_MARKS[0])
        between, second, after = rest.partition(_MARKS[1])
        if not (first and second):
            raise PromptError("the target's chat template does not show the user's words as they are")
        self._before, self._between, self._after = before, between, after

    def turns(self, token_ids: Sequence[int]) -> tuple[str, ...] | None:
        """Return the user's messages; None for ids that these settings do not give for any words."""
        text = self._decode(token_ids)
        if not (text.startswith(self._before) and text.endswith(self._after)):
            return None
        words = text[len(self._before) : len(text) - len(self._after)]
        turns = tuple(words.split(self._between)) if self._between else (words,)
        return turns if self._render(turns) == list(token_ids) else None

    def _render(self, turns: Sequence[str]) -> list[int]:
        return render(self._tokenizer, Prompt("", "", tuple(turns)), self._system_prompt, self._enable_thinking)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
