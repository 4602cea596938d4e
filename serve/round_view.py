"""`RoundViewer`: the rounds of one answer as JSON, for clients that want to see how it came about."""

from __future__ import annotations

from typing import Any

from graft_dist.engine import SequenceEvent
from serve.answer import TokenTexts


class RoundViewer:
    """Makes the view of each round of one answer, in order. Text of single tokens comes from `texts`."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def view(self, event: SequenceEvent) -> list[dict[str, Any]]:
        """The view of the event's round; none for an event without one (the first token, which no round drafts)."""
        trace = event.trace
        if trace is None:
            return []
        return [
            {
                "index": trace.round_index,
                "budget": trace.budget,
                "tokens": [
                    {"text": self._texts.text(token), "is_bonus": number >= len(trace.accepted)}
                    for number, token in enumerate(event.token_ids)
                ],
                "mismatch": trace.is_mismatch,
                "round_ms": (trace.draft_ns + trace.build_ns + trace.verify_ns + trace.commit_ns) / 1e6,
                "tree": {
                    "parents": trace.tree_parents.tolist(),
                    "depths": trace.tree_depths.tolist(),
                    "texts": [self._texts.text(token) for token in trace.tree_tokens.tolist()],
                    "accepted": trace.accepted.tolist(),
                },
            }
        ]
