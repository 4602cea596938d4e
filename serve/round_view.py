"""What a client is shown of a round: the texts of its tokens and its draft tree, as JSON.

Owns how ids become text here. The texts of a sequence's tokens, concatenated, are exactly the answer's text: nothing is
shown that the stream itself would hold back. Which requests get to see rounds is the API's business.

Letters: N tree rows (nodes and the root).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from graft_dist.active_sequence import SequenceEvent
from graft_dist.rounds import RoundTrace
from graft_dist.sampling import TextStream

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes an incomplete UTF-8 sequence to
_LONGEST_CHARACTER = 8  # tokens after which bytes that still make no character are given up


@dataclass(frozen=True)
class TokenView:
    """One committed token."""

    text: str  # what became certain with it: "" while a character or a stop string may still be incomplete
    is_bonus: bool  # the target's own token at the end of the accepted path


@dataclass(frozen=True)
class TreeView:
    """The verified tree, root included: node 0, then every node after its parent."""

    parents: list[int]  # [N], -1 at the root
    depths: list[int]  # [N], 0 at the root
    texts: list[str]  # [N], what each node adds to its own path; special tokens by name, "" inside a character
    accepted: list[int]  # nodes of the accepted path, root excluded
    elsewhere: list[int]  # nodes that held the token the target wanted next, but under another parent


@dataclass(frozen=True)
class StagesView:
    """Milliseconds of the round's stages; a batch shares its rounds."""

    draft_ms: float
    build_ms: float
    verify_ms: float
    commit_ms: float


@dataclass(frozen=True)
class RoundView:
    """One round of one sequence."""

    index: int  # 0 for the first
    budget: int  # draft nodes verified
    tokens: list[TokenView]  # what the round committed
    mismatch: bool  # the walk stopped although the wanted token sat at that depth under another parent
    round_ms: float  # wall time of the batch's round
    stages: StagesView
    batch_size: int  # sequences that shared the round
    tree: TreeView

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for a JSON encoder."""
        return asdict(self)


class RoundViewer:
    """Turns the events of one sequence into views; feed it every event from the first, in order.

    Args:
        pieces: texts of single tokens, shared by the viewers of a thread.
        stop: the request's stop strings; they are held back here exactly as in the answer's own text.
    """

    def __init__(self, pieces: Pieces, stop: Sequence[str] = ()) -> None:
        self._stream = TextStream(pieces.tokenizer, stop)
        self._pieces = pieces
        self._end = _NOTHING  # bytes at the end of the output that are no character yet

    def views(self, event: SequenceEvent) -> list[RoundView]:
        """The event's round as a list of one; empty for the first token, which belongs to no round."""
        texts = self._texts(event)
        trace = event.trace
        if trace is None:
            self._follow(event.token_ids)
            return []
        wanted = event.token_ids[-1] if trace.num_tokens > len(trace.accepted) else None
        tree = self._tree(trace, wanted)
        self._follow(event.token_ids)
        last = len(texts) - 1
        tokens = [TokenView(text, wanted is not None and index == last) for index, text in enumerate(texts)]
        stages = StagesView(
            draft_ms=_milliseconds(trace.draft_ns),
            build_ms=_milliseconds(trace.build_ns),
            verify_ms=_milliseconds(trace.verify_ns),
            commit_ms=_milliseconds(trace.commit_ns),
        )
        return [
            RoundView(
                index=trace.round_index,
                budget=trace.budget,
                tokens=tokens,
                mismatch=trace.is_mismatch,
                round_ms=_milliseconds(trace.draft_ns + trace.build_ns + trace.verify_ns + trace.commit_ns),
                stages=stages,
                batch_size=trace.batch_size,
                tree=tree,
            )
        ]

    def _texts(self, event: SequenceEvent) -> list[str]:
        """The text of each of the event's tokens; the last one of a sequence brings what was held back."""
        texts = [self._stream.push([token]).text for token in event.token_ids]
        if event.finish_reason is not None and texts:
            texts[-1] += self._stream.finish()
        return texts

    def _follow(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._end = self._pieces.after(self._end, token)[1]

    def _tree(self, trace: RoundTrace, wanted: int | None) -> TreeView:
        """Texts are found from the root on: a node continues the character that its parent left incomplete."""
        root, *tokens = trace.tree_tokens.tolist()
        parents = trace.tree_parents.tolist()
        texts = [self._pieces.name(root)]
        ends = [self._end]
        for token, parent in zip(tokens, parents[1:], strict=True):
            text, end = self._pieces.after(ends[parent], token)
            texts.append(text)
            ends.append(end)
        return TreeView(
            parents=parents,
            depths=trace.tree_depths.tolist(),
            texts=texts,
            accepted=trace.accepted.tolist(),
            elsewhere=[] if wanted is None else _elsewhere(trace, wanted),
        )


@dataclass(frozen=True)
class _Unfinished:
    """Tokens whose bytes end inside a character, and how much of their text has been given already."""

    token_ids: tuple[int, ...] = ()
    num_given: int = 0


_NOTHING = _Unfinished()


class Pieces:
    """Texts of single tokens in the middle of a text, kept per token: an answer's trees are thousands of look-ups.

    For one thread, as tokenizers are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Some tokenizers strip the first space of a text: every piece is decoded behind a letter.
        self._anchor: int = tokenizer.encode("a", add_special_tokens=False)[-1]
        self._anchor_length = len(self._decode([]))
        self._texts: dict[int, str] = {}

    def after(self, end: _Unfinished, token: int) -> tuple[str, _Unfinished]:
        """What `token` adds after `end` to the text that is complete, and what it leaves incomplete."""
        text = self._piece(token) if not end.token_ids else self._text((*end.token_ids, token))
        complete = text.rstrip(_REPLACEMENT)
        if len(complete) == len(text) or len(end.token_ids) + 1 >= _LONGEST_CHARACTER:
            return text[end.num_given :], _NOTHING
        return complete[end.num_given :], _Unfinished((*end.token_ids, token), len(complete))

    def name(self, token: int) -> str:
        """What `token` reads as by itself."""
        return self._piece(token).rstrip(_REPLACEMENT)

    def _piece(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._text((token,))
        return self._texts[token]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)[self._anchor_length :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([self._anchor, *token_ids], skip_special_tokens=False)


def _elsewhere(trace: RoundTrace, wanted: int) -> list[int]:
    last = int(trace.accepted[-1]) if len(trace.accepted) else 0
    depth = trace.tree_depths[last] + 1
    return np.flatnonzero((trace.tree_depths == depth) & (trace.tree_tokens == wanted)).tolist()


def _milliseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
