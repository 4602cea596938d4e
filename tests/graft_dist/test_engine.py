"""The engine's slots, queue, events, records and limits. That methods agree is in `test_lossless.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from graft_dist.budget import DraftState
from graft_dist.draft_tree import DraftTree
from graft_dist.edge_scorer import MarginalScorer, hidden_projection
from graft_dist.engine import Engine, SequenceEvent
from graft_dist.errors import PolicyError, TargetError
from graft_dist.policy import DecodingPolicy, chain, ddtree, exploring, plain
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams, TokenChooser, token_logprobs
from graft_dist.target import Target
from tests.conftest import FakeDrafter

PROMPTS = [[5, 9, 30, 7], [44, 8, 100, 21, 60, 61], [3], [17, 200, 9]]
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


def run(engine: Engine) -> dict[str, list[SequenceEvent]]:
    events: dict[str, list[SequenceEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.sequence_id, []).append(event)
    return events


def run_one(engine: Engine, prompt: list[int], params: SamplingParams) -> list[SequenceEvent]:
    sequence_id = engine.add(prompt, params)
    return run(engine)[sequence_id]


def tokens_of(events: Sequence[SequenceEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.fixture(scope="module")
def answers(tiny_llama: Target) -> list[list[int]]:
    """Plain answers to PROMPTS under LONG, each decoded alone."""
    outputs = []
    for prompt in PROMPTS:
        outputs.append(tokens_of(run_one(Engine(tiny_llama, None, plain(), max_slots=1), prompt, LONG)))
    return outputs


@pytest.fixture
def drafter(tiny_llama: Target, answers: list[list[int]]) -> FakeDrafter:
    return FakeDrafter(tiny_llama, [p + a for p, a in zip(PROMPTS, answers, strict=True)], accuracy=0.7)


def test_one_round(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    drafter.accuracy = 1.0
    engine = Engine(tiny_llama, drafter, ddtree(5, 2), record=True)
    assert engine.add(PROMPTS[0], LONG, "mine") == "mine"
    assert (engine.num_waiting, engine.num_live, engine.has_work) == (1, 0, True)
    first, second = engine.step()
    assert (engine.num_waiting, engine.num_live) == (0, 1)
    assert (first.token_ids, first.round, first.finish_reason) == (answers[0][:1], None, None)
    assert first.text == tiny_llama.tokenizer.decode(answers[0][:1]).rstrip("\N{REPLACEMENT CHARACTER}")
    record = second.round
    assert record is not None
    assert second.token_ids == record.emitted_tokens == answers[0][1 : 1 + record.num_tokens]
    assert record.num_tokens >= 3
    assert (record.sequence_id, record.round_index, record.kind) == ("mine", 0, "decoded")
    assert (record.context_length, record.root_token) == (len(PROMPTS[0]), answers[0][0])
    assert (record.budget, record.batch_size, record.batch_rows) == (5, 1, 6)
    assert record.candidate_ids.shape == (drafter.draft_depth, 2)


def test_queue_and_slots(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(6, 4), max_slots=2)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS * 2]  # the same prompts twice, with different neighbours
    events: dict[str, list[SequenceEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.sequence_id, []).append(event)
        assert engine.num_live <= 2
    assert [tokens_of(events[i]) for i in ids] == answers * 2
    assert len(set(ids)) == len(ids)


def test_abort(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    """Aborting in every state, at every slot, leaves the neighbours' answers as they were."""
    for victim in range(4):
        engine = Engine(tiny_llama, drafter, ddtree(4, 4), max_slots=3)
        ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
        events: dict[str, list[SequenceEvent]] = {i: [] for i in ids}
        for _ in range(3):
            for event in engine.step():
                events[event.sequence_id].append(event)
        assert engine.num_waiting == 1
        assert engine.abort(ids[victim])
        assert not engine.abort(ids[victim])
        assert not engine.abort("nobody")
        for more in run(engine).items():
            events[more[0]] += more[1]
        for i, sequence_id in enumerate(ids):
            last = events[sequence_id][-1]
            assert last.finish_reason == ("abort" if i == victim else "length")
            assert last.summary is not None
            if i != victim:
                assert tokens_of(events[sequence_id]) == answers[i]
            else:
                assert tokens_of(events[sequence_id]) == answers[i][: len(tokens_of(events[sequence_id]))]


