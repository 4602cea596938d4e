"""Every method outputs what plain decoding outputs, and plain decoding what transformers' own loop outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from graft_dist.budget import AcceptanceGain, PowerGain, UtilityBudget
from graft_dist.cost_curve import line
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import TdesConfig, TdesNetwork, TdesScorer
from graft_dist.engine import Engine
from graft_dist.policy import DecodingPolicy, GraftPolicy, caddtree, chain, ddtree, exploring, plain
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target, tree_mask
from tests.conftest import MODEL_TYPES, FakeDrafter
from tests.graft_dist.policies import make_policy, random_network
from tests.graft_dist.test_drafter import tiny_model


def prompts(vocab_size: int, lengths: Sequence[int] = (7, 1, 23, 12), seed: int = 3) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab_size, length).tolist() for length in lengths]


def decode(
    target: Target,
    drafter: FakeDrafter | None,
    policy: DecodingPolicy,
    requests: Sequence[tuple[list[int], SamplingParams]],
    **options: int | bool,
) -> tuple[list[list[int]], list[str], list[list[RoundRecord]]]:
    """Run all requests through one engine; per request its tokens, finish reason and records."""
    engine = Engine(target, drafter, policy, **options)  # type: ignore[arg-type]
    index = {engine.add(prompt, params): i for i, (prompt, params) in enumerate(requests)}
    tokens: list[list[int]] = [[] for _ in requests]
    reasons = [""] * len(requests)
    records: list[list[RoundRecord]] = [[] for _ in requests]
    while engine.has_work:
        for event in engine.step():
            i = index[event.sequence_id]
            assert not reasons[i], "an event after the last"
            tokens[i] += event.token_ids
            reasons[i] = event.finish_reason or ""
            assert event.error is None
            if event.round is not None:
                assert event.round.emitted_tokens == event.token_ids
                records[i].append(event.round)
    assert engine.num_live == engine.num_waiting == 0
    return tokens, reasons, records


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_plain_is_transformers_greedy(model_type: str, tiny_target: Callable, tiny_folder: Callable) -> None:
    target = tiny_target(model_type)
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder(model_type), dtype=torch.float32)
    asked = prompts(target.vocab_size)
    params = SamplingParams(max_new_tokens=40)
    tokens, reasons, _ = decode(target, None, plain(), [(prompt, params) for prompt in asked], max_slots=3)
    for prompt, output, reason in zip(asked, tokens, reasons, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
        assert output == expected.tolist()
        assert reason == ("stop" if output[-1] == 2 else "length")
        assert len(set(output)) > 5, "a constant answer proves little"


POLICIES = [
    chain(),
    chain(2),
    ddtree(1, 4),
    ddtree(7, 4),
    ddtree(40, 8),
    exploring([0, 3, 20], seed=1, num_candidates=4),
]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_trees_are_plain(model_type: str, tiny_target: Callable) -> None:
    target = tiny_target(model_type)
    params = SamplingParams(max_new_tokens=22, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts(target.vocab_size, lengths=(7, 1, 23))]
    expected, _, _ = decode(target, None, plain(), requests)
    drafter = FakeDrafter(target, [p + e for (p, _), e in zip(requests, expected, strict=True)], accuracy=0.6)
    for policy in POLICIES:
        for max_slots in (1, 2):
            got, _, records = decode(target, drafter, policy, requests, max_slots=max_slots, record=True)
            assert got == expected, (policy.name, max_slots)
            num_tokens = sum(record.num_tokens for per in records for record in per)
            assert num_tokens == sum(len(e) - 1 for e in expected)
            assert num_tokens > sum(map(len, records)), "nothing was accepted"


def tree_logits(target: Target) -> torch.Tensor:
    """Logits [4, V] of a root, its two children and a child of the second, verified after a prompt of five tokens."""
    cache = target.new_cache(1, 20)
    target.prefill([5, 9, 30, 7, 12], cache, cache.add())
    seen = np.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], np.bool_)
    mask = tree_mask(cache.lengths, seen, 9, target.dtype, target.device, target.groups)
    cache.begin(torch.arange(5, 9)[None], 9)
    token_ids, positions = torch.tensor([[[3, 10, 11, 40]], [[5, 6, 6, 7]]], device=target.device)
    return target.forward(token_ids, positions, mask, cache).logits[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device: nothing here was run on one")
def test_a_gpu_computes_trees_as_the_cpu_does_and_they_are_plain(tiny_llama: Target, tiny_folder: Callable) -> None:
    target = Target.load(str(tiny_folder("llama")), dtype="float32", device="cuda")
    torch.testing.assert_close(tree_logits(target).cpu(), tree_logits(tiny_llama), rtol=1e-3, atol=1e-3)
    params = SamplingParams(max_new_tokens=22, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts(target.vocab_size, lengths=(7, 1, 23))]
    expected, _, _ = decode(target, None, plain(), requests)
    drafter = FakeDrafter(target, [p + e for (p, _), e in zip(requests, expected, strict=True)], accuracy=0.6)
    for max_slots in (2, 1):
        drafter.num_calls = 0
        got, _, _ = decode(target, drafter, ddtree(20, 4), requests, max_slots=max_slots)
        assert got == expected, max_slots
    assert drafter.num_calls < sum(len(e) - 1 for e in expected), "nothing was accepted"


@pytest.mark.parametrize(
    "warping",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.8, top_p=0.8, top_k=30, min_p=0.01, seed=6),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, seed=7),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5),
    ],
    ids=["plain", "filters", "penalties", "greedy-penalties"],
)
@pytest.mark.parametrize("record", [False, True])
def test_same_seed_same_tokens(warping: SamplingParams, record: bool, tiny_llama: Target) -> None:
    requests = [(prompt, warping) for prompt in prompts(tiny_llama.vocab_size)]
    expected, reasons, _ = decode(tiny_llama, None, plain(), requests)
    drafter = FakeDrafter(tiny_llama, [p + e for (p, _), e in zip(requests, expected, strict=True)])
    for policy in (chain(), ddtree(12, 4)):
        got, got_reasons, records = decode(tiny_llama, drafter, policy, requests, max_slots=3, record=record)
        assert (got, got_reasons) == (expected, reasons)
        if record:
            assert sum(len(r.accepted) for per in records for r in per) > 10


def tdes_scorer(target: Target, gate_rank: int) -> TdesScorer:
    """An edge scorer with random weights: it prefers and rejects edges without sense."""
    config = TdesConfig(
        embedding_size=target.hidden_size,
        draft_depth=5,
        width=8,
        gate_rank=gate_rank,
        hidden_size=target.hidden_size if gate_rank else 0,
    )
    network = TdesNetwork(config)
    for parameter in (network.weight, network.gate_child):
        torch.nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(1))
    return TdesScorer(network, target.embed(torch.arange(target.vocab_size)).detach())


def learned_policies(target: Target) -> list[DecodingPolicy]:
    """Policies as they start: their budgets remember past rounds."""
    cost = line(10.0, 11.0, 0.3, "hand")
    acceptance, power = AcceptanceGain(), PowerGain((0.0, 1.0, 0.1, 0.1), (0.0, 0.0, 0.0, 0.0))
    return [
        caddtree(cost, num_candidates=4),
        DecodingPolicy("marginal", tdes_scorer(target, 0), UtilityBudget(acceptance, cost, form="price"), 4),
        DecodingPolicy("saba", tdes_scorer(target, 2), UtilityBudget(power, cost, max_budget=20), 4),
        DecodingPolicy("resting", tdes_scorer(target, 2), UtilityBudget(power, line(1.0, 90.0, 1.0, "hand")), 4),
    ]


def test_learned_scores_and_budgets_are_plain(tiny_llama: Target) -> None:
    requests = [
        (prompt, SamplingParams(max_new_tokens=22, temperature=temperature, seed=4))
        for prompt in prompts(tiny_llama.vocab_size, lengths=(7, 1))
        for temperature in (0.0, 1.0)
    ]
    expected = decode(tiny_llama, None, plain(), requests)[:2]
    drafter = FakeDrafter(tiny_llama, [p + e for (p, _), e in zip(requests, expected[0], strict=True)])
    for max_slots in (1, 3):
        for policy in learned_policies(tiny_llama):
            *got, records = decode(tiny_llama, drafter, policy, requests, max_slots=max_slots, record=True)
            assert tuple(got) == expected, (policy.name, max_slots)
            budgets = {record.budget for per in records for record in per}
            assert len(budgets) > 1 and (policy.name != "resting" or 0 in budgets), "the budgets never changed"
            assert sum(len(record.accepted) for per in records for record in per) > 0


@pytest.mark.parametrize("gate_rank", [0, 2])
def test_a_saved_policy_is_plain(gate_rank: int, tiny_llama: Target, tmp_path: Path) -> None:
    """Random weights, from disk: alone and with joint budgets in a batch, greedy and sampled."""
    requests = [
        (prompt, SamplingParams(max_new_tokens=24, temperature=temperature, seed=4, ignore_eos=True))
        for prompt in prompts(tiny_llama.vocab_size, lengths=(7, 3))
        for temperature in (0.0, 1.0)
    ]
    expected = decode(tiny_llama, None, plain(), requests)[0]
    drafter = FakeDrafter(tiny_llama, [p + e for (p, _), e in zip(requests, expected, strict=True)])
    network = random_network(tiny_llama.hidden_size, drafter.draft_depth, tiny_llama.hidden_size if gate_rank else 0)
    fitting = {"target_fingerprint": tiny_llama.fingerprint, "drafter_fingerprint": drafter.fingerprint}
    folder = make_policy(network, **fitting).save(tmp_path / "policy")
    for max_slots in (1, 4):
        policy = GraftPolicy.load(folder).decoding_policy(tiny_llama, drafter, line(10.0, 11.0, 0.3, "hand"))
        got, _, records = decode(tiny_llama, drafter, policy, requests, max_slots=max_slots, record=True)
        assert got == expected, max_slots
        assert sum(len(record.accepted) for per in records for record in per) > 0
        assert len({record.budget for per in records for record in per}) > 1, "budgets are chosen round by round"


def test_mixed_batch(tiny_llama: Target) -> None:
    asked = prompts(tiny_llama.vocab_size, lengths=(9, 4, 17))
    kinds = [
        SamplingParams(max_new_tokens=25),
        SamplingParams(temperature=1.0, seed=1, max_new_tokens=11),
        SamplingParams(repetition_penalty=1.5, max_new_tokens=18),
    ]
    requests = list(zip(asked, kinds, strict=True))
    alone = [decode(tiny_llama, None, plain(), [request])[0][0] for request in requests]
    drafter = FakeDrafter(tiny_llama, [p + e for (p, _), e in zip(requests, alone, strict=True)])
    assert decode(tiny_llama, drafter, ddtree(9, 4), requests * 2, max_slots=4)[0] == alone * 2


def test_the_real_drafter_is_lossless(tiny_llama: Target) -> None:
    """An untrained DFlash drafter: hardly anything is accepted, everything is exercised."""
    requests = [
        (prompt, SamplingParams(max_new_tokens=20 + 3 * i, ignore_eos=True))
        for i, prompt in enumerate(prompts(tiny_llama.vocab_size))
    ]
    expected = decode(tiny_llama, None, plain(), requests)[0]
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "untrained")
    for policy in (chain(), ddtree(60, 30)):
        got, _, records = decode(tiny_llama, drafter, policy, requests, max_slots=3, prefill_chunk=9, record=True)
        assert got == expected
        assert all(record.conf > 0 for per in records for record in per if len(record.candidate_ids))


def test_an_answer_keeps_the_drafters_mask_token(tiny_llama: Target) -> None:
    """Whichever token of the answer is the mask, accepted from the draft or the target's own after it."""
    prompt = prompts(tiny_llama.vocab_size, lengths=(7,))[0]
    request = (prompt, SamplingParams(max_new_tokens=16, ignore_eos=True))
    expected = decode(tiny_llama, None, plain(), [request])[0]
    assert len(set(expected[0])) > 5, "a constant answer proves little"
    num_drafted = num_own = 0
    for mask in sorted(set(expected[0])):
        drafter = DFlashDrafter(tiny_model(tiny_llama, mask_token_id=mask), tiny_llama, "untrained")
        for policy in (chain(), ddtree(120, 100)):
            got, _, records = decode(tiny_llama, drafter, policy, [request], record=True)
            assert got == expected, (mask, policy.name)
            for record in records[0]:
                num_drafted += record.emitted_tokens[: len(record.accepted)].count(mask)
                num_own += record.emitted_tokens[len(record.accepted) :].count(mask)
    assert num_drafted > 0 and num_own > 0


