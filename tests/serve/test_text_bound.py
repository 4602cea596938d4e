"""How few tokens a text can have: never more than it has."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serve.text_bound import TextBound, text_bound
from tests.conftest import build_tokenizer

TEXTS = (
    "",
    "a",
    "the quick brown fox " * 50,
    "    \n\t" * 100,
    "é世👋Д" * 40,
    "\x04\x13" * 50,
    "\ud800a",
    "<|im_end|>" * 30,
)


def changed(**parts: Any) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with other parts."""
    tokenizer = build_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def test_no_text_has_fewer_tokens() -> None:
    tokenizer = build_tokenizer()
    bound = text_bound(tokenizer)
    names = [name for name in tokenizer.get_vocab() if not name.startswith("<|")]
    assert bound == TextBound(max(map(len, [*names, "<|endoftext|>"])))
    for text in TEXTS:
        encodable = text.encode(errors="replace").decode()
        assert bound.least_tokens(text) <= len(tokenizer.encode(encodable, add_special_tokens=False))
    assert bound.least_tokens("the quick brown fox " * 50) > 50  # it says something


def test_bytes_that_a_tokenizer_leaves_out_do_not_count() -> None:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((gone, _),) = letters.pre_tokenize_str("\x04")
    del vocabulary[gone]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = letters
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    bound = text_bound(tokenizer)
    assert bound == TextBound(1, b"\x04")
    assert bound.least_tokens("a\x04b\x04") == len(tokenizer.encode("a\x04b\x04")) == 2


def test_a_normalisation_that_shortens_is_allowed_for() -> None:
    plain, composing = text_bound(build_tokenizer()), text_bound(changed(normalizer=normalizers.NFC()))
    assert plain is not None and composing is not None
    assert composing.most_bytes == 4 * plain.most_bytes
    shortest = "\u1fbe\u0308\u0341" * 100
    tokenizer = changed(normalizer=normalizers.NFC())
    assert composing.least_tokens(shortest) <= len(tokenizer.encode(shortest))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "")])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
    ],
)
def test_nothing_is_known_where_text_may_be_lost(parts: dict[str, Any]) -> None:
    assert text_bound(changed(**parts)) is None


def test_nothing_is_known_of_a_token_that_swallows_blanks() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True)})
    assert text_bound(tokenizer) is None
