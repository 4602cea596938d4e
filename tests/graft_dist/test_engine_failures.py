"""What the engine does when a model fails: what ends a sequence, what ends a step, what ends the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graft_dist import engine as engine_module
from graft_dist.engine import Engine, EngineError, SequenceEvent
from graft_dist.kv_cache import SlotCache
from graft_dist.policy import DecodingPolicy, chain, ddtree, plain
from graft_dist.sampling import SamplingParams, TokenChooser
from graft_dist.target import Target
from tests.conftest import FakeDrafter, FakeProposal

PROMPTS = [[5, 9, 30, 7], [44, 8, 100, 21, 60, 61], [3], [17, 200, 9]]
LONG = SamplingParams(max_new_tokens=24, ignore_eos=True)
GREEDY_PENALTY = SamplingParams(max_new_tokens=16, ignore_eos=True, repetition_penalty=1.3)
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.9, seed=4)
POISON = 199
"""A token whose embedding is NaN in `poisoned`: so are the keys, values and logits of its row. No answer holds it."""


@pytest.fixture(scope="module")
def poisoned(tiny_folder: Callable[[str], Path]) -> Target:
    target = Target.load(str(tiny_folder("llama")), dtype="float32", device="cpu")
    target._embedding.weight.data[POISON] = float("nan")
    return target


def run(engine: Engine) -> dict[str, list[SequenceEvent]]:
    events: dict[str, list[SequenceEvent]] = {}
    while engine.has_work:
        collect(engine.step(), events)
    return events


def collect(new: Sequence[SequenceEvent], events: dict[str, list[SequenceEvent]]) -> None:
    for event in new:
        events.setdefault(event.sequence_id, []).append(event)


def tokens_of(events: Sequence[SequenceEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def answer(target: Target, prompt: list[int], params: SamplingParams) -> list[int]:
    engine = Engine(target, None, plain(), max_slots=1)
    sequence_id = engine.add(prompt, params)
    return tokens_of(run(engine)[sequence_id])


@pytest.fixture(scope="module")
def answers(tiny_llama: Target) -> list[list[int]]:
    return [answer(tiny_llama, prompt, LONG) for prompt in PROMPTS]


@pytest.fixture
def drafter(tiny_llama: Target, answers: list[list[int]]) -> FakeDrafter:
    return FakeDrafter(tiny_llama, [p + a for p, a in zip(PROMPTS, answers, strict=True)], accuracy=0.7)


# ---- logits that are not finite


@pytest.mark.parametrize("params", [LONG, GREEDY_PENALTY, SAMPLED], ids=["greedy", "penalty", "sampled"])
@pytest.mark.parametrize("policy", [plain(), ddtree(5, 4)], ids=["plain", "ddtree"])
@pytest.mark.parametrize("prefill_chunk", [2, 256])
def test_a_prompt_with_nan_logits_ends_alone_and_leaves_nothing_behind(
    poisoned: Target, policy: DecodingPolicy, params: SamplingParams, prefill_chunk: int
) -> None:
    expected = [answer(poisoned, prompt, params) for prompt in PROMPTS]
    assert not any(POISON in tokens for tokens in expected)
    known = FakeDrafter(poisoned, [p + a for p, a in zip(PROMPTS, expected, strict=True)])
    engine = Engine(poisoned, known, policy, max_slots=2, prefill_chunk=prefill_chunk)
    first = engine.add(PROMPTS[0], params)
    bad = engine.add([5, POISON, 7, 8, 9, 10, 11, 12], params)
    after = [engine.add(prompt, params) for prompt in PROMPTS[1:]]  # one of them in the slot of `bad`
    events = run(engine)
    assert (events[bad][-1].finish_reason, tokens_of(events[bad])) == ("error", [])
    assert "not finite" in (events[bad][-1].error or "")
    assert [tokens_of(events[sequence_id]) for sequence_id in (first, *after)] == expected


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [plain(), chain(), ddtree(9, 4)], ids=["plain", "chain", "ddtree"])
def test_logits_that_become_nan_are_an_error_and_never_a_token(
    tiny_folder: Callable[[str], Path], policy: DecodingPolicy, params: SamplingParams, record: bool
) -> None:
    target = Target.load(str(tiny_folder("llama")), dtype="float32", device="cpu")
    expected = [answer(target, prompt, params) for prompt in PROMPTS[:2]]
    poison = next(token for token in expected[0][5:] if token not in {*expected[0][:5], *expected[1], *PROMPTS[1]})
    known = FakeDrafter(target, [p + a for p, a in zip(PROMPTS, expected, strict=False)], accuracy=1.0)
    target._embedding.weight.data[poison] = float("nan")
    engine = Engine(target, known, policy, max_slots=2, record=record)
    bad, good = (engine.add(prompt, params) for prompt in PROMPTS[:2])
    again = engine.add(PROMPTS[1], params)
    events = run(engine)
    assert events[bad][-1].finish_reason == "error"
    assert "not finite" in (events[bad][-1].error or "")
    output = tokens_of(events[bad])
    assert output == expected[0][: len(output)] and len(output) <= expected[0].index(poison) + 1
    assert [tokens_of(events[i]) for i in (good, again)] == [expected[1]] * 2


# ---- records that cannot be made


@pytest.mark.parametrize("params", [LONG, GREEDY_PENALTY, SAMPLED], ids=["greedy", "penalty", "sampled"])
def test_records_that_cannot_be_made_are_left_out_and_change_nothing_else(
    tiny_llama: Target, drafter: FakeDrafter, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [answer(tiny_llama, prompt, params) for prompt in PROMPTS]
    numbers = itertools.count()

    def sometimes(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(numbers) % 3 == 0:
                raise MemoryError("no room")
            return honest(*arguments)

        return call

    monkeypatch.setattr(engine_module, "_records", sometimes(engine_module._records))
    monkeypatch.setattr(TokenChooser, "next_tokens", sometimes(TokenChooser.next_tokens))
    monkeypatch.setattr(engine_module, "degenerations", sometimes(engine_module.degenerations))
    engine = Engine(tiny_llama, drafter, ddtree(6, 4), max_slots=3, record=True)
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    events = run(engine)
    assert [tokens_of(events[sequence_id]) for sequence_id in ids] == expected
    rounds = [event for sequence_id in ids for event in events[sequence_id] if event.trace is not None]
    assert 0 < sum(event.round is None for event in rounds) < len(rounds)
    assert engine.record_failure == "MemoryError: no room"


# ---- drafters that cannot help


class NanDrafter(FakeDrafter):
    """Gives log-probabilities of `value` for the slots whose root token is in `victims` (None: all)."""

    value = float("nan")
    victims: set[int] | None = None

    def propose(
        self,
        cache: SlotCache,
        features: torch.Tensor,
        counts: Sequence[int],
        root_tokens: Sequence[int],
        num_candidates: int,
    ) -> FakeProposal:
        proposal = super().propose(cache, features, counts, root_tokens, num_candidates)
        for slot, root in enumerate(root_tokens):
            if self.victims is None or root in self.victims:
                proposal.log_probs[slot, 1:] = self.value
                proposal.hidden[slot] = self.value
        return proposal


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", [chain(), ddtree(6, 4)], ids=["chain", "ddtree"])
def test_proposals_that_are_not_finite_are_not_used(
    tiny_llama: Target, answers: list[list[int]], policy: DecodingPolicy, value: float
) -> None:
    known = NanDrafter(tiny_llama, [p + a for p, a in zip(PROMPTS, answers, strict=True)])
    known.value, known.victims = value, set(answers[0])
    engine = Engine(tiny_llama, known, policy, max_slots=3, record=True)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    events = run(engine)
    assert [tokens_of(events[i]) for i in ids] == answers
    for event in events[ids[0]][1:]:
        record = event.round
        assert record is not None
        assert (record.budget, record.conf, record.degen) == (0, 0.0, 0.0)
        assert record.candidate_ids.shape[0] == record.candidate_log_probs.shape[0] == len(record.parent_logits) == 0
    drafted = [event.round for i in ids for event in events[i] if event.round is not None and event.round.budget]
    assert drafted, "the others were drafted for"
    assert all(np.isfinite(record.candidate_log_probs).all() for record in drafted)
    assert all(record.conf > 0 for record in drafted)


def test_a_round_without_any_finite_proposal_can_be_recorded(tiny_llama: Target, answers: list[list[int]]) -> None:
    drafter = NanDrafter(tiny_llama, [PROMPTS[0] + answers[0]])
    engine = Engine(tiny_llama, drafter, ddtree(6, 4), max_slots=1, record=True)
    sequence_id = engine.add(PROMPTS[0], LONG)
    events = run(engine)[sequence_id]
    assert tokens_of(events) == answers[0]
    assert all(event.round is not None and event.round.budget == 0 for event in events[1:])


def test_sequences_beyond_the_drafters_positions_are_decoded_plainly(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    drafter.max_positions = 20
    engine = Engine(tiny_llama, drafter, ddtree(6, 4), max_slots=3, record=True)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    events = run(engine)
    assert [tokens_of(events[i]) for i in ids] == answers
    rounds = [event.round for i in ids for event in events[i] if event.round is not None]
    for record in rounds:
        assert (record.budget > 0) == (record.context_length + drafter.block_size <= 20)


# ---- exceptions


@contextmanager
def failing(module: torch.nn.Module, error: Exception, at_call: int = 1) -> Iterator[None]:
    """Let the forward of `module` raise at its `at_call`-th call, and not again."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise error

    handle = module.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()
    assert calls >= at_call, "the module was not asked that often"


