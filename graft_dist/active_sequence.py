"""One sequence while it is being decoded: its tokens, text, counters, and what the drafter has not seen of it yet.

Owns the rule where a sequence ends (`take`). Which slot it sits in, and what happens in a round, is in `engine.py`.

Letters: V vocabulary, F width of the drafter's features.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graft_dist.budget import HISTORY_WINDOW, sequence_key
from graft_dist.errors import is_device_failure
from graft_dist.rounds import FinishReason, RoundRecord, RoundTrace, SequenceSummary
from graft_dist.sampling import SamplingParams, TextStream, TokenChooser, TokenLogprob, token_logprobs, trim


@dataclass(frozen=True)
class SequenceEvent:
    """What one step brought one sequence."""

    sequence_id: str
    token_ids: list[int]  # new tokens, trimmed at stops and limits
    text: str  # new text that is certain; "" when the engine does not detokenize
    logprobs: list[TokenLogprob] | None  # one per new token, if asked for
    finish_reason: FinishReason | None = None
    error: str | None = None
    round: RoundRecord | None = None  # None for the first token, and unless recording
    trace: RoundTrace | None = None  # None for the first token, and for a sequence whose own work failed
    summary: SequenceSummary | None = None  # on the last event


@dataclass(frozen=True)
class Outcome:
    """What a prefill or a round gave one sequence."""

    token_ids: list[int]  # after trimming
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    path: list[int] = field(default_factory=list)  # accepted nodes that became output
    target_tokens: npt.NDArray[np.int32] | None = None  # the target's next token at every node, when it is known


def failure(error: Exception) -> Outcome:
    """The outcome of a sequence whose own work raised; a failing device is nobody's own and is raised again."""
    if is_device_failure(error):
        raise error
    return Outcome([], finish_reason="error", error=f"{type(error).__name__}: {error}")


class ActiveSequence:
    """A sequence from `Engine.add` to its last event.

    Args:
        sequence_id: the caller's name for it.
        prompt: token ids, at least one.
        params: how tokens are chosen and when it ends.
        limit: prompt and output tokens it may reach, at most.
        stop_tokens: ids that end it.
        chooser: gives the target's choices for this sequence.
        tokenizer: for text; None: no text.
    """

    def __init__(
        self,
        sequence_id: str,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        stop_tokens: Collection[int],
        chooser: TokenChooser,
        tokenizer: Any | None,
    ) -> None:
        self.sequence_id = sequence_id
        self.key = sequence_key(sequence_id)
        self.prompt = prompt
        self.params = params
        self.limit = limit
        self.chooser = chooser
        self.output: list[int] = []
        self.num_prefilled = 0  # prompt tokens whose rows are in the cache
        self.acceptance_lengths: list[int] = []  # of the last rounds
        self.prefill_s = 0.0
        self.stages_s = np.zeros(4)  # draft, build, verify, commit: of the rounds it took part in
        self.num_rounds = 0
        self.is_undraftable = False  # the drafter has given no finite numbers for it
        self._num_drafted = 0
        self._num_accepted = 0
        self._stop_tokens = stop_tokens
        self._stream = None if tokenizer is None else TextStream(tokenizer, params.stop)
        self._pending: list[torch.Tensor] = []

    @property
    def root(self) -> int:
        """The last committed token; its key and value are not in the cache yet."""
        return self.output[-1]

    @property
    def num_rows(self) -> int:
        """Rows in the target's cache once decoding: all tokens but the root."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def room(self) -> int:
        """Tokens it may still output."""
        return self.limit - len(self.prompt) - len(self.output)

    @property
    def is_argmax(self) -> bool:
        """Whether its tokens are plain argmaxes, which the engine computes for the whole batch at once."""
        return self.params.is_greedy and not self.params.has_penalties

    @property
    def num_pending(self) -> int:
        """Committed rows whose features the drafter has not seen."""
        return sum(len(rows) for rows in self._pending)

    def add_pending(self, features: torch.Tensor) -> None:
        """Append features [n, F] of newly committed rows."""
        self._pending.append(features)

    def pending(self) -> torch.Tensor:
        """Features [num_pending, F] of the rows the drafter has not seen."""
        if len(self._pending) > 1:
            self._pending = [torch.cat(self._pending)]
        return self._pending[0]

    def drop_pending(self, num_rows: int) -> None:
        """Forget the first `num_rows` pending rows: the drafter has them now."""
        rest = self.pending()[num_rows:]
        self._pending = [rest] if len(rest) else []

    def take(self, token_ids: list[int], logits: torch.Tensor | None) -> Outcome:
        """Cut new tokens where plain decoding would have ended, add them to the output, and say what came of it.

        `logits` [n, V]: one row per token, needed if the sequence wants log-probabilities.
        """
        count, reason = trim(token_ids, self._stop_tokens, self.room)
        finish_reason: FinishReason | None = reason
        text = ""
        if self._stream is not None:
            delta = self._stream.push(token_ids[:count])
            text = delta.text
            if delta.is_stopped:
                count, finish_reason = delta.num_tokens, "stop"
            if finish_reason is not None:
                text += self._stream.finish()
        kept = token_ids[:count]
        logprobs = None
        if self.params.logprobs is not None and logits is not None:
            logprobs = token_logprobs(logits[:count], kept, self.params.logprobs)
        self.chooser.commit(kept)
        self.output += kept
        return Outcome(kept, text, logprobs, finish_reason)

    def count_round(self, num_nodes: int, outcome: Outcome) -> None:
        """Count a round in which `num_nodes` draft nodes were verified."""
        self.num_rounds += 1
        self._num_drafted += num_nodes
        self._num_accepted += len(outcome.path)
        self.acceptance_lengths = [*self.acceptance_lengths, len(outcome.token_ids)][-HISTORY_WINDOW:]

    def event(
        self, outcome: Outcome, record: RoundRecord | None = None, trace: RoundTrace | None = None
    ) -> SequenceEvent:
        """The event that tells an outcome."""
        return SequenceEvent(
            sequence_id=self.sequence_id,
            token_ids=outcome.token_ids,
            text=outcome.text,
            logprobs=outcome.logprobs,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            round=record,
            trace=trace,
            summary=None if outcome.finish_reason is None else self._summary(),
        )

    def _summary(self) -> SequenceSummary:
        draft_s, build_s, verify_s, commit_s = self.stages_s.tolist()
        return SequenceSummary(
            num_rounds=self.num_rounds,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
            prefill_s=self.prefill_s,
            decode_s=draft_s + build_s + verify_s + commit_s,
            draft_s=draft_s,
            build_s=build_s,
            verify_s=verify_s,
            commit_s=commit_s,
        )
