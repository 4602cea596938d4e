"""Sampling: parameters, warping of the target's logits, per-position randomness, the acceptance walk, and text.

The rule that keeps tree decoding lossless is here, in one place: the target chooses its next token at a node exactly as
plain decoding would after the same tokens (same warping, penalties that see the node's own path, the random number of
that output position), and the tree is only *matched* against it. Does not run models and holds no state of a batch.

Dimension letters: N rows of logits, V vocabulary, n nodes of a tree without its root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from graft_dist.counter_random import uniform
from graft_dist.draft_tree import DraftTree

MAX_LOGPROBS = 20
"""Most alternatives per token that `SamplingParams.logprobs` may ask for."""

_CPU_ROWS = 4  # rows warped together: in double precision more of them fall out of the cache
_DEVICE_ROWS = 64  # the same on an accelerator, where it bounds memory
_TOP_P_HEAD = 256  # the nucleus nearly always lies within so many tokens; sorting a whole row is slow

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence's tokens are chosen and when it ends. Refuses impossible values with a ValueError.

    Logits are warped in the order penalties, temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0  # 0: greedy, the highest logit after penalties
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with at least this mass; 1: off
    top_k: int = 0  # keep this many likeliest tokens (and those tied with the last); 0: off
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest; 0: off
    repetition_penalty: float = 1.0  # divides (or multiplies, if negative) logits of tokens in prompt or output; 1: off
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output; 0: off
    frequency_penalty: float = 0.0  # subtracted once per occurrence of the token in the output; 0: off
    seed: int | None = None  # same seed, same text, whatever the decoding method; None: the engine draws one
    max_new_tokens: int = 128  # the sequence ends with "length" after so many
    stop_token_ids: tuple[int, ...] = ()  # the sequence ends with "stop" after any of these
    stop: tuple[str, ...] = ()  # the sequence ends with "stop" once its text holds any of these
    ignore_eos: bool = False  # go on after the target's end-of-sequence tokens
    logprobs: int | None = None  # log-probabilities of so many alternatives per token; 0: of the token alone; None: off

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), str | int):
                raise ValueError(f"{name} must be a sequence, not {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "at least 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 turns it off)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "between -2 and 2")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "at least 0")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")
        is_fit = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        _require(is_fit, "logprobs", self.logprobs, f"between 0 and {MAX_LOGPROBS}, or None")

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit (after penalties) is taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them through penalties."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def stop_set(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Return the token ids that end the sequence, given the target's end-of-sequence ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))


def _require(is_fit: bool, name: str, value: object, allowed: str) -> None:
    if not is_fit:  # also for NaN, with which every comparison is false
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def warp_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64 [N, V]: logits after penalties, temperature, top_k, top_p and min_p; -inf where a token is out.

    Greedy parameters apply penalties only. Penalties are vLLM's: repetition sees prompt and output, the other two the
    output only.

    Args:
        logits: [N, V], any float dtype and device.
        params: what to apply.
        seen: bool [N, V], the tokens in each row's prompt or output; needed if there are penalties.
        counts: [N, V], occurrences of each token in each row's output; needed if there are penalties.
    """
    warped = logits.to(torch.float64)
    if params.has_penalties:
        if seen is None or counts is None:
            raise ValueError("penalties need the tokens seen and their counts")
        warped = _penalize(warped, params, seen, counts)
    if params.is_greedy:
        return warped
    # The highest logit goes to 0 first, so that a tiny temperature cannot overflow.
    warped = (warped - warped.amax(dim=-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < warped.shape[-1]:
        weakest = warped.topk(params.top_k, dim=-1).values[:, -1:]
        warped = warped.masked_fill(warped < weakest, -math.inf)
    if params.top_p < 1:
        warped = warped.masked_fill(~_nucleus(warped.softmax(dim=-1), params.top_p), -math.inf)
    if params.min_p > 0:
        # The highest warped logit is 0 still: no filter removes it.
        warped = warped.masked_fill(warped < math.log(params.min_p), -math.inf)
    return warped


def _penalize(logits: torch.Tensor, params: SamplingParams, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    repeated = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    penalized = torch.where(seen, repeated, logits)
    occurrences = counts.to(torch.float64)
    return penalized - params.frequency_penalty * occurrences - params.presence_penalty * (occurrences > 0)


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return bool [N, V]: per row the smallest set of likeliest tokens with mass >= top_p; ties go to lower ids."""
    vocab_size = probs.shape[-1]
    head = min(_TOP_P_HEAD, vocab_size)
    falling = probs.topk(head, dim=-1).values
    while head < vocab_size and bool((falling.sum(dim=-1) < top_p).any()):
        head = min(16 * head, vocab_size)
        falling = probs.topk(head, dim=-1).values
    mass_before = falling.cumsum(dim=-1) - falling
    num_kept = (mass_before < top_p).sum(dim=-1, keepdim=True)
    weakest = falling.gather(-1, (num_kept - 1).clamp(min=0))  # none is kept only where probabilities are NaN
    is_above = probs > weakest
    is_tied = probs == weakest
    num_tied_kept = num_kept - is_above.sum(dim=-1, keepdim=True)
    return is_above | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied_kept))


def sample_tokens(warped: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Return int64 [N]: per row of warped logits [N, V] the token at which the distribution function passes a number.

    Inverse of the cumulative distribution in token id order, in double precision. `numbers` holds N values in (0, 1).

    Raises:
        ValueError: logits without a proper distribution (NaN, +inf or nothing left).
    """
    cumulative = (warped - warped.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    totals = cumulative[:, -1:]
    if not bool(torch.isfinite(totals).all()):
        raise ValueError("the target's logits are not finite: no token can be sampled")
    points = torch.tensor(numbers, dtype=torch.float64, device=warped.device)[:, None] * totals
    # A number next to 1 may round up to the total itself, beyond the last token.
    points = torch.minimum(points, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(cumulative, points, right=True)[:, 0]


class TokenChooser:
    """The target's choice of the next token, for one sequence.

    Holds what the choice depends on besides the logits: parameters, seed, prompt, and the tokens output so far.
    `commit` is to be called with every token output, the first (chosen after prefill) included.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.seed = seed
        self.num_output = 0  # tokens committed; the output position of the next one
        self._seen: torch.Tensor | None = None  # bool [V]: in prompt or output
        self._counts: torch.Tensor | None = None  # int32 [V]: occurrences in the output
        if params.has_penalties:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self._seen[torch.as_tensor(list(prompt_token_ids), dtype=torch.int64, device=device)] = True

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output."""
        self.num_output += len(token_ids)
        if self._seen is not None and self._counts is not None and len(token_ids) > 0:
            ids = torch.as_tensor(list(token_ids), dtype=torch.int64, device=self._seen.device)
            self._seen[ids] = True
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def next_token(self, logits: torch.Tensor, path_tokens: Sequence[int] = ()) -> int:
        """Return the next token from the logits [V] that follow the committed output and then `path_tokens`."""
        return int(self._choose(logits[None], [path_tokens])[0])

    def next_tokens(self, logits: torch.Tensor, tree: DraftTree) -> npt.NDArray[np.int32]:
        """Return the target's next token at every node, int32 [n+1], from the nodes' logits [n+1, V] (root first)."""
        if self.params.is_greedy and not self.params.has_penalties:
            return logits.argmax(dim=-1).to(torch.int32).cpu().numpy()
        paths = [_path_tokens(tree, node) for node in range(tree.num_nodes + 1)]
        step = _CPU_ROWS if logits.device.type == "cpu" else _DEVICE_ROWS
        chosen = [
            self._choose(logits[start : start + step], paths[start : start + step])
            for start in range(0, len(paths), step)
        ]
        return torch.cat(chosen).to(torch.int32).cpu().numpy()

    def walker(self, logits: torch.Tensor, tree: DraftTree) -> Callable[[int], int]:
        """Return a function from node to the target's next token there that computes only what it is asked for."""
        return lambda node: self.next_token(logits[node], _path_tokens(tree, node))

    def _choose(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return int64 [N] for logits [N, V]; `paths[i]` are row i's tokens after the committed output."""
        if self.params.is_greedy and not self.params.has_penalties:
            return logits.argmax(dim=-1)
        seen, counts = self._histories(paths)
        warped = warp_logits(logits, self.params, seen, counts)
        if self.params.is_greedy:
            return warped.argmax(dim=-1)
        return sample_tokens(warped, [uniform(self.seed, self.num_output + len(path)) for path in paths])

    def _histories(self, paths: Sequence[Sequence[int]]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `seen` and `counts` [N, V] of the committed tokens plus each path; (None, None) without penalties."""
        if self._seen is None or self._counts is None:
            return None, None
        seen = self._seen.repeat(len(paths), 1)
        counts = self._counts.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                seen[row, token] = True
                counts[row, token] += 1
        return seen, counts


def _path_tokens(tree: DraftTree, node: int) -> list[int]:
    return tree.tokens[tree.path(node)].tolist()


@dataclass(frozen=True)
class Verdict:
    """What the target said about a tree."""

    path: list[int]  # accepted nodes from the root (excluded) downwards
    bonus_token: int  # the target's own token after the last of them

    def token_ids(self, tree: DraftTree) -> list[int]:
        """Return the tokens that the round commits before trimming: those of the path, then the bonus token."""
        return [*tree.tokens[self.path].tolist(), self.bonus_token]


def accept(tree: DraftTree, next_token: Callable[[int], int]) -> Verdict:
    """Walk from the root along the tokens that the target chooses, as far as the tree holds them.

    `next_token(node)` is the target's next token after `node`; it is asked once for each node on the walk. The first
    token that no child of the current node carries is the bonus token.
    """
    path: list[int] = []
    node = 0
    while True:
        token = next_token(node)
        child = tree.child(node, token)
        if child is None:
            return Verdict(path, token)
        path.append(child)
        node = child


def trim(token_ids: Sequence[int], stop_tokens: Collection[int], room: int) -> tuple[int, StopReason | None]:
    """Return how many of a round's tokens plain decoding would have output, and why it would have ended there.

    Cuts after the first stop token, and after `room` tokens (what the token and context limits leave, at least 1).
    A stop token that just fits is a "stop". The reason is None when the sequence goes on.
    """
    for index, token in enumerate(token_ids[:room]):
        if token in stop_tokens:
            return index + 1, "stop"
    if len(token_ids) >= room:
        return room, "length"
    return len(token_ids), None


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of one output token, before any warping."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1 for the likeliest token: 1 + the number of tokens with a higher logit
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the likeliest tokens, likeliest first


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprob]:
    """Return the log-probabilities of output tokens under the target's raw logits [N, V], one row per token.

    Raw means before penalties, temperature and filters, as vLLM and OpenAI report them.
    """
    rows = logits.to(torch.float32)
    log_probs = rows.log_softmax(dim=-1)
    ids = torch.as_tensor(list(token_ids), dtype=torch.int64, device=logits.device)[:, None]
    chosen = log_probs.gather(-1, ids)
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    top_values, top_ids = log_probs.topk(num_top, dim=-1)
    columns = zip(token_ids, chosen[:, 0].tolist(), ranks.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    return [
        TokenLogprob(int(token), logprob, rank, tuple(zip(alternatives, values, strict=True)))
        for token, logprob, rank, alternatives, values in columns
    ]


@dataclass(frozen=True)
class TextDelta:
    """What new tokens add to a sequence's text."""

    text: str  # text that can be given out now
    num_tokens: (
        int  # how many of the pushed tokens belong to the output: all, or up to the one completing a stop string
    )
    is_stopped: bool  # whether a stop string was found; nothing may be pushed after that


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes an incomplete UTF-8 sequence to
_LONG_WINDOW = 24  # tokens decoded again with each push before the window is moved


class TextStream:
    """Incremental detokenization of one sequence, with stop strings.

    The deltas, concatenated, equal `tokenizer.decode(all_tokens, skip_special_tokens=True)`, cut before the first stop
    string. Held back until it is certain: an incomplete character at the end, and an end that may be the beginning of
    a stop string. The token that completes a stop string is the last one output; the stop string is not in the text.

    Not covered: tokenizers whose decoding changes text that was already complete, namely WordPiece with its cleanup of
    spaces, and byte-fallback tokenizers when the output ends inside a character that directly follows other
    byte-fallback characters.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._start = 0  # first token of the window: what is decoded again with each push
        self._boundary = 0  # a token index > _start at which a push ended in a complete character; the next _start
        self._taken = 0  # characters of the window's text that went into `_held` or out
        self._held = ""  # complete text that may begin a stop string
        self._is_stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add output tokens; return the text that is certain now."""
        assert not self._is_stopped, "pushed after a stop string"
        tokens = list(token_ids)
        ready, is_complete = self._ready_text(tokens)
        # Byte-fallback tokenizers decode a whole run of bytes to replacement characters while its end is incomplete:
        # a stop string may show after one of the tokens and be gone after the next.
        if self._stop and (not is_complete or self._find_stop(ready) is not None):
            for count in range(1, len(tokens) + 1):
                ready_then, _ = self._ready_text(tokens[:count])
                cut = self._find_stop(ready_then)
                if cut is not None:
                    self._is_stopped = True
                    return TextDelta(ready_then[:cut], count, is_stopped=True)
        self._tokens += tokens
        self._taken += len(ready) - len(self._held)
        if is_complete:
            self._move_window()
        num_held = self._num_held(ready)
        self._held = ready[len(ready) - num_held :]
        return TextDelta(ready[: len(ready) - num_held], len(tokens), is_stopped=False)

    def finish(self) -> str:
        """Return what is still held back at the end of a sequence; nothing after a stop string."""
        if self._is_stopped:
            return ""
        return self._held + self._decode(self._tokens[self._start :])[self._taken :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _ready_text(self, new_tokens: list[int]) -> tuple[str, bool]:
        """Return the text not given out yet, as far as its characters are complete, and whether all of them are."""
        window = self._decode(self._tokens[self._start :] + new_tokens)
        complete = window.rstrip(_REPLACEMENT)
        return self._held + complete[self._taken :], len(complete) == len(window)

    def _find_stop(self, text: str) -> int | None:
        """Return where the earliest stop string begins in `text`, or None."""
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = min(max((len(stop) for stop in self._stop), default=1) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _move_window(self) -> None:
        """Shorten the window once it is long, so that the work per token stays constant."""
        if len(self._tokens) - self._start < _LONG_WINDOW:
            return
        if self._boundary > self._start:
            # The window must begin with tokens that give text: some tokenizers strip the first text's leading space.
            kept = self._decode(self._tokens[self._boundary :])
            if kept and self._decode(self._tokens[self._start :]).endswith(kept):
                self._start, self._taken = self._boundary, len(kept)
        self._boundary = len(self._tokens)