def test_a_prompt_that_the_model_fails_on_ends_alone(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=3)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    events: dict[str, list[SequenceEvent]] = {}
    with failing(tiny_llama.decoder_layers[3], RuntimeError("no such shape"), at_call=2):
        collect(engine.step(), events)
    for more in run(engine).values():
        collect(more, events)
    (bad,) = events[ids[1]]
    assert (bad.finish_reason, bad.error, bad.token_ids) == ("error", "RuntimeError: no such shape", [])
    assert [tokens_of(events[ids[i]]) for i in (0, 2, 3)] == [answers[i] for i in (0, 2, 3)]


@pytest.mark.parametrize("name", ["_cache", "_drafter_cache"])
def test_a_sequence_that_no_cache_has_room_for_ends_alone(
    name: str, tiny_llama: Target, drafter: FakeDrafter, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a memory limit caches grow until the device has no more."""
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=4)
    first = [engine.add(prompt, LONG) for prompt in PROMPTS[:2]]
    events: dict[str, list[SequenceEvent]] = {}
    collect(engine.step(), events)
    cache, reserve = getattr(engine, name), SlotCache.reserve

    def limited(self: SlotCache, num_slots: int, length: int) -> None:
        if self is cache and num_slots > 2:
            raise torch.OutOfMemoryError("no memory")
        reserve(self, num_slots, length)

    monkeypatch.setattr(SlotCache, "reserve", limited)
    third = engine.add(PROMPTS[2], LONG)
    for sequence_id, own in run(engine).items():
        events.setdefault(sequence_id, []).extend(own)
    assert events[third][-1].finish_reason == "error" and "no memory" in (events[third][-1].error or "")
    assert [tokens_of(events[sequence_id]) for sequence_id in first] == answers[:2]
    last = engine.add(PROMPTS[2], LONG)
    assert tokens_of(run(engine)[last]) == answers[2]


@pytest.mark.parametrize("at_call", [1, 2, 3, 4], ids=["prefill-1", "prefill-2", "prefill-3", "verify"])
def test_a_device_error_leaves_the_step_and_the_engine_can_go_on(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter, at_call: int
) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=3)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    with failing(tiny_llama.decoder_layers[3], broken, at_call), pytest.raises(RuntimeError, match="CUDA error"):
        engine.step()
    events = run(engine)
    assert [tokens_of(events[i]) for i in ids] == answers, "nothing that was read before the error is lost"


def test_an_exception_of_the_whole_round_leaves_the_engine_as_it_was(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=3)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    events: dict[str, list[SequenceEvent]] = {}
    for _ in range(3):
        collect(engine.step(), events)
        with failing(tiny_llama.decoder_layers[5], RuntimeError("hiccup")), pytest.raises(RuntimeError, match="hiccup"):
            engine.step()
    engine.abort(ids[1])
    for more in run(engine).values():
        collect(more, events)
    assert [tokens_of(events[ids[i]]) for i in (0, 2, 3)] == [answers[i] for i in (0, 2, 3)]
    assert events[ids[1]][-1].finish_reason == "abort"


def test_an_exception_of_the_drafter_leaves_the_engine_as_it_was(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=3)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]

    def fail(*_: Any) -> None:
        raise RuntimeError("drafter down")

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "propose", fail)
        with pytest.raises(RuntimeError, match="drafter down"):
            engine.step()
    events = run(engine)
    assert [tokens_of(events[i]) for i in ids] == answers


def test_an_engine_that_fails_in_the_middle_of_a_commit_says_so_at_its_next_use(
    tiny_llama: Target, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=3)
    sequence_id = engine.add(PROMPTS[0], LONG)
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("index out of bounds")

    monkeypatch.setattr(engine._cache, "keep", fail)
    with pytest.raises(RuntimeError, match="index out of bounds"):
        engine.step()
    assert engine.has_work
    uses: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.add(PROMPTS[1], LONG),
        lambda: engine.abort(sequence_id),
    ]
    for use in uses:
        with pytest.raises(EngineError, match=r"in the middle of a round .RuntimeError: index out of bounds"):
            use()


def test_a_device_error_while_a_sequence_is_taken_is_not_that_sequences(
    tiny_llama: Target, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), max_slots=3)
    engine.add(PROMPTS[0], LONG)
    engine.step()

    def fail(self: TokenChooser, token_ids: Sequence[int]) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(TokenChooser, "commit", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.step()
    with pytest.raises(EngineError, match="CUDA error"):
        engine.step()