def test_a_long_prompt_does_not_stall_the_others(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    long_prompt = np.random.default_rng(0).integers(3, 300, 100).tolist()
    expected = tokens_of(run_one(Engine(tiny_llama, None, plain()), long_prompt, LONG))
    for policy in (plain(), ddtree(5, 4)):
        engine = Engine(tiny_llama, drafter, policy, prefill_chunk=8)
        first = [engine.add(prompt, LONG) for prompt in PROMPTS[:2]]
        engine.step()
        engine.step()
        late = engine.add(long_prompt, LONG)
        events: dict[str, list[SequenceEvent]] = {}
        num_steps = 0
        while late not in events:
            num_steps += 1
            got = engine.step()
            live = {event.sequence_id for event in got}
            assert num_steps > 12 or live & set(first) or engine.num_live == 1, "the others waited"
            for event in got:
                events.setdefault(event.sequence_id, []).append(event)
        assert num_steps == 13, "100 tokens in chunks of 8"
        for sequence_id, more in run(engine).items():
            events.setdefault(sequence_id, []).extend(more)
        assert tokens_of(events[late]) == expected


def test_neighbours_leave_while_a_prompt_is_being_read(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    long_prompt = np.random.default_rng(1).integers(3, 300, 60).tolist()
    expected = tokens_of(run_one(Engine(tiny_llama, None, plain()), long_prompt, LONG))
    for victim in range(3):
        engine = Engine(tiny_llama, drafter, ddtree(3, 2), prefill_chunk=12)
        ids = [engine.add(prompt, LONG) for prompt in PROMPTS[:3]]
        engine.step()
        late = engine.add(long_prompt, LONG)
        engine.step()
        assert engine.num_live == 4
        engine.abort(ids[victim])
        events = run(engine)
        assert tokens_of(events[late]) == expected
        for i in range(3):
            if i != victim:
                assert tokens_of(events[ids[i]]) == answers[i][-len(tokens_of(events[ids[i]])) :]


def test_the_drafter_sees_exactly_the_committed_features(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    """Whatever the policy does with drafting, the drafter's context is that of a fresh prefill."""
    policies = [ddtree(7, 4), plain(), ddtree(3, 2), plain(), plain(), ddtree(12, 4)]
    engine = Engine(tiny_llama, drafter, policies[0], max_slots=4, prefill_chunk=3)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    num_checked = 0
    outputs: dict[str, list[int]] = {i: [] for i in ids}
    for step in range(8):
        engine.policy = policies[step % len(policies)]
        for event in engine.step():
            outputs[event.sequence_id] += event.token_ids
            assert event.finish_reason is None
        cache = engine._drafter_cache
        assert cache is not None
        for slot, sequence in enumerate(engine._live):
            rows, _ = cache.rows(slot)
            pending = torch.cat([rows[0, 0], sequence.pending()])
            tokens = sequence.prompt + outputs[sequence.sequence_id][:-1]
            fresh = tiny_llama.new_cache(1, 200)
            fresh.add()
            expected = tiny_llama.prefill(tokens, fresh, 0, drafter.target_layer_ids).features[0]
            torch.testing.assert_close(pending, expected, rtol=1e-3, atol=1e-3)
            num_checked += 1
    assert num_checked > 15
    assert drafter.num_calls > 2


def test_pending_features_are_bounded(tiny_llama: Target, drafter: FakeDrafter) -> None:
    prompt = np.random.default_rng(2).integers(3, 300, 300).tolist()
    engine = Engine(tiny_llama, drafter, plain())
    engine.add(prompt, LONG)
    while engine.num_live == 0 or not engine._live:
        engine.step()
    engine.step()
    assert engine._live[0].num_pending < 10
    assert engine._drafter_cache is not None and engine._drafter_cache.lengths[0] >= 299


def test_records_keep_projected_hidden_states(tiny_llama: Target, drafter: FakeDrafter) -> None:
    projection = hidden_projection("d", tiny_llama.hidden_size, 3)
    policy = exploring([0, 4], seed=0, num_candidates=4)
    engine = Engine(tiny_llama, drafter, policy, max_slots=2, record=True, projection=projection)
    for prompt in PROMPTS[:2]:
        engine.add(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True))
    records = [event.round for events in run(engine).values() for event in events if event.round is not None]
    drafted = [record for record in records if len(record.candidate_ids)]
    assert {record.batch_size for record in drafted} == {1, 2}
    for record in drafted:
        assert record.hidden is not None
        expected = drafter.hidden_at(record.context_length, record.root_token) @ projection
        np.testing.assert_allclose(record.hidden, expected.numpy(), atol=5e-3)
    undrafted = [record for record in records if len(record.candidate_ids) == 0]
    assert undrafted and all(record.hidden is None for record in undrafted)


def test_records_hold_the_targets_logits(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(10, 4), max_slots=2, record=True)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS[:2]]
    events = run(engine)
    for i, sequence_id in enumerate(ids):
        output: list[int] = []
        num_rounds = num_accepted = num_drafted = 0
        for event in events[sequence_id]:
            record = event.round
            if record is not None:
                context = PROMPTS[i] + output
                assert record.context_length == len(context) - 1
                assert record.round_index == num_rounds
                accepted = record.accepted.tolist()
                depth, num_parents = drafter.draft_depth, len(record.parent_logsumexp)
                assert num_parents == min(len(accepted) + 1, depth) == len(record.parent_logits)
                logits = tiny_llama.model(torch.tensor([context + record.tree_tokens[accepted].tolist()])).logits[0]
                raw = logits[len(context) - 1 :][:num_parents].detach()
                wanted = raw.gather(1, torch.from_numpy(record.candidate_ids[:num_parents].astype(np.int64)))
                np.testing.assert_allclose(record.parent_logits, wanted, rtol=1e-3, atol=1e-3)
                np.testing.assert_allclose(record.parent_logsumexp, raw.logsumexp(1), rtol=1e-4)
                parents = record.tree_parents[accepted].tolist()
                assert parents == [0, *accepted[:-1]][: len(accepted)], "a chain from the root"
                assert len(record.target_tokens) == len(record.tree_tokens) == record.budget + 1
                assert record.target_tokens.dtype == record.tree_tokens.dtype == np.int32
                num_rounds, num_accepted = num_rounds + 1, num_accepted + len(accepted)
                num_drafted += record.budget
            output += event.token_ids
        assert output == answers[i]
        summary = events[sequence_id][-1].summary
        assert summary is not None
        assert (summary.num_rounds, summary.num_accepted) == (num_rounds, num_accepted)
        assert summary.num_drafted == num_drafted
        assert summary.prefill_s > 0
        assert summary.decode_s > 0


def test_only_the_wanted_sequences_rounds_are_recorded(
    tiny_llama: Target, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a neighbour above temperature 0 chooses tokens only where its walk comes by."""
    whole: list[TokenChooser] = []
    next_tokens = TokenChooser.next_tokens

    def counted(chooser: TokenChooser, logits: torch.Tensor, tree: DraftTree) -> np.ndarray:
        whole.append(chooser)
        return next_tokens(chooser, logits, tree)

    monkeypatch.setattr(TokenChooser, "next_tokens", counted)
    sampled = SamplingParams(temperature=1.0, seed=1, max_new_tokens=12, ignore_eos=True)

    def rounds_of(record: bool | set[str]) -> dict[str, list[RoundRecord | None]]:
        engine = Engine(tiny_llama, drafter, ddtree(10, 4), max_slots=3, record=record)
        for name in ("wanted", "other"):
            engine.add(PROMPTS[0], sampled, name)
        engine.add(PROMPTS[1], LONG, "greedy")
        return {name: [event.round for event in own if event.trace is not None] for name, own in run(engine).items()}

    some = rounds_of({"wanted", "nobody"})
    assert len({id(chooser) for chooser in whole}) == 1
    assert set(some["other"]) == set(some["greedy"]) == {None}
    for ours, theirs in zip(some["wanted"], rounds_of(True)["wanted"], strict=True):
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(ours.target_tokens, theirs.target_tokens)
        np.testing.assert_allclose(ours.parent_logits, theirs.parent_logits, rtol=1e-3, atol=1e-3)


def test_plain_records(tiny_llama: Target) -> None:
    engine = Engine(tiny_llama, None, plain(), record=True)
    for event in run_one(engine, PROMPTS[0], LONG)[1:]:
        record = event.round
        assert record is not None
        assert (record.budget, record.num_tokens, len(record.tree_tokens)) == (0, 1, 1)
        assert record.candidate_ids.shape == (0, 1)
        assert record.parent_logits.shape == (0, 1)
        assert not record.is_mismatch


def test_text_and_stop_strings(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    text = tiny_llama.tokenizer.decode(answers[1], skip_special_tokens=True)
    stops = [text[start : start + 3] for start in range(2, len(text) - 3)]
    stops = [stop for stop in stops if stop.isascii()]
    assert len(stops) > 3
    for stop in stops[:6]:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(stop,), logprobs=2)
        expected = None
        for policy in (plain(), ddtree(14, 4)):
            events = run_one(Engine(tiny_llama, drafter, policy), PROMPTS[1], params)
            got = ("".join(event.text for event in events), tokens_of(events), events[-1].finish_reason)
            assert got[0] == text[: text.index(stop)]
            assert got[1] == answers[1][: len(got[1])]
            assert stop in tiny_llama.tokenizer.decode(got[1], skip_special_tokens=True)
            assert stop not in tiny_llama.tokenizer.decode(got[1][:-1], skip_special_tokens=True)
            assert got[2] == "stop"
            logprobs = [entry for event in events for entry in event.logprobs or []]
            assert [entry.token_id for entry in logprobs] == got[1], "text, tokens and logprobs are cut together"
            expected = expected or got
            assert got == expected


def test_logprobs(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, logprobs=3)
    engine = Engine(tiny_llama, drafter, ddtree(10, 4), max_slots=2)
    engine.add(PROMPTS[1], LONG)
    events = run_one(engine, PROMPTS[0], params)
    got = [entry for event in events for entry in event.logprobs or []]
    logits = tiny_llama.model(torch.tensor([PROMPTS[0] + answers[0]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = token_logprobs(logits.detach(), answers[0], 3)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_an_error_ends_one_sequence_only(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_late(self: TokenChooser, token_ids: Sequence[int]) -> None:
        if self.params.seed == 13 and self.num_output >= 5:
            raise RuntimeError("this sequence's own trouble")
        self.num_output += len(token_ids)

    monkeypatch.setattr(TokenChooser, "commit", fail_late)
    engine = Engine(tiny_llama, drafter, ddtree(5, 4), record=True)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS[:2]]
    bad = engine.add(PROMPTS[2], SamplingParams(seed=13, max_new_tokens=40, ignore_eos=True))
    after = engine.add(PROMPTS[3], LONG)
    events = run(engine)
    assert events[bad][-1].finish_reason == "error"
    assert events[bad][-1].error == "RuntimeError: this sequence's own trouble"
    assert events[bad][-1].summary is not None
    assert [tokens_of(events[i]) for i in (*ids, after)] == [answers[0], answers[1], answers[3]]


def test_an_error_at_the_first_token(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TokenChooser, logits: torch.Tensor, path_tokens: Sequence[int] = ()) -> int:
        raise ValueError("no")

    monkeypatch.setattr(TokenChooser, "next_token", fail)
    engine = Engine(tiny_llama, None, plain())
    (event,) = run_one(engine, PROMPTS[0], SamplingParams(temperature=1.0, seed=0))
    assert (event.finish_reason, event.error, event.token_ids) == ("error", "ValueError: no", [])
    assert engine.num_live == 0


def test_finishing_with_the_first_token(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    engine = Engine(tiny_llama, drafter, ddtree(4, 4))
    (event,) = run_one(engine, PROMPTS[0], SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert (event.token_ids, event.finish_reason) == (answers[0][:1], "length")
    (event,) = run_one(engine, PROMPTS[0], SamplingParams(stop_token_ids=(answers[0][0],)))
    assert (event.token_ids, event.finish_reason) == (answers[0][:1], "stop")
    assert tokens_of(run_one(engine, PROMPTS[1], LONG)) == answers[1], "nothing was left behind"


def test_refused_prompts(tiny_llama: Target) -> None:
    engine = Engine(tiny_llama, None, plain(), max_length=10)
    with pytest.raises(ValueError, match="empty"):
        engine.add([], LONG)
    with pytest.raises(ValueError, match=r"10 tokens.*no room"):
        engine.add([5] * 10, LONG)
    with pytest.raises(ValueError, match="320 is outside the vocabulary of 320"):
        engine.add([5, 320], LONG)
    engine.add([5], LONG, "a")
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add([5], LONG, "a")
    run(engine)
    assert engine.add([5], LONG, "a") == "a", "an id is free once its sequence has ended"


def test_refused_engines(tiny_llama: Target) -> None:
    with pytest.raises(ValueError, match="max_slots must be at least 1, not 0"):
        Engine(tiny_llama, None, plain(), max_slots=0)
    with pytest.raises(ValueError, match="prefill_chunk"):
        Engine(tiny_llama, None, plain(), prefill_chunk=0)
    with pytest.raises(ValueError, match="between 2 and the target's 512, not 513"):
        Engine(tiny_llama, None, plain(), max_length=513)
    with pytest.raises(TargetError, match="8 layers"):
        Engine(tiny_llama, FakeDrafter(tiny_llama, target_layer_ids=(1, 7)), plain())
    engine = Engine(tiny_llama, None, ddtree(4))
    engine.add([5], LONG)
    with pytest.raises(PolicyError, match="no drafter"):
        engine.step()


@pytest.mark.parametrize("with_drafter", [False, True])
def test_memory_limit(with_drafter: bool, tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    used = drafter if with_drafter else None
    row = tiny_llama.new_cache(1, 1).bytes_per_token
    row += used.new_cache(1, 1).bytes_per_token if used else 0
    limit = 2 * (46 + 128) * row  # two sequences of up to 46 tokens, and their scratch rows
    policy = ddtree(40, 4) if with_drafter else plain()
    engine = Engine(tiny_llama, used, policy, max_slots=4, memory_limit_bytes=limit)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    with pytest.raises(ValueError, match=f"the limit is {limit}"):
        engine.add([5], SamplingParams(max_new_tokens=400))
    events: dict[str, list[SequenceEvent]] = {}
    most = 0
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.sequence_id, []).append(event)
        caches = [cache for cache in (engine._cache, engine._drafter_cache) if cache is not None]
        assert sum(cache.bytes for cache in caches) <= limit
        most = max(most, engine.num_live)
    assert most == 2
    assert [tokens_of(events[i]) for i in ids] == answers


def test_a_memory_limit_sets_rows_aside_for_the_largest_budget(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    row = tiny_llama.new_cache(1, 1).bytes_per_token + drafter.new_cache(1, 1).bytes_per_token
    limit = (44 + 201) * row
    engine = Engine(
        tiny_llama, drafter, ddtree(200, 8), max_slots=1, memory_limit_bytes=limit, max_budget=200, record=True
    )
    events = run_one(engine, PROMPTS[0], LONG)
    assert tokens_of(events) == answers[0]
    assert max(event.round.budget for event in events if event.round is not None) == 200, "not cut"
    with pytest.raises(ValueError, match=f"the limit is {limit}"):
        engine.add([*PROMPTS[0], 5], LONG)
    engine.policy = ddtree(201, 8)
    engine.add(PROMPTS[0], LONG)
    with pytest.raises(PolicyError, match=r"'ddtree' has a budget of 201, but .* made for budgets up to 200"):
        engine.step()


def test_a_chain_fits_whatever_budget_the_memory_limit_was_made_for(
    tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter
) -> None:
    engine = Engine(tiny_llama, drafter, chain(), memory_limit_bytes=1 << 30, max_budget=0)
    assert tokens_of(run_one(engine, PROMPTS[0], LONG)) == answers[0]


@dataclass(frozen=True)
class OddSlotsPlain:
    """Drafts for even sequences only and cuts their trees: exercises limits, state and choice."""

    needs_state: bool = True

    def limits(self, states: Sequence[DraftState]) -> list[int]:
        assert all(state.conf == state.degen == 0 for state in states)
        return [0 if state.sequence_key % 2 else min(9, state.max_budget) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[DraftState]) -> list[int]:
        assert all(0 < state.conf <= 1 for state in states)
        return [tree.num_nodes // 2 for tree in trees]


def test_slots_without_a_draft_ride_along(tiny_llama: Target, answers: list[list[int]], drafter: FakeDrafter) -> None:
    policy = DecodingPolicy("odd", MarginalScorer(), OddSlotsPlain(), num_candidates=4)
    engine = Engine(tiny_llama, drafter, policy, record=True)
    ids = [engine.add(prompt, LONG, f"s{i}") for i, prompt in enumerate(PROMPTS)]
    events = run(engine)
    assert [tokens_of(events[i]) for i in ids] == answers
    budgets = {i: {event.round.budget for event in events[i] if event.round is not None} for i in ids}
    assert any(found == {0} for found in budgets.values())
    assert any(4 in found for found in budgets.values())
    for i in ids:
        for event in events[i][1:]:
            assert event.round is not None
            if event.round.budget == 0 and len(event.round.candidate_ids):
                assert len(event.round.parent_logits) == 1, "what was drafted is recorded, verified or not"


def test_seeds_are_drawn_when_none_is_given(tiny_llama: Target) -> None:
    params = SamplingParams(temperature=1.5, max_new_tokens=30, ignore_eos=True)
    outputs = [tokens_of(run_one(Engine(tiny_llama, None, plain()), PROMPTS[0], params)) for _ in range(2)]
    assert outputs[0] != outputs[1]


def test_without_detokenization(tiny_llama: Target, answers: list[list[int]]) -> None:
    events = run_one(Engine(tiny_llama, None, plain(), detokenize=False), PROMPTS[0], LONG)
    assert tokens_of(events) == answers[0]
    assert not any(event.text for event in events)
