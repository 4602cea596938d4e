"""`Answer`: one of a request's answers while its events arrive, and its JSON in the shapes of the two endpoints.

Owns texts, log-probabilities and counts of one answer, streamed or whole. Knows no engine and no HTTP.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal

from graft_dist.engine import SequenceEvent
from graft_dist.rounds import RoundTrace
from graft_dist.sampling import TokenLogprob

Endpoint = Literal["chat", "completions"]

_CONTINUES = re.compile(rb"[\x80-\xbf]")  # a byte of UTF-8 that begins no character
_LEAST_LOGPROB = -9999.0
_KEPT_TOKENS = 16_384  # tokens whose text is remembered


@dataclass
class Counts:
    """Raw counts of drafting and acceptance; ratios are made when they are shown."""

    num_rounds: int = 0
    num_drafted: int = 0  # tree nodes verified
    num_accepted: int = 0  # of them, those that became output
    num_tokens: int = 0  # committed by rounds, bonus tokens included
    num_mismatches: int = 0
    by_accepted: dict[int, int] = field(default_factory=dict)  # rounds by accepted nodes
    by_drafted: dict[int, dict[int, int]] = field(default_factory=dict)  # the same, apart for each number of nodes

    def count(self, trace: RoundTrace) -> None:
        """Add a round."""
        accepted = len(trace.accepted)
        self.num_rounds += 1
        self.num_drafted += trace.budget
        self.num_accepted += accepted
        self.num_tokens += trace.num_tokens
        self.num_mismatches += trace.is_mismatch
        self.by_accepted[accepted] = self.by_accepted.get(accepted, 0) + 1
        own = self.by_drafted.setdefault(trace.budget, {})
        own[accepted] = own.get(accepted, 0) + 1

    def speculative_decoding(self, draft_depth: int) -> dict[str, Any]:
        """The counts in vLLM's shape. `num_draft_tokens` are tree nodes, `num_spec_tokens` is the deepest depth."""
        return {
            "mean_acceptance_length": 1 + self.num_accepted / self.num_rounds if self.num_rounds else None,
            "draft_acceptance_rate": self.num_accepted / self.num_drafted if self.num_drafted else None,
            "acceptance_histogram": _histogram(self.by_accepted, draft_depth),
            "acceptance_histogram_by_draft_length": {
                str(drafted): _histogram(own, draft_depth) for drafted, own in sorted(self.by_drafted.items())
            },
            "num_spec_steps": self.num_rounds,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafted,
            "num_spec_tokens": draft_depth,
        }

    def graft(self, policy_version: int | None, policy_fingerprint: str | None) -> dict[str, Any]:
        """The counts as this project names them: acceptance length counts committed tokens, the bonus included."""
        return {
            "rounds": self.num_rounds,
            "acceptance_length": self.num_tokens / self.num_rounds if self.num_rounds else None,
            "mean_budget": self.num_drafted / self.num_rounds if self.num_rounds else None,
            "mismatch": self.num_mismatches,
            "policy_version": policy_version,
            "policy_fingerprint": policy_fingerprint,
        }


def _histogram(counts: dict[int, int], depth: int) -> list[int]:
    return [counts.get(accepted, 0) for accepted in range(max(depth, *counts, 0) + 1)]


