"""Engine: many sequences decoded together, one round at a time.

A round is draft, build, verify, accept, commit; plain decoding, chains and trees are the same round with another
policy. Owns the slots and the queue; a sequence's own state is in `active_sequence.py`, the arithmetic in `target.py`,
`drafter.py`, `draft_tree.py` and `sampling.py`.

Slots of sequences that are being decoded are 0 .. S - 1, in both caches. At most one prompt is partly read at any time;
its slot in the target's cache is S, and it enters the drafter's cache when it starts decoding.

What fails: work on one sequence (a prompt's forward, choosing its tokens, logits that are not finite) ends that
sequence with the reason "error". A forward of the whole batch, or the device, raises out of `step` and leaves the
engine as it was before the round, to be asked again. Only an error after tokens were taken leaves it unusable, and
every later call says so. A drafter that gives no finite numbers for a sequence is not asked about it again.

Not covered: thread safety (call everything from one thread), preemption of running sequences.

Letters: S slots, R rows (tree nodes, padded), N rows that exist, V vocabulary, D draft depth, K candidates.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from graft_dist.active_sequence import ActiveSequence, Outcome, SequenceEvent, failure
from graft_dist.budget import DraftState, acceptance_history, confidences, degenerations
from graft_dist.draft_tree import MAX_NODES, DraftTree, ancestor_masks, build_tree, root_tree
from graft_dist.errors import PolicyError, is_device_failure
from graft_dist.kv_cache import SlotCache
from graft_dist.policy import DecodingPolicy
from graft_dist.rounds import Float32Array, Int32Array, RoundRecord, RoundTrace, is_mismatch, projected
from graft_dist.sampling import SamplingParams, TokenChooser, Verdict, accept
from graft_dist.target import Target, TargetOutput, greedy_tokens, tree_mask

__all__ = ["Drafter", "Engine", "EngineError", "Proposal", "SequenceEvent"]

_PENDING_ROWS = 256  # feature rows a slot may keep for the drafter before they are moved into its cache
_NOT_FINITE = "the target's logits are not finite: no token can be chosen"
_PADDING_ROWS = 64  # padding rows of one drafting call beyond which long slots are brought up to date first


class EngineError(RuntimeError):
    """The engine was used after an error in the middle of a round; what its slots hold is not known."""


class Proposal(Protocol):
    """What a drafter returns: int32 [S, D, K], float32 [S, D, K], and hidden states [S, D, H] on the device."""

    @property
    def candidate_ids(self) -> Int32Array: ...
    @property
    def log_probs(self) -> Float32Array: ...
    @property
    def hidden(self) -> torch.Tensor: ...


class Drafter(Protocol):
    """What the engine needs of a drafter (`DFlashDrafter`, or a fake in tests)."""

    @property
    def draft_depth(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Positions it can draft at: longer sequences are decoded plainly."""
        ...

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
class _Draft:
    """The drafter's part of a round, for all slots."""

    limits: list[int]
    states: list[DraftState]
    proposal: Proposal | None
    is_usable: list[bool]  # whether the proposal says anything of the slot


@dataclass(frozen=True)
class _Verified:
    """The target's part of a round: the rows that exist, slot after slot."""

    output: TargetOutput  # logits [N, V], features [S, R, F]
    starts: list[int]  # first row of each slot among the N
    argmax: Int32Array  # [N]
    is_finite: npt.NDArray[np.bool_]  # [N], of the logits


@dataclass(frozen=True)
class _Clock:
    """Nanoseconds at the stage boundaries of a round."""

    start: int
    drafted: int
    built: int
    verified: int
    committed: int

    @property
    def stages_ns(self) -> tuple[int, int, int, int]:
        """Draft, build, verify, commit."""
        return (
            self.drafted - self.start,
            self.built - self.drafted,
            self.verified - self.built,
            self.committed - self.verified,
        )


