"""Engine: many sequences decoded together, one round at a time.

A round is draft, build, verify, accept, commit; plain decoding, chains and trees are the same round with another
policy. Owns the slots, the queue, and what each sequence has pending; the arithmetic is in `target.py`, `drafter.py`,
`draft_tree.py` and `sampling.py`.

Slots of sequences that are being decoded are 0 .. S - 1, in both caches. At most one prompt is partly read at any time;
its slot in the target's cache is S, and it enters the drafter's cache when it starts decoding.

Not covered: thread safety (call everything from one thread), preemption of running sequences.

Letters: S slots, R rows (tree nodes, padded), N rows that exist, V vocabulary, D draft depth, K candidates.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from graft_dist.budget import (
    HISTORY_WINDOW,
    DraftState,
    acceptance_history,
    confidences,
    degenerations,
)
from graft_dist.draft_tree import DraftTree, ancestor_masks, build_tree, root_tree
from graft_dist.errors import PolicyError
from graft_dist.kv_cache import SlotCache
from graft_dist.policy import DecodingPolicy
from graft_dist.rounds import FinishReason, RoundRecord, SequenceSummary
from graft_dist.sampling import (
    SamplingParams,
    TextStream,
    TokenChooser,
    TokenLogprob,
    Verdict,
    accept,
    token_logprobs,
    trim,
)
from graft_dist.target import Target, TargetOutput, greedy_tokens, tree_mask

MAX_NODES = 4096
"""Most nodes a tree can have, whatever the policy asks for."""

SCRATCH_ROWS = 128
"""Cache rows per slot set aside for a tree under a memory limit, which also bounds the tree."""

_PENDING_ROWS = 256  # feature rows a slot may keep for the drafter before they are moved into its cache
_PADDING_ROWS = 64  # padding rows of one drafting call beyond which long slots are brought up to date first


class Proposal(Protocol):
    """What a drafter returns: int32 [S, D, K], float32 [S, D, K], and hidden states [S, D, H] on the device."""

    @property
    def candidate_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def log_probs(self) -> npt.NDArray[np.float32]: ...
    @property
    def hidden(self) -> torch.Tensor: ...


class Drafter(Protocol):
    """What the engine needs of a drafter (`DFlashDrafter`, or a fake in tests)."""

    @property
    def draft_depth(self) -> int: ...
    @property
    def target_layer_ids(self) -> Sequence[int]: ...
    def new_cache(self, max_slots: int, max_length: int) -> SlotCache: ...
    def extend(self, cache: SlotCache, slots: Sequence[int], features: torch.Tensor, counts: Sequence[int]) -> None: ...
    def propose(
        self,
        cache: SlotCache,
        features: torch.Tensor,
        counts: Sequence[int],
        root_tokens: Sequence[int],
        num_candidates: int,
    ) -> Proposal: ...


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
    summary: SequenceSummary | None = None  # on the last event


@dataclass(eq=False)
class _Sequence:
    """One sequence's state between steps."""

    sequence_id: str
    key: int
    params: SamplingParams
    prompt: list[int]
    limit: int  # prompt and output tokens it may reach
    stop_tokens: frozenset[int]
    chooser: TokenChooser
    stream: TextStream | None
    output: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    pending: list[torch.Tensor] = field(default_factory=list)  # features [n, F] of committed rows not yet drafted with
    acceptance_lengths: list[int] = field(default_factory=list)  # of the last rounds
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    build_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0

    @property
    def room(self) -> int:
        """Tokens it may still output."""
        return self.limit - len(self.prompt) - len(self.output)

    @property
    def is_argmax(self) -> bool:
        """Whether its tokens are plain argmaxes, which the batch computes at once."""
        return self.params.is_greedy and not self.params.has_penalties

    @property
    def num_pending(self) -> int:
        return sum(len(rows) for rows in self.pending)

    def summary(self) -> SequenceSummary:
        return SequenceSummary(
            num_rounds=self.num_rounds,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            prefill_s=self.prefill_s,
            decode_s=self.draft_s + self.build_s + self.verify_s + self.commit_s,
            draft_s=self.draft_s,
            build_s=self.build_s,
            verify_s=self.verify_s,
            commit_s=self.commit_s,
        )