class Answer:
    """One answer of a request: `index` among its choices."""

    def __init__(self, index: int, endpoint: Endpoint, tokens: TokenTexts, echo: str = "") -> None:
        self.index = index
        self.counts = Counts()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._endpoint = endpoint
        self._tokens = tokens
        self._pieces = [echo]
        self._logprobs: list[TokenLogprob] = []
        # The text of the tokens whose log-probabilities have been shown: its whole characters, and what is begun.
        self._text_length = len(echo)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def text(self) -> str:
        """All text so far, the echoed prompt included."""
        return "".join(self._pieces)

    def take(self, event: SequenceEvent) -> None:
        """Add an event."""
        self.num_tokens += len(event.token_ids)
        self._pieces.append(event.text)
        self._logprobs += event.logprobs or []
        if event.trace is not None and event.trace.num_tokens > 0:
            self.counts.count(event.trace)
        self.finish_reason = event.finish_reason or self.finish_reason

    def choice(self) -> dict[str, Any]:
        """The whole answer, for a response that is not streamed."""
        logprobs = self._shown_logprobs(self._logprobs)
        if self._endpoint == "chat":
            message = {"role": "assistant", "content": self.text, "refusal": None}
            return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}
        return {"index": self.index, "text": self.text, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def chunk(self, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None) -> dict[str, Any]:
        """A piece of the answer, for a stream."""
        shown = self._shown_logprobs(logprobs or [])
        if self._endpoint == "chat":
            delta = {"content": text} if text or logprobs else {}
            return {"index": self.index, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        return {"index": self.index, "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def first_chunk(self) -> dict[str, Any] | None:
        """What a stream begins with: the role in a chat, an echoed prompt otherwise."""
        if self._endpoint == "chat":
            delta = {"role": "assistant", "content": ""}
            return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
        # Not `text`: the first event may have been taken already, and comes as a chunk of its own.
        return self.chunk(self._pieces[0], None, None) if self._pieces[0] else None

    def _shown_logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        if self._endpoint == "chat":
            return {"content": [self._chat_logprob(entry) for entry in logprobs], "refusal": None}
        shown = [self._tokens.described(entry.token_id) for entry in logprobs]
        offsets = []
        for token, entry in zip(shown, logprobs, strict=True):
            data = b"" if self._tokens.is_special(entry.token_id) else bytes(token["bytes"])
            if data and not _CONTINUES.match(data):  # a character that was begun and will never end is U+FFFD
                self._text_length += len(self._characters.decode(b"", final=True))
            offsets.append(self._text_length)  # of a character that several tokens make up, each has the offset
            self._text_length += len(self._characters.decode(data))
        return {
            "tokens": [token["token"] for token in shown],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top_by_text(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top_by_text(self, entry: TokenLogprob) -> dict[str, float]:
        """Alternatives and the token itself by text; of several with one (incomplete characters) the likeliest."""
        top: dict[str, float] = {}
        for token, value in [*entry.top, (entry.token_id, entry.logprob)]:
            top.setdefault(self._tokens.text(token), _finite(value))
        return top

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._tokens.described(token) | {"logprob": _finite(value)} for token, value in entry.top]
        return self._tokens.described(entry.token_id) | {"logprob": _finite(entry.logprob), "top_logprobs": top}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's number for what is all but impossible stands in."""
    return max(logprob, _LEAST_LOGPROB)


class TokenTexts:
    """Text and bytes of single tokens, for log-probabilities.

    An answer with twenty alternatives per token asks for tens of thousands of them, on the event loop: the last ones
    are kept.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._bytes_of = byte_alphabet()
        self._described = lru_cache(_KEPT_TOKENS)(self._describe)

    def is_special(self, token_id: int) -> bool:
        """Whether the token appears in no text."""
        return token_id in self._special_ids

    def text(self, token_id: int) -> str:
        """The token's text; an incomplete character shows as U+FFFD."""
        return str(self._described(token_id)["token"])

    def described(self, token_id: int) -> dict[str, Any]:
        """`token` and `bytes`, as chat log-probabilities name a token. Shared: not to be changed."""
        return self._described(token_id)

    def _describe(self, token_id: int) -> dict[str, Any]:
        text = str(self._tokenizer.decode([token_id]))
        return {"token": text, "bytes": self._bytes(token_id, text)}

    def _bytes(self, token_id: int, text: str) -> list[int]:
        """The token's bytes in UTF-8, also where it holds a part of a character only."""
        name = self._tokenizer.convert_ids_to_tokens(token_id) or ""  # a model may have more ids than its tokenizer
        if name.startswith("<0x") and name.endswith(">") and len(name) == 6:  # byte fallback of SentencePiece
            return [int(name[3:5], 16)]
        if "\N{REPLACEMENT CHARACTER}" in text and all(letter in self._bytes_of for letter in name):
            return [self._bytes_of[letter] for letter in name]
        return list(text.encode())


@cache
def byte_alphabet() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes as: printable ones stand for themselves, others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