def test_every_stop_position(tiny_llama: Target) -> None:
    prompt = prompts(tiny_llama.vocab_size, lengths=(8,))[0]
    full = decode(tiny_llama, None, plain(), [(prompt, SamplingParams(max_new_tokens=14, ignore_eos=True))])[0][0]
    drafter = FakeDrafter(tiny_llama, [prompt + full], accuracy=0.9)
    for position, token in enumerate(full):
        first = full.index(token)
        cases = {
            "stop": (SamplingParams(max_new_tokens=14, stop_token_ids=(token,)), full[: first + 1], "stop"),
            "limit": (SamplingParams(max_new_tokens=position + 1, ignore_eos=True), full[: position + 1], "length"),
        }
        for name, (params, expected, reason) in cases.items():
            for policy in (chain(), ddtree(20, 4)):
                got, reasons, records = decode(tiny_llama, drafter, policy, [(prompt, params)], record=True)
                assert got[0] == expected, (name, position, policy.name)
                assert reasons == [reason]
                assert sum(r.num_tokens for r in records[0]) == len(expected) - 1
                assert all(r.num_tokens - len(r.accepted) in (0, 1) for r in records[0])


def test_context_limit(tiny_llama: Target) -> None:
    prompt = prompts(tiny_llama.vocab_size, lengths=(20,))[0]
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    full = decode(tiny_llama, None, plain(), [(prompt, params)])[0][0]
    drafter = FakeDrafter(tiny_llama, [prompt + full], accuracy=0.9)
    for room in (1, 2, 3, 9):
        got, reasons, records = decode(
            tiny_llama, drafter, ddtree(60, 8), [(prompt, params)], max_length=20 + room, record=True
        )
        assert got[0] == full[:room]
        for record in records[0]:
            left = 20 + room - record.context_length - 1
            assert record.tree_depths.max() <= left - 1, "a node too deep to become output"
        assert reasons == ["length"]
    longest = tiny_llama.max_position_embeddings
    prompt = prompts(tiny_llama.vocab_size, lengths=(longest - 15,))[0]
    endless = SamplingParams(max_new_tokens=10**6, ignore_eos=True)
    expected, reasons, _ = decode(tiny_llama, None, plain(), [(prompt, endless)])
    assert (len(expected[0]), reasons) == (15, ["length"])
    drafter = FakeDrafter(tiny_llama, [prompt + expected[0]], accuracy=0.9)
    assert decode(tiny_llama, drafter, ddtree(60, 8), [(prompt, endless)])[:2] == (expected, ["length"])