@dataclass(frozen=True)
class _Draft:
    """The drafter's part of a round, for all slots."""

    limits: list[int]
    states: list[DraftState]
    proposal: Proposal | None


@dataclass(frozen=True)
class _Verified:
    """The target's part of a round: the rows that exist, slot after slot."""

    output: TargetOutput  # logits [N, V], features [S, R, F]
    starts: list[int]  # first row of each slot among the N
    argmax: npt.NDArray[np.int32] | None  # [N], when a slot wants it


@dataclass(frozen=True)
class _Outcome:
    """What a round or a prefill gave one sequence."""

    token_ids: list[int]
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    path: list[int] = field(default_factory=list)  # accepted nodes that became output
    target_tokens: npt.NDArray[np.int32] | None = None  # at every node, when recording


@dataclass(frozen=True)
class _Clock:
    """Nanoseconds at the stage boundaries of a round."""

    start: int
    drafted: int
    built: int
    verified: int
    committed: int


class Engine:
    """Decodes a batch of sequences; see `step`.

    Args:
        target: the model that decides.
        drafter: proposes; None for plain decoding only.
        policy: scorer and budgets; the attribute may be replaced between two steps.
        max_slots: sequences decoded together; further ones wait.
        max_length: prompt and output tokens of a sequence, at most (default: the target's own limit).
        memory_limit_bytes: bounds both caches; sequences wait until they fit, one that never fits is refused. Growing
            a cache needs its old memory beside the new for a moment, which is not counted.
        prefill_chunk: prompt tokens read per step, at most, so that a long prompt does not stall the others.
        record: attach a `RoundRecord` to each round's event.
        detokenize: give text with the events (sequences with stop strings are always detokenized).
    """

    def __init__(  # noqa: PLR0913 - each argument is one limit or switch of the engine
        self,
        target: Target,
        drafter: Drafter | None,
        policy: DecodingPolicy,
        *,
        max_slots: int = 8,
        max_length: int | None = None,
        memory_limit_bytes: int | None = None,
        prefill_chunk: int = 256,
        record: bool = False,
        detokenize: bool = True,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.max_slots = _at_least_one("max_slots", max_slots)
        self.prefill_chunk = _at_least_one("prefill_chunk", prefill_chunk)
        self.max_length = target.max_position_embeddings if max_length is None else max_length
        if not 2 <= self.max_length <= target.max_position_embeddings:
            raise ValueError(
                f"max_length must be between 2 and the target's {target.max_position_embeddings}, not {max_length}"
            )
        self.memory_limit_bytes = memory_limit_bytes
        self.record = record
        self.detokenize = detokenize and target.tokenizer is not None
        self._tap_layers = tuple(drafter.target_layer_ids) if drafter is not None else ()
        target.check_taps(self._tap_layers)
        self._cache = target.new_cache(max_slots, self.max_length)
        self._drafter_cache = drafter.new_cache(max_slots, self.max_length) if drafter is not None else None
        self._share_limit()
        self._live: list[_Sequence] = []  # index = slot
        self._filling: _Sequence | None = None  # the sequence whose prompt is partly read
        self._waiting: deque[_Sequence] = deque()
        self._unsent: list[SequenceEvent] = []  # of sequences aborted since the last step
        self._num_added = 0

    @property
    def num_live(self) -> int:
        """Sequences that hold a slot."""
        return len(self._live) + (self._filling is not None)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` would return something or bring something forward."""
        return bool(self._live or self._filling or self._waiting or self._unsent)

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sequence_id: str | None = None) -> str:
        """Queue a prompt and return its id (`sequence_id`, or a new one). It gets a slot in a later step.

        Raises ValueError for an empty prompt, one that leaves no room for an answer, ids outside the vocabulary, or an
        id that is in use.
        """
        prompt = [int(token) for token in prompt_token_ids]
        self._check_prompt(prompt)
        if sequence_id is None:
            sequence_id = f"seq-{self._num_added}"
        if any(sequence.sequence_id == sequence_id for sequence in self._sequences()):
            raise ValueError(f"sequence id {sequence_id!r} is in use")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        has_text = self.detokenize or bool(params.stop)
        if params.stop and self.target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the target has none")
        sequence = _Sequence(
            sequence_id=sequence_id,
            key=int.from_bytes(hashlib.sha256(sequence_id.encode()).digest()[:8], "big"),
            params=params,
            prompt=prompt,
            limit=min(len(prompt) + params.max_new_tokens, self.max_length),
            stop_tokens=params.stop_set(self.target.eos_token_ids),
            chooser=TokenChooser(params, seed, prompt, self.target.vocab_size, self.target.device),
            stream=TextStream(self.target.tokenizer, params.stop) if has_text else None,
        )
        if not self._fits([sequence]):
            raise ValueError(
                f"a sequence of up to {sequence.limit} tokens needs {self._bytes_needed([sequence])} bytes of cache, "
                f"the limit is {self.memory_limit_bytes}"
            )
        self._num_added += 1
        self._waiting.append(sequence)
        return sequence_id

    def abort(self, sequence_id: str) -> bool:
        """End a sequence now; its last event, with reason "abort", comes with the next step. False if it is unknown."""
        found = next((sequence for sequence in self._sequences() if sequence.sequence_id == sequence_id), None)
        if found is None:
            return False
        if found in self._waiting:
            self._waiting.remove(found)
        else:
            self._release(found)
        self._unsent.append(SequenceEvent(sequence_id, [], "", None, "abort", summary=found.summary()))
        return True

    @torch.inference_mode()
    def step(self) -> list[SequenceEvent]:
        """Read a chunk of waiting prompts, then run one round for every live slot; return what came out.

        A sequence whose prompt is read in this step takes part in the round, so it may have two events.
        """
        events, self._unsent = self._unsent, []
        events += self._prefill()
        if not self._live:
            return events
        batch = list(self._live)
        start = time.perf_counter_ns()
        draft = self._draft(batch)
        drafted = time.perf_counter_ns()
        trees = self._build(batch, draft)
        built = time.perf_counter_ns()
        verdicts = self._verify(batch, trees)
        verified = time.perf_counter_ns()
        outcomes = [self._accept(slot, tree, verdicts) for slot, tree in enumerate(trees)]
        self._commit(batch, trees, verdicts, outcomes)
        clock = _Clock(start, drafted, built, verified, time.perf_counter_ns())
        records = self._records(batch, draft, trees, verdicts, outcomes, clock)
        return events + self._finish_round(batch, trees, outcomes, records, clock)

    # ---- joining and leaving

    def _sequences(self) -> list[_Sequence]:
        return [*self._live, *([self._filling] if self._filling else []), *self._waiting]

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= self.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer: prompt and answer together "
                f"may have {self.max_length}"
            )
        outside = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {self.target.vocab_size}")

    def _share_limit(self) -> None:
        """Divide the memory limit between the two caches as they grow: by the bytes of a row."""
        if self.memory_limit_bytes is None:
            return
        caches = [cache for cache in (self._cache, self._drafter_cache) if cache is not None]
        total = sum(cache.bytes_per_token for cache in caches)
        for cache in caches:
            cache.limit_bytes = self.memory_limit_bytes * cache.bytes_per_token // total

    def _rows_needed(self, sequences: Sequence[_Sequence]) -> int:
        return max(sequence.limit for sequence in sequences) + SCRATCH_ROWS

    def _bytes_needed(self, sequences: Sequence[_Sequence]) -> int:
        caches = [cache for cache in (self._cache, self._drafter_cache) if cache is not None]
        return sum(cache.bytes_for(len(sequences), self._rows_needed(sequences)) for cache in caches)

    def _fits(self, sequences: Sequence[_Sequence]) -> bool:
        return self.memory_limit_bytes is None or self._bytes_needed(sequences) <= self.memory_limit_bytes

    def _admit(self) -> _Sequence | None:
        """Give the first waiting sequence a slot, if there is one and its cache rows fit."""
        if not self._waiting or self.num_live >= self.max_slots:
            return None
        together = [*self._live, self._waiting[0]]
        if not self._fits(together):
            return None
        if self.memory_limit_bytes is not None:
            # All that these sequences may ever need, at once: growing row by row at the limit would copy every time.
            self._cache.reserve(len(together), self._rows_needed(together))
        self._cache.add()
        self._filling = self._waiting.popleft()
        return self._filling

    def _release(self, sequence: _Sequence) -> None:
        """Free a sequence's slot and close the gap."""
        if sequence is self._filling:
            self._cache.remove(len(self._live))
            self._filling = None
            return
        slot, last = self._live.index(sequence), len(self._live) - 1
        self._cache.remove(slot)
        if self._filling is not None and slot != last:
            # The partly read prompt moved into the gap; the decoding slots must stay in front of it.
            self._cache.swap(slot, last)
        if self._drafter_cache is not None:
            self._drafter_cache.remove(slot)
        self._live[slot] = self._live[last]
        self._live.pop()

    # ---- prefill

    def _prefill(self) -> list[SequenceEvent]:
        """Read up to `prefill_chunk` tokens of waiting prompts; give the first token of each prompt that is done."""
        events: list[SequenceEvent] = []
        num_left = self.prefill_chunk
        while num_left > 0:
            sequence = self._filling or self._admit()
            if sequence is None:
                break
            start = time.perf_counter()
            chunk = sequence.prompt[sequence.num_prefilled : sequence.num_prefilled + num_left]
            output = self.target.prefill(chunk, self._cache, len(self._live), self._tap_layers)
            num_left -= len(chunk)
            sequence.num_prefilled += len(chunk)
            if self.drafter is not None:
                sequence.pending.append(output.features[0])
            outcome = self._first_token(sequence, output) if sequence.num_prefilled == len(sequence.prompt) else None
            sequence.prefill_s += time.perf_counter() - start
            if outcome is not None:
                events.append(self._start_decoding(sequence, outcome))
        return events

    def _first_token(self, sequence: _Sequence, output: TargetOutput) -> _Outcome:
        try:
            if sequence.is_argmax:
                token = int(greedy_tokens(output.logits)[0])
            else:
                token = sequence.chooser.next_token(output.logits[0])
            return _take(sequence, [token], output.logits)
        except Exception as error:
            return _failure(error)

    def _start_decoding(self, sequence: _Sequence, outcome: _Outcome) -> SequenceEvent:
        if outcome.finish_reason is not None:
            self._release(sequence)
        else:
            self._filling = None
            self._live.append(sequence)
            if self._drafter_cache is not None:
                if self.memory_limit_bytes is not None:
                    self._drafter_cache.reserve(len(self._live), self._rows_needed(self._live))
                self._drafter_cache.add()
        return _event(sequence, outcome, None)

    # ---- draft

    def _draft(self, batch: list[_Sequence]) -> _Draft:
        """Ask the policy whom to draft for, and the drafter, once, for all slots if for any."""
        states = [self._state(slot, sequence) for slot, sequence in enumerate(batch)]
        limits = self.policy.budget.limits(states)
        if not any(limits):
            self._bound_pending(batch)
            return _Draft(limits, states, None)
        if self.drafter is None or self._drafter_cache is None:
            raise PolicyError(f"policy {self.policy.name!r} drafts, but the engine has no drafter")
        self._catch_up(batch)
        counts = [sequence.num_pending for sequence in batch]
        features = pad_sequence([_joined(sequence.pending) for sequence in batch], batch_first=True)
        roots = [sequence.output[-1] for sequence in batch]
        num_candidates = min(self.policy.num_candidates, self.target.vocab_size)
        proposal = self.drafter.propose(self._drafter_cache, features, counts, roots, num_candidates)
        for sequence in batch:
            sequence.pending.clear()
        if self.policy.budget.needs_state or self.record:
            states = _with_draft(states, proposal)
        return _Draft(limits, states, proposal)

    def _state(self, slot: int, sequence: _Sequence) -> DraftState:
        return DraftState(
            conf=0.0,
            degen=0.0,
            hist=acceptance_history(sequence.acceptance_lengths),
            context_length=self._cache.lengths[slot],
            max_budget=self._max_budget(sequence),
            sequence_key=sequence.key,
            round_index=sequence.num_rounds,
        )

    def _max_depth(self, sequence: _Sequence) -> int:
        """Deepest node that can still become output: a round gives one token more than the path is long."""
        depth = 0 if self.drafter is None else self.drafter.draft_depth
        if self.policy.max_depth is not None:
            depth = min(depth, self.policy.max_depth)
        return min(depth, sequence.room - 1)

    def _max_budget(self, sequence: _Sequence) -> int:
        most = MAX_NODES if self.memory_limit_bytes is None else SCRATCH_ROWS - 1
        if self.drafter is None:
            return most  # a policy that drafts must be refused, not silenced
        depth = self._max_depth(sequence)
        return min(depth, most) if self.policy.num_candidates == 1 or depth == 0 else most

    def _catch_up(self, batch: list[_Sequence]) -> None:
        """Move long pending contexts, all but the last row, into the drafter's cache where padding would be a waste."""
        counts = [sequence.num_pending for sequence in batch]
        if len(batch) * max(counts) - sum(counts) <= _PADDING_ROWS:
            return
        for slot, sequence in enumerate(batch):
            if counts[slot] > _PADDING_ROWS // len(batch) + 1:
                self._extend(slot, sequence)

    def _bound_pending(self, batch: list[_Sequence]) -> None:
        """Keep slots that nobody drafts for from piling up features."""
        for slot, sequence in enumerate(batch):
            if sequence.num_pending > _PENDING_ROWS:
                self._extend(slot, sequence)

    def _extend(self, slot: int, sequence: _Sequence) -> None:
        assert self.drafter is not None and self._drafter_cache is not None
        rows = _joined(sequence.pending)
        self.drafter.extend(self._drafter_cache, [slot], rows[None, :-1], [len(rows) - 1])
        sequence.pending = [rows[-1:]]

    # ---- build

    def _build(self, batch: list[_Sequence], draft: _Draft) -> list[DraftTree]:
        """One tree per slot: the largest its limit allows, then cut to the budget the policy chooses."""
        roots = [sequence.output[-1] for sequence in batch]
        proposal = draft.proposal
        if proposal is None:
            return [root_tree(root) for root in roots]
        scores = self.policy.scorer.score(np.array(roots, np.int64), proposal.candidate_ids, proposal.log_probs)
        trees = [
            build_tree(roots[slot], proposal.candidate_ids[slot], scores[slot], limit, self._max_depth(batch[slot]))
            if limit > 0
            else root_tree(roots[slot])
            for slot, limit in enumerate(draft.limits)
        ]
        budgets = self.policy.budget.choose(trees, draft.states)
        return [tree.take(budget) for tree, budget in zip(trees, budgets, strict=True)]

    # ---- verify

    def _verify(self, batch: list[_Sequence], trees: list[DraftTree]) -> _Verified:
        """Run the target once over all trees, padded to the largest."""
        target, lengths = self.target, self._cache.lengths[: len(trees)]
        sizes = [tree.num_nodes + 1 for tree in trees]
        num_rows = max(sizes)
        width = max(lengths) + num_rows
        # Token ids, rotary positions and cache rows travel to the device together.
        layout = np.zeros((3, len(trees), num_rows), np.int64)
        layout[1:] = np.array(lengths)[:, None]
        layout[2] += np.arange(num_rows)
        for slot, tree in enumerate(trees):
            layout[0, slot, : sizes[slot]] = tree.tokens
            layout[1, slot, : sizes[slot]] += tree.depths
        token_ids, positions, rows = torch.from_numpy(layout).to(target.device, non_blocking=True)
        mask = tree_mask(lengths, ancestor_masks(trees, num_rows), width, target.dtype, target.device, target.groups)
        self._cache.begin(rows, width)
        real = np.concatenate([slot * num_rows + np.arange(size) for slot, size in enumerate(sizes)])
        logit_rows = torch.from_numpy(real).to(target.device, non_blocking=True)
        output = target.forward(token_ids, positions, mask, self._cache, self._tap_layers, logit_rows)
        argmax = None
        if any(sequence.is_argmax for sequence in batch):
            argmax = greedy_tokens(output.logits).to(torch.int32).cpu().numpy()
        return _Verified(output, [0, *np.cumsum(sizes)[:-1].tolist()], argmax)

    # ---- accept

    def _accept(self, slot: int, tree: DraftTree, verified: _Verified) -> _Outcome:
        """Walk one slot's tree and decide what it outputs; an exception here ends this sequence only."""
        sequence, start = self._live[slot], verified.starts[slot]
        logits = verified.output.logits[start : start + tree.num_nodes + 1]
        try:
            target_tokens: npt.NDArray[np.int32] | None = None
            if sequence.is_argmax:
                assert verified.argmax is not None
                target_tokens = verified.argmax[start : start + tree.num_nodes + 1]
            elif self.record:
                target_tokens = sequence.chooser.next_tokens(logits, tree)
            if target_tokens is not None:
                verdict = accept(tree, target_tokens.tolist().__getitem__)
            else:
                verdict = accept(tree, sequence.chooser.walker(logits, tree))
            outcome = _take(sequence, verdict.token_ids(tree), _path_logits(sequence, logits, verdict))
            return replace(outcome, path=verdict.path[: len(outcome.token_ids)], target_tokens=target_tokens)
        except Exception as error:
            return _failure(error)

    # ---- commit

    def _commit(
        self, batch: list[_Sequence], trees: list[DraftTree], verified: _Verified, outcomes: list[_Outcome]
    ) -> None:
        """Keep each path's rows in the target's cache, and their features for the drafter; count."""
        kept = [[0, *outcome.path] if outcome.finish_reason is None else [] for outcome in outcomes]
        lengths = self._cache.lengths[: len(batch)]
        self._cache.keep([[length + node for node in nodes] for length, nodes in zip(lengths, kept, strict=True)])
        for slot, (sequence, nodes) in enumerate(zip(batch, kept, strict=True)):
            if nodes and self.drafter is not None:
                rows = torch.tensor(nodes).to(self.target.device, non_blocking=True)
                sequence.pending.append(verified.output.features[slot].index_select(0, rows))

    # ---- what is left of a round

    def _finish_round(
        self,
        batch: list[_Sequence],
        trees: list[DraftTree],
        outcomes: list[_Outcome],
        records: list[RoundRecord | None],
        clock: _Clock,
    ) -> list[SequenceEvent]:
        events = []
        for sequence, tree, outcome, record in zip(batch, trees, outcomes, records, strict=True):
            if outcome.finish_reason != "error":
                sequence.num_rounds += 1
                sequence.num_drafted += tree.num_nodes
                sequence.num_accepted += len(outcome.path)
                sequence.acceptance_lengths = [*sequence.acceptance_lengths, len(outcome.token_ids)][-HISTORY_WINDOW:]
            sequence.draft_s += (clock.drafted - clock.start) / 1e9
            sequence.build_s += (clock.built - clock.drafted) / 1e9
            sequence.verify_s += (clock.verified - clock.built) / 1e9
            sequence.commit_s += (clock.committed - clock.verified) / 1e9
            if outcome.finish_reason is not None:
                self._release(sequence)
            events.append(_event(sequence, outcome, record))
        return events

    def _records(
        self,
        batch: list[_Sequence],
        draft: _Draft,
        trees: list[DraftTree],
        verified: _Verified,
        outcomes: list[_Outcome],
        clock: _Clock,
    ) -> list[RoundRecord | None]:
        if not self.record:
            return [None] * len(batch)
        parents = _parent_logits(draft.proposal, self.policy.num_candidates, verified, outcomes)
        num_rows = sum(tree.num_nodes + 1 for tree in trees)
        records: list[RoundRecord | None] = []
        for slot, (sequence, tree, outcome) in enumerate(zip(batch, trees, outcomes, strict=True)):
            if outcome.target_tokens is None:
                records.append(None)
                continue
            state, (logits, logsumexp) = draft.states[slot], parents[slot]
            ids, log_probs = _candidates(draft.proposal, slot, self.policy.num_candidates)
            records.append(
                RoundRecord(
                    sequence_id=sequence.sequence_id,
                    round_index=sequence.num_rounds,
                    context_length=state.context_length,
                    root_token=int(tree.tokens[0]),
                    candidate_ids=ids,
                    candidate_log_probs=log_probs,
                    conf=state.conf,
                    degen=state.degen,
                    hist=state.hist,
                    budget=tree.num_nodes,
                    tree_tokens=tree.tokens,
                    tree_parents=tree.parents,
                    tree_depths=tree.depths,
                    target_tokens=outcome.target_tokens,
                    accepted=np.array(outcome.path, np.int32),
                    num_tokens=len(outcome.token_ids),
                    parent_logits=logits,
                    parent_logsumexp=logsumexp,
                    draft_ns=clock.drafted - clock.start,
                    build_ns=clock.built - clock.drafted,
                    verify_ns=clock.verified - clock.built,
                    commit_ns=clock.committed - clock.verified,
                    batch_size=len(batch),
                    batch_rows=num_rows,
                )
            )
        return records


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _joined(pending: list[torch.Tensor]) -> torch.Tensor:
    return pending[0] if len(pending) == 1 else torch.cat(pending)


def _with_draft(states: list[DraftState], proposal: Proposal) -> list[DraftState]:
    conf, degen = confidences(proposal.log_probs), degenerations(proposal.hidden)
    return [replace(state, conf=float(conf[slot]), degen=float(degen[slot])) for slot, state in enumerate(states)]


def _take(sequence: _Sequence, token_ids: list[int], logits: torch.Tensor | None) -> _Outcome:
    """Cut new tokens where plain decoding would have ended, add them to the sequence, and say what came of it.

    `logits` [n, V]: one row per token, needed if the sequence wants log-probabilities.
    """
    count, reason = trim(token_ids, sequence.stop_tokens, sequence.room)
    finish_reason: FinishReason | None = reason
    text = ""
    if sequence.stream is not None:
        delta = sequence.stream.push(token_ids[:count])
        text = delta.text
        if delta.is_stopped:
            count, finish_reason = delta.num_tokens, "stop"
        if finish_reason is not None:
            text += sequence.stream.finish()
    kept = token_ids[:count]
    logprobs = None
    if sequence.params.logprobs is not None and logits is not None:
        logprobs = token_logprobs(logits[:count], kept, sequence.params.logprobs)
    sequence.output += kept
    sequence.chooser.commit(kept)
    return _Outcome(kept, text, logprobs, finish_reason)


def _path_logits(sequence: _Sequence, logits: torch.Tensor, verdict: Verdict) -> torch.Tensor | None:
    """The logits that a round's tokens were chosen from [n, V], if the sequence wants log-probabilities."""
    if sequence.params.logprobs is None:
        return None
    return logits[torch.tensor([0, *verdict.path], device=logits.device)]


def _failure(error: Exception) -> _Outcome:
    return _Outcome([], finish_reason="error", error=f"{type(error).__name__}: {error}")


def _event(sequence: _Sequence, outcome: _Outcome, record: RoundRecord | None) -> SequenceEvent:
    return SequenceEvent(
        sequence_id=sequence.sequence_id,
        token_ids=outcome.token_ids,
        text=outcome.text if sequence.stream is not None else "",
        logprobs=outcome.logprobs,
        finish_reason=outcome.finish_reason,
        error=outcome.error,
        round=record,
        summary=sequence.summary() if outcome.finish_reason is not None else None,
    )


def _candidates(
    proposal: Proposal | None, slot: int, num_candidates: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    if proposal is None:
        return np.zeros((0, num_candidates), np.int32), np.zeros((0, num_candidates), np.float32)
    return proposal.candidate_ids[slot], proposal.log_probs[slot]


def _parent_logits(
    proposal: Proposal | None, num_candidates: int, verified: _Verified, outcomes: list[_Outcome]
) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Per slot the raw logits [P, K] of the next depth's candidates at the root and each accepted node, and their LSE.

    One gather for the whole batch.
    """
    if proposal is None:
        return [(np.zeros((0, num_candidates), np.float32), np.zeros(0, np.float32))] * len(outcomes)
    depth = proposal.candidate_ids.shape[1]
    parents = [[0, *outcome.path][:depth] for outcome in outcomes]
    rows = [start + node for start, nodes in zip(verified.starts, parents, strict=True) for node in nodes]
    ids = np.concatenate([proposal.candidate_ids[slot, : len(nodes)] for slot, nodes in enumerate(parents)])
    logits = verified.output.logits
    chosen = logits.index_select(0, torch.tensor(rows).to(logits.device)).float()
    gathered = chosen.gather(1, torch.from_numpy(ids.astype(np.int64)).to(logits.device)).cpu().numpy()
    logsumexp = chosen.logsumexp(dim=1).cpu().numpy()
    ends = np.cumsum([len(nodes) for nodes in parents])
    return [
        (gathered[end - len(nodes) : end], logsumexp[end - len(nodes) : end])
        for end, nodes in zip(ends, parents, strict=True)
    ]