@dataclass(frozen=True)
class _Round:
    """A round that has been committed; lists are by slot."""

    batch: list[ActiveSequence]
    draft: _Draft
    trees: list[DraftTree]
    verified: _Verified
    outcomes: list[Outcome]
    clock: _Clock


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
        max_budget: under a memory limit, the most draft nodes that a round may verify for a slot: so many rows (and
            one for the root) are counted for each. Larger budgets are refused, a drafter's own depth always fits.
        prefill_chunk: prompt tokens read per step, at most, so that a long prompt does not stall the others.
        record: attach a `RoundRecord` to each round's event, of all sequences or of those whose ids are in a set; the
            attribute may be replaced between two steps. One that cannot be made is left out; `record_failure` has
            the last reason.
        projection: [H, H'], through which records keep the drafter's hidden states; None keeps none.
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
        max_budget: int = 127,
        prefill_chunk: int = 256,
        record: bool | AbstractSet[str] = False,
        projection: torch.Tensor | None = None,
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
        self._max_budget = max(max_budget, 0 if drafter is None else drafter.draft_depth)
        self.record = record
        self.record_failure: str | None = None
        self._projection = projection
        self.detokenize = detokenize and target.tokenizer is not None
        self._tap_layers = tuple(drafter.target_layer_ids) if drafter is not None else ()
        target.check_taps(self._tap_layers)
        self._cache = target.new_cache(max_slots, self.max_length)
        self._drafter_cache = drafter.new_cache(max_slots, self.max_length) if drafter is not None else None
        self._share_limit()
        self._live: list[ActiveSequence] = []  # index = slot
        self._filling: ActiveSequence | None = None  # the sequence whose prompt is partly read
        self._waiting: deque[ActiveSequence] = deque()
        self._unsent: list[SequenceEvent] = []  # of aborted sequences, and of steps that an error has ended
        self._num_added = 0
        self._fault: str | None = None  # the error in the middle of a round

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
        id that is in use. Raises EngineError after an error in the middle of a round.
        """
        self._check_usable()
        prompt = [int(token) for token in prompt_token_ids]
        self._check_prompt(prompt)
        if sequence_id is None:
            sequence_id = f"seq-{self._num_added}"
        if any(sequence.sequence_id == sequence_id for sequence in self._sequences()):
            raise ValueError(f"sequence id {sequence_id!r} is in use")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        if params.stop and self.target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the target has none")
        sequence = ActiveSequence(
            sequence_id,
            prompt,
            params,
            limit=min(len(prompt) + params.max_new_tokens, self.max_length),
            stop_tokens=params.stop_set(self.target.eos_token_ids),
            chooser=TokenChooser(params, seed, prompt, self.target.vocab_size, self.target.device),
            tokenizer=self.target.tokenizer if self.detokenize or params.stop else None,
        )
        if not self.fits(sequence.limit):
            raise ValueError(
                f"a sequence of up to {sequence.limit} tokens needs {self._bytes_needed(1, sequence.limit)} bytes of "
                f"cache, the limit is {self.memory_limit_bytes}"
            )
        self._num_added += 1
        self._waiting.append(sequence)
        return sequence_id

    def fits(self, num_tokens: int, num_sequences: int = 1) -> bool:
        """Whether sequences of up to `num_tokens` (prompt and output) each are within the memory limit together."""
        return self.memory_limit_bytes is None or (
            self._bytes_needed(num_sequences, num_tokens) <= self.memory_limit_bytes
        )

    def abort(self, sequence_id: str) -> bool:
        """End a sequence now; its last event, with reason "abort", comes with the next step. False if it is unknown.

        Raises EngineError after an error in the middle of a round.
        """
        self._check_usable()
        found = next((sequence for sequence in self._sequences() if sequence.sequence_id == sequence_id), None)
        if found is None:
            return False
        if found in self._waiting:
            self._waiting.remove(found)
        else:
            self._release(found)
        self._unsent.append(found.event(Outcome([], finish_reason="abort")))
        return True

    @torch.inference_mode()
    def step(self) -> list[SequenceEvent]:
        """Read a chunk of waiting prompts, then run one round for every live slot; return what came out.

        A sequence whose prompt is read in this step takes part in the round, so it may have two events.

        A failure in one sequence's own work ends that sequence alone, with the reason "error". One that concerns the
        whole batch, the policy or the device is raised: until the target has answered nothing has been committed, so
        that `step` may be called again (with another policy, say), and no event is lost. Raises EngineError after an
        error in the middle of a commit.
        """
        self._check_usable()
        self._prefill()
        return self.run_round()

    @torch.inference_mode()
    def read_prompts(self) -> list[SequenceEvent]:
        """The first half of a step alone: a server sends first tokens off before the round that follows them."""
        self._check_usable()
        self._prefill()
        return self._take_unsent()

    @torch.inference_mode()
    def run_round(self) -> list[SequenceEvent]:
        """The second half of a step alone; what it raises, and when it may be called again, is as with `step`."""
        self._check_usable()
        if self._live:
            self._run_round(list(self._live))
        return self._take_unsent()

    def _take_unsent(self) -> list[SequenceEvent]:
        events, self._unsent = self._unsent, []
        return events

    def _run_round(self, batch: list[ActiveSequence]) -> None:
        """One round for the live slots. Until the target has answered, it can be repeated."""
        trees: list[DraftTree] = []
        try:
            start = time.perf_counter_ns()
            draft = self._draft(batch)
            drafted = time.perf_counter_ns()
            trees = self._build(batch, draft)
            built = time.perf_counter_ns()
            answers = self._verify(trees)
            verified = time.perf_counter_ns()
        except BaseException as error:
            self._take_back_context(batch)
            if not isinstance(error, Exception):
                raise
            self._end_failing(batch, trees, error)
            return
        with self._changing():
            outcomes = [self._accept(slot, tree, answers) for slot, tree in enumerate(trees)]
            self._commit(batch, draft, answers, outcomes)
            clock = _Clock(start, drafted, built, verified, time.perf_counter_ns())
            self._finish(_Round(batch, draft, trees, answers, outcomes, clock))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Sequences and caches change together: whatever ends this early has left them apart."""
        try:
            yield
        except BaseException as error:
            self._fault = f"{type(error).__name__}: {error}"
            raise

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Whatever a record needs beyond decoding: when it fails, the round goes without its record."""
        try:
            yield
        except Exception as error:
            if is_device_failure(error):
                raise
            self.record_failure = f"{type(error).__name__}: {error}"

    def _is_recorded(self, sequence: ActiveSequence) -> bool:
        return self.record if isinstance(self.record, bool) else sequence.sequence_id in self.record

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise EngineError(f"an error ended this engine in the middle of a round ({self._fault}); make a new engine")

    # ---- joining and leaving

    def _sequences(self) -> list[ActiveSequence]:
        return [*self._live, *([self._filling] if self._filling else []), *self._waiting]

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= self.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer: prompt and answer together "
                f"may have {self.max_length}"
            )
        self.target.check_tokens(prompt)

    def _share_limit(self) -> None:
        """Divide the memory limit between the two caches as they grow: by the bytes of a row."""
        if self.memory_limit_bytes is None:
            return
        caches = [cache for cache in (self._cache, self._drafter_cache) if cache is not None]
        total = sum(cache.bytes_per_token for cache in caches)
        for cache in caches:
            cache.limit_bytes = self.memory_limit_bytes * cache.bytes_per_token // total

    def _rows_needed(self, num_tokens: int) -> int:
        return num_tokens + self._max_budget + 1

    def _bytes_needed(self, num_sequences: int, num_tokens: int) -> int:
        caches = [cache for cache in (self._cache, self._drafter_cache) if cache is not None]
        return sum(cache.bytes_for(num_sequences, self._rows_needed(num_tokens)) for cache in caches)

    def _admit(self) -> ActiveSequence | None:
        """Give the first waiting sequence a slot, if there is one and its cache rows fit.

        One for which a cache cannot grow ends with an error; those that are decoded go on.
        """
        if not self._waiting or self.num_live >= self.max_slots:
            return None
        together = [*self._live, self._waiting[0]]
        longest = max(sequence.limit for sequence in together)
        if not self.fits(longest, len(together)):
            return None
        # With a memory limit all that these sequences may ever need, at once: growing row by row at the limit would
        # copy every time.
        num_rows = 1 if self.memory_limit_bytes is None else self._rows_needed(longest)
        try:
            for cache in (self._cache, self._drafter_cache):
                if cache is not None:
                    cache.reserve(len(together), num_rows)
        except Exception as error:
            outcome = failure(error)
            self._unsent.append(self._waiting.popleft().event(outcome))
            return None
        self._cache.add()
        self._filling = self._waiting.popleft()
        return self._filling

    def _release(self, sequence: ActiveSequence) -> None:
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
            if sequence.is_undraftable:
                self._drafter_cache.clear(slot)  # its keys and values may be NaN
            self._drafter_cache.remove(slot)
        self._live[slot] = self._live[last]
        self._live.pop()

    # ---- prefill

    def _prefill(self) -> None:
        """Read up to `prefill_chunk` tokens of waiting prompts; choose the first token of each prompt that is done."""
        num_left = self.prefill_chunk
        while num_left > 0:
            sequence = self._filling or self._admit()
            if sequence is None:
                break
            start = time.perf_counter()
            chunk = sequence.prompt[sequence.num_prefilled : sequence.num_prefilled + num_left]
            num_left -= len(chunk)
            outcome: Outcome | None = None
            try:
                output = self.target.prefill(chunk, self._cache, len(self._live), self._tap_layers)
            except Exception as error:
                outcome = failure(error)
            with self._changing():
                if outcome is None:
                    outcome = self._take_chunk(sequence, len(chunk), output)
                sequence.prefill_s += time.perf_counter() - start
                if outcome is not None:
                    self._unsent.append(self._start_decoding(sequence, outcome))

    def _take_chunk(self, sequence: ActiveSequence, num_tokens: int, output: TargetOutput) -> Outcome | None:
        """Count what was read of a prompt; the first token if that was the rest of it."""
        sequence.num_prefilled += num_tokens
        if self.drafter is not None:
            sequence.add_pending(output.features[0])
        return self._first_token(sequence, output) if sequence.num_prefilled == len(sequence.prompt) else None

    def _first_token(self, sequence: ActiveSequence, output: TargetOutput) -> Outcome:
        try:
            token = int(greedy_tokens(output.logits)[0])
            if not bool(output.logits[0, token].isfinite()):
                raise FloatingPointError(_NOT_FINITE)
            if not sequence.is_argmax:
                token = sequence.chooser.next_token(output.logits[0])
            return sequence.take([token], output.logits)
        except Exception as error:
            return failure(error)

    def _start_decoding(self, sequence: ActiveSequence, outcome: Outcome) -> SequenceEvent:
        if outcome.finish_reason is not None:
            if outcome.finish_reason == "error":
                self._cache.clear(len(self._live))  # its keys and values may be NaN
            self._release(sequence)
        else:
            self._filling = None
            self._live.append(sequence)
            if self._drafter_cache is not None:
                self._drafter_cache.add()  # the room for it was made with the target's
        return sequence.event(outcome)

    # ---- draft

    def _draft(self, batch: list[ActiveSequence]) -> _Draft:
        """Ask the policy whom to draft for, and the drafter, once, for all slots if for any.

        Raises `PolicyError` when the policy drafts without a drafter, or more than the memory limit leaves room for.
        """
        states = [self._state(slot, sequence) for slot, sequence in enumerate(batch)]
        limits = self.policy.budget.limits(states)
        if not any(limits):
            self._bound_pending(batch)
            return _Draft(limits, states, None, [False] * len(batch))
        if self.drafter is None or self._drafter_cache is None:
            raise PolicyError(f"policy {self.policy.name!r} drafts, but the engine has no drafter")
        if self.memory_limit_bytes is not None and max(limits) > self._max_budget:
            raise PolicyError(
                f"policy {self.policy.name!r} has a budget of {max(limits)}, but under its memory limit the engine was "
                f"made for budgets up to {self._max_budget}"
            )
        self._catch_up(batch)
        counts = [sequence.num_pending for sequence in batch]
        features = pad_sequence([sequence.pending() for sequence in batch], batch_first=True)
        roots = [sequence.root for sequence in batch]
        num_candidates = min(self.policy.num_candidates, self.target.vocab_size)
        proposal = self.drafter.propose(self._drafter_cache, features, counts, roots, num_candidates)
        is_usable: list[bool] = np.all(proposal.log_probs < np.inf, axis=(1, 2)).tolist()  # also false of NaN
        for sequence, usable in zip(batch, is_usable, strict=True):
            sequence.is_undraftable |= not usable
        limits = [limit if usable else 0 for limit, usable in zip(limits, is_usable, strict=True)]
        if self.policy.budget.needs_state:
            states = _with_draft(states, proposal, is_usable)
        return _Draft(limits, states, proposal, is_usable)

    def _state(self, slot: int, sequence: ActiveSequence) -> DraftState:
        return DraftState(
            conf=0.0,
            degen=0.0,
            hist=acceptance_history(sequence.acceptance_lengths),
            context_length=self._cache.lengths[slot],
            max_budget=self._room(sequence),
            sequence_key=sequence.key,
            round_index=sequence.num_rounds,
        )

    def _max_depth(self, sequence: ActiveSequence) -> int:
        """Deepest node that can still become output: a round gives one token more than the path is long."""
        depth = 0 if self.drafter is None else self.drafter.draft_depth
        if self.drafter is None or sequence.is_undraftable or sequence.num_rows + depth >= self.drafter.max_positions:
            return 0
        if self.policy.max_depth is not None:
            depth = min(depth, self.policy.max_depth)
        return min(depth, sequence.room - 1)

    def _room(self, sequence: ActiveSequence) -> int:
        """Nodes that a tree can have. The memory limit does not count: what it cannot hold is refused, not cut."""
        if self.drafter is None:
            return MAX_NODES  # a policy that drafts must be refused, not silenced
        depth = self._max_depth(sequence)
        return min(depth, MAX_NODES) if self.policy.num_candidates == 1 or depth == 0 else MAX_NODES

    def _catch_up(self, batch: list[ActiveSequence]) -> None:
        """Move long pending contexts, all but the last row, into the drafter's cache where padding would be a waste."""
        counts = [sequence.num_pending for sequence in batch]
        if len(batch) * max(counts) - sum(counts) <= _PADDING_ROWS:
            return
        for slot, sequence in enumerate(batch):
            if counts[slot] > _PADDING_ROWS // len(batch) + 1:
                self._extend(slot, sequence)

    def _bound_pending(self, batch: list[ActiveSequence]) -> None:
        """Keep slots that nobody drafts for from piling up features."""
        for slot, sequence in enumerate(batch):
            if sequence.num_pending > _PENDING_ROWS:
                self._extend(slot, sequence)

    def _take_back_context(self, batch: list[ActiveSequence]) -> None:
        """Forget what the drafter was given since the last commit, so that it can be given it again."""
        if self._drafter_cache is not None:
            for slot, sequence in enumerate(batch):
                self._drafter_cache.lengths[slot] = self._cache.lengths[slot] - sequence.num_pending

    def _extend(self, slot: int, sequence: ActiveSequence) -> None:
        assert self.drafter is not None and self._drafter_cache is not None
        rows = sequence.pending()[:-1]
        self.drafter.extend(self._drafter_cache, [slot], rows[None], [len(rows)])
        sequence.drop_pending(len(rows))

    # ---- build

    def _build(self, batch: list[ActiveSequence], draft: _Draft) -> list[DraftTree]:
        """One tree per slot: the largest its limit allows, then cut to the budget the policy chooses."""
        roots = [sequence.root for sequence in batch]
        proposal = draft.proposal
        if proposal is None:
            return [root_tree(root) for root in roots]
        scorer = self.policy.scorer
        hidden = proposal.hidden if scorer.needs_hidden else None
        scores = scorer.score(np.array(roots, np.int64), proposal.candidate_ids, proposal.log_probs, hidden)
        trees = [
            build_tree(roots[slot], proposal.candidate_ids[slot], scores[slot], limit, self._max_depth(batch[slot]))
            if limit > 0
            else root_tree(roots[slot])
            for slot, limit in enumerate(draft.limits)
        ]
        budgets = self.policy.budget.choose(trees, draft.states)
        return [tree.take(budget) for tree, budget in zip(trees, budgets, strict=True)]

    # ---- verify

    def _verify(self, trees: list[DraftTree], first: int = 0) -> _Verified:
        """Run the target once over the trees of the slots from `first` on, padded to the largest."""
        slots = range(first, first + len(trees))
        target, lengths = self.target, self._cache.lengths[first : slots.stop]
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
        self._cache.begin(rows, width, slots=slots)
        real = np.concatenate([slot * num_rows + np.arange(size) for slot, size in enumerate(sizes)])
        logit_rows = torch.from_numpy(real).to(target.device, non_blocking=True)
        output = target.forward(token_ids, positions, mask, self._cache, self._tap_layers, logit_rows)
        best = greedy_tokens(output.logits).unsqueeze(1)
        finite = output.logits.gather(1, best).isfinite()  # a row's NaN is its maximum
        argmax, is_finite = torch.cat([best, finite], dim=1).cpu().numpy().T
        starts = [0, *np.cumsum(sizes)[:-1].tolist()]
        return _Verified(output, starts, argmax.astype(np.int32), is_finite.astype(np.bool_))

    def _end_failing(self, batch: list[ActiveSequence], trees: list[DraftTree], error: Exception) -> None:
        """After a failed round: end the sequences whose verification fails alone, too. Raises if there is none.

        The others lose nothing but this round.
        """
        failed: list[tuple[ActiveSequence, Exception]] = []
        for slot, tree in enumerate(trees):
            try:
                self._verify([tree], slot)
            except Exception as alone:
                failed.append((batch[slot], alone))
        if not failed:
            raise error
        outcomes = [(sequence, failure(alone)) for sequence, alone in failed]
        for sequence, outcome in outcomes:
            self._release(sequence)
            self._unsent.append(sequence.event(outcome))

    # ---- accept

    def _accept(self, slot: int, tree: DraftTree, verified: _Verified) -> Outcome:
        """Walk one slot's tree and decide what it outputs; an exception here ends this sequence only."""
        sequence, start = self._live[slot], verified.starts[slot]
        end = start + tree.num_nodes + 1
        logits = verified.output.logits[start:end]
        try:
            # All rows, for a node's NaN reaches the others through the mask: nothing times NaN is NaN.
            if not verified.is_finite[start:end].all():
                raise FloatingPointError(_NOT_FINITE)
            target_tokens = verified.argmax[start:end] if sequence.is_argmax else None
            if target_tokens is None and self._is_recorded(sequence):
                with self._recording():
                    target_tokens = sequence.chooser.next_tokens(logits, tree)
            if target_tokens is not None:
                verdict = accept(tree, target_tokens.tolist().__getitem__)
            else:
                verdict = accept(tree, sequence.chooser.walker(logits, tree))
            outcome = sequence.take(verdict.token_ids(tree), _path_logits(sequence, logits, verdict))
            return replace(outcome, path=verdict.path[: len(outcome.token_ids)], target_tokens=target_tokens)
        except Exception as error:
            return failure(error)

    # ---- commit

    def _commit(self, batch: list[ActiveSequence], draft: _Draft, verified: _Verified, outcomes: list[Outcome]) -> None:
        """Keep each path's rows in the target's cache, and their features for the drafter; count."""
        kept = [[0, *outcome.path] if outcome.finish_reason is None else [] for outcome in outcomes]
        lengths = self._cache.lengths[: len(batch)]
        self._cache.keep([[length + node for node in nodes] for length, nodes in zip(lengths, kept, strict=True)])
        for slot, (sequence, nodes) in enumerate(zip(batch, kept, strict=True)):
            if outcomes[slot].finish_reason == "error":
                self._cache.clear(slot)  # its keys and values may be NaN
            if draft.proposal is not None:
                sequence.drop_pending(sequence.num_pending)
            if nodes and self.drafter is not None:
                rows = torch.tensor(nodes).to(self.target.device, non_blocking=True)
                sequence.add_pending(verified.output.features[slot].index_select(0, rows))

    # ---- what is left of a round

    def _finish(self, done: _Round) -> None:
        """Count the round, free the slots of sequences that ended, and tell what happened."""
        records: list[RoundRecord | None] = [None] * len(done.batch)
        wanted = [self._is_recorded(sequence) for sequence in done.batch]
        if any(wanted):
            with self._recording():
                records = _records(done, wanted, self.policy, self._projection)
        traces = _traces(done)
        stages_s = np.array(done.clock.stages_ns) / 1e9
        each = zip(done.batch, done.trees, done.outcomes, records, traces, strict=True)
        for sequence, tree, outcome, record, trace in each:
            if outcome.finish_reason != "error":
                sequence.count_round(tree.num_nodes, outcome)
            sequence.stages_s += stages_s
            if outcome.finish_reason is not None:
                self._release(sequence)
            self._unsent.append(sequence.event(outcome, record, trace))


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _with_draft(states: list[DraftState], proposal: Proposal, is_usable: list[bool]) -> list[DraftState]:
    conf, degen = confidences(proposal.log_probs), degenerations(proposal.hidden)
    return [
        replace(state, conf=float(conf[slot]), degen=float(degen[slot])) if is_usable[slot] else state
        for slot, state in enumerate(states)
    ]


def _path_logits(sequence: ActiveSequence, logits: torch.Tensor, verdict: Verdict) -> torch.Tensor | None:
    """The logits that a round's tokens were chosen from [n, V], if the sequence wants log-probabilities."""
    if sequence.params.logprobs is None:
        return None
    return logits[torch.tensor([0, *verdict.path], device=logits.device)]


def _traces(done: _Round) -> list[RoundTrace | None]:
    """One trace per slot; None for a sequence whose own work failed."""
    num_rows = sum(tree.num_nodes + 1 for tree in done.trees)
    return [
        None if outcome.finish_reason == "error" else _slot_trace(done, slot, num_rows)
        for slot, outcome in enumerate(done.outcomes)
    ]


def _slot_trace(done: _Round, slot: int, num_rows: int) -> RoundTrace:
    tree, outcome = done.trees[slot], done.outcomes[slot]
    last = outcome.path[-1] if outcome.path else 0
    has_bonus = len(outcome.token_ids) > len(outcome.path)
    draft_ns, build_ns, verify_ns, commit_ns = done.clock.stages_ns
    return RoundTrace(
        round_index=done.draft.states[slot].round_index,
        budget=tree.num_nodes,
        tree_tokens=tree.tokens,
        tree_parents=tree.parents,
        tree_depths=tree.depths,
        accepted=np.array(outcome.path, np.int32),
        num_tokens=len(outcome.token_ids),
        is_mismatch=has_bonus and is_mismatch(tree.tokens, tree.depths, last, outcome.token_ids[-1]),
        draft_ns=draft_ns,
        build_ns=build_ns,
        verify_ns=verify_ns,
        commit_ns=commit_ns,
        batch_size=len(done.batch),
        batch_rows=num_rows,
    )


def _records(
    done: _Round, wanted: Sequence[bool], policy: DecodingPolicy, projection: torch.Tensor | None
) -> list[RoundRecord | None]:
    """One record per wanted slot; None for a sequence whose own work failed, or whose target tokens are not known."""
    draft, num_candidates = done.draft, policy.num_candidates
    if draft.proposal is not None and not policy.budget.needs_state:  # nobody has asked for the whole state yet
        states = _with_draft(draft.states, draft.proposal, draft.is_usable)
        done = replace(done, draft=replace(draft, states=states))
    parents = _parent_logits(done, wanted, num_candidates)
    num_rows = sum(tree.num_nodes + 1 for tree in done.trees)
    records = [
        _slot_record(done, slot, num_candidates, parents[slot], num_rows)
        if wanted[slot] and outcome.target_tokens is not None
        else None
        for slot, outcome in enumerate(done.outcomes)
    ]
    if projection is None or done.draft.proposal is None:
        return records
    hidden = projected(done.draft.proposal.hidden, projection)
    return [None if record is None else replace(record, hidden=hidden[slot]) for slot, record in enumerate(records)]


def _slot_record(
    done: _Round, slot: int, num_candidates: int, parents: tuple[Float32Array, Float32Array], num_rows: int
) -> RoundRecord:
    sequence, tree, outcome = done.batch[slot], done.trees[slot], done.outcomes[slot]
    state = done.draft.states[slot]
    proposal = done.draft.proposal if done.draft.is_usable[slot] else None
    draft_ns, build_ns, verify_ns, commit_ns = done.clock.stages_ns
    assert outcome.target_tokens is not None
    nothing = (0, num_candidates)
    return RoundRecord(
        sequence_id=sequence.sequence_id,
        round_index=state.round_index,
        context_length=state.context_length,
        root_token=int(tree.tokens[0]),
        candidate_ids=np.zeros(nothing, np.int32) if proposal is None else proposal.candidate_ids[slot].copy(),
        candidate_log_probs=np.zeros(nothing, np.float32) if proposal is None else proposal.log_probs[slot].copy(),
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
        parent_logits=parents[0],
        parent_logsumexp=parents[1],
        draft_ns=draft_ns,
        build_ns=build_ns,
        verify_ns=verify_ns,
        commit_ns=commit_ns,
        batch_size=len(done.batch),
        batch_rows=num_rows,
    )


def _parent_logits(
    done: _Round, wanted: Sequence[bool], num_candidates: int
) -> list[tuple[Float32Array, Float32Array]]:
    """Per wanted slot the raw logits [P, K] of the next depth's candidates at the root and each accepted node.

    With them their log-sum-exp over the vocabulary.

    One gather for the whole batch.
    """
    proposal, logits = done.draft.proposal, done.verified.output.logits
    if proposal is None:
        return [(np.zeros((0, num_candidates), np.float32), np.zeros(0, np.float32))] * len(done.batch)
    depth = proposal.candidate_ids.shape[1]
    parents = [
        [0, *outcome.path][:depth] if usable and is_wanted else []
        for outcome, usable, is_wanted in zip(done.outcomes, done.draft.is_usable, wanted, strict=True)
    ]
    rows = [start + node for start, nodes in zip(done.verified.starts, parents, strict=True) for node in nodes]
    ids = np.concatenate([proposal.candidate_ids[slot, : len(nodes)] for slot, nodes in enumerate(parents)])
    chosen = logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device)).float()
    gathered = chosen.gather(1, torch.from_numpy(ids.astype(np.int64)).to(logits.device)).cpu().numpy()
    logsumexp = chosen.logsumexp(dim=1).cpu().numpy()
    ends = np.cumsum([len(nodes) for nodes in parents])
    return [
        (gathered[end - len(nodes) : end], logsumexp[end - len(nodes) : end])
        for end, nodes in zip(ends, parents, strict=True)
    ]
