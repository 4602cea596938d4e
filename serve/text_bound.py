"""`TextBound`: how few tokens a text can have. One that has too many is refused before anybody tokenizes it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from serve.answer import byte_alphabet

_SHORTENED_BY_NFC = 4  # times in UTF-8, rounded up: U+1FBE U+0308 U+0341 (7 bytes) become U+0390 (2 bytes)


@dataclass(frozen=True)
class TextBound:
    """What is known of a tokenizer whose tokens account for every byte of a text."""

    most_bytes: int  # of UTF-8 that one token stands for
    lost: bytes = b""  # those that the tokenizer leaves out

    def least_tokens(self, text: str) -> int:
        """A text has at least so many tokens."""
        return math.ceil(len(text.encode(errors="replace").translate(None, self.lost)) / self.most_bytes)


def text_bound(tokenizer: Any) -> TextBound | None:
    """The bound of a byte-level BPE tokenizer; None for others, and where something may shorten a text beforehand."""
    if not tokenizer.is_fast:
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added, normalizer = parts["model"], parts["added_tokens"], parts["normalizer"]
    swallows_blanks = any(token["lstrip"] or token["rstrip"] for token in added)
    if model["type"] != "BPE" or parts["truncation"] is not None or swallows_blanks:
        return None
    if model["fuse_unk"] or not _splits_into_bytes(parts["pre_tokenizer"]):
        return None
    # A name has a letter for each byte. A byte without a token of its own becomes the unknown token, if there is one.
    missing = bytes(byte for letter, byte in byte_alphabet().items() if letter not in model["vocab"])
    lost = missing if model["unk_token"] is None else b""
    longest = max([len(name) for name in model["vocab"]] + [len(token["content"].encode()) for token in added])
    if normalizer is None:
        return TextBound(longest, lost)
    return TextBound(longest * _SHORTENED_BY_NFC) if normalizer["type"] == "NFC" and not lost else None


def _splits_into_bytes(splitter: dict[str, Any] | None) -> bool:
    """Whether what stands before the model makes bytes of a text and leaves nothing out."""
    if splitter is None:
        return False
    steps = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    keeps_all = all(
        step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    return keeps_all and any(step["type"] == "ByteLevel" for step in steps)
