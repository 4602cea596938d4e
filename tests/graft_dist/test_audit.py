import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM

from graft_dist.audit import Kind, TieRule, audit_answers, chi_square, compare, first_difference, review
from graft_dist.config import TargetConfig
from graft_dist.engine import Engine
from graft_dist.generate import Answer, Request, answer_all, failed_answer
from graft_dist.policy import DecodingPolicy, chain, ddtree, plain
from graft_dist.reference import Decision, Reference
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.conftest import FakeDrafter

FLOAT32 = TieRule(torch.float32)
PROMPTS = [Request(f"p{index}", "chat", list(range(3, 12 + 2 * index))) for index in range(3)]
WARPED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.2, seed=11, max_new_tokens=16,
)  # fmt: skip
GREEDY = SamplingParams(max_new_tokens=16)
# Both ways to judge one answer: by decoding beside it, and by one pass over it.
both_judges = pytest.mark.parametrize("judge", [compare, review])


@pytest.fixture(scope="module")
def reference_model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)


def reference_for(model, params: SamplingParams) -> Reference:
    return Reference(model, params, eos_token_ids=(2,))


def decode(target: Target, policy: DecodingPolicy, params: SamplingParams, known: Sequence[list[int]]) -> list[Answer]:
    drafter = FakeDrafter(target, [p.token_ids + tokens for p, tokens in zip(PROMPTS, known, strict=True)])
    engine = Engine(target, drafter, policy, max_slots=2)
    answers = {answer.request.prompt_id: answer for answer in answer_all(engine, PROMPTS, params)}
    return [answers[prompt.prompt_id] for prompt in PROMPTS]


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5), WARPED])
@pytest.mark.parametrize("policy", [plain(), chain(), ddtree(12)], ids=lambda policy: policy.name)
def test_every_method_equals_transformers_own_generate(
    tiny_llama: Target, reference_model, params: SamplingParams, policy: DecodingPolicy
) -> None:
    reference = reference_for(reference_model, params)
    known = [reference.generate(prompt.token_ids, [], 16) for prompt in PROMPTS]
    answers = decode(tiny_llama, policy, params, known)
    limits = {prompt.prompt_id: 16 for prompt in PROMPTS}
    report = audit_answers(policy.name, answers, reference, limits, FLOAT32, {}, drafts=policy.name != "plain")
    assert report.passed
    assert report.num_identical == len(PROMPTS)
    if policy.name != "plain":  # not vacuous: drafted tokens were accepted
        assert report.mat is not None and report.mat > 1.2


def test_sampled_reference_differs_from_greedy_and_from_another_seed(reference_model) -> None:
    texts = [
        reference_for(reference_model, params).generate(PROMPTS[0].token_ids, [], 16)
        for params in (GREEDY, WARPED, replace(WARPED, seed=12))
    ]
    assert all(first != second for first, second in itertools.combinations(texts, 2))


@both_judges
@pytest.mark.parametrize("params", [GREEDY, WARPED], ids=["greedy", "sampled"])
def test_a_wrong_token_is_a_bug(reference_model, params: SamplingParams, judge) -> None:
    reference = reference_for(reference_model, params)
    right = reference.generate(PROMPTS[0].token_ids, [], 16)
    wrong = [*right[:5], (right[5] + 1) % 320, *right[6:]]
    found = judge(reference, answer_with(wrong), 16, FLOAT32)
    assert [(difference.position, difference.kind) for difference in found] == [(5, Kind.BUG)]
    assert (found[0].reference_token, found[0].method_token) == (right[5], wrong[5])
    assert found[0].margin > found[0].allowed


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5), WARPED])
def test_one_pass_decides_as_decoding_does(reference_model, params: SamplingParams) -> None:
    reference = reference_for(reference_model, params)
    prompt_ids = PROMPTS[0].token_ids
    right = reference.generate(prompt_ids, [], 16)
    decisions = list(reference.decisions(prompt_ids, right))
    assert [decision.token for decision in decisions[:16]] == right
    for position in (0, 7, 15):
        decoded = reference.decide(prompt_ids, right[:position], 1)
        np.testing.assert_allclose(decisions[position].scores, decoded.scores, atol=1e-4)
        assert decisions[position].number == decoded.number
        assert decisions[position].spread == pytest.approx(decoded.spread, abs=1e-4)
    assert review(reference, answer_with(right), 16, FLOAT32) == []


@both_judges
@pytest.mark.parametrize("change", [lambda tokens: tokens[:-3], lambda tokens: [*tokens, 7]], ids=["short", "long"])
def test_an_answer_of_another_length_is_a_bug(reference_model, change, judge) -> None:
    reference = reference_for(reference_model, GREEDY)
    right = reference.generate(PROMPTS[0].token_ids, [], 16)
    found = judge(reference, answer_with(change(right)), 16, FLOAT32)
    assert [difference.kind for difference in found] == [Kind.BUG]
    assert found[0].margin == float("inf")


def test_prompts_without_an_answer_and_undrafted_methods_fail_the_audit(reference_model) -> None:
    reference = reference_for(reference_model, GREEDY)
    right = reference.generate(PROMPTS[0].token_ids, [], 16)
    limits = {"p0": 16}
    failed = audit_answers("x", [failed_answer(PROMPTS[0], "too long")], reference, limits, FLOAT32, {}, drafts=False)
    assert not failed.passed
    assert failed.errors == ("p0: too long",)
    vacuous = audit_answers("x", [answer_with(right)], reference, limits, FLOAT32, {}, drafts=True)
    assert vacuous.is_vacuous and not vacuous.passed
    assert audit_answers("x", [answer_with(right)], reference, limits, FLOAT32, {}, drafts=False).passed


@both_judges
def test_answers_cut_by_the_context_limit_are_compared_up_to_the_cut(
    tiny_llama: Target, reference_model, judge
) -> None:
    room = 5
    engine = Engine(tiny_llama, None, plain(), max_slots=1, max_length=len(PROMPTS[0].token_ids) + room)
    answer = next(answer_all(engine, PROMPTS[:1], GREEDY))
    assert (len(answer.token_ids), answer.finish_reason) == (room, "length")
    assert judge(reference_for(reference_model, GREEDY), answer, room, FLOAT32) == []


def test_a_models_own_generation_config_does_not_reach_the_reference(tiny_folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    before = reference_for(model, GREEDY).generate(PROMPTS[0].token_ids, [], 16)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    assert reference_for(model, GREEDY).generate(PROMPTS[0].token_ids, [], 16) == before


def test_the_reference_is_loaded_in_the_format_that_the_target_chose(tiny_llama: Target) -> None:
    config = TargetConfig(target=tiny_llama.spec, drafter="./unread", dtype="auto", device="cpu")
    assert Reference.load(config, tiny_llama, GREEDY).model.dtype == tiny_llama.dtype


def test_timed_answer_is_the_reference_answer(reference_model) -> None:
    reference = reference_for(reference_model, GREEDY)
    answer = reference.answer(PROMPTS[0], 16)
    assert answer.token_ids == reference.generate(PROMPTS[0].token_ids, [], 16)
    assert answer.prefill_s > 0 and answer.decode_s > 0
    assert sum(answer.acceptance_lengths) == len(answer.token_ids) - 1


class ScriptedReference:
    """Says `tokens[i]` at output position i whatever comes before, token 9 `margins[i]` behind it."""

    def __init__(self, tokens: list[int], margins: dict[int, float], stop: tuple[int, ...] = ()) -> None:
        self.tokens, self.margins, self.stop_token_ids = tokens, margins, stop
        self.params = GREEDY

    def generate(self, prompt_ids: Sequence[int], output_ids: Sequence[int], limit: int) -> list[int]:
        found: list[int] = []
        for token in self.tokens[len(output_ids) : len(output_ids) + limit]:
            found.append(token)
            if token in self.stop_token_ids:
                break
        return found

    def decide(self, prompt_ids: Sequence[int], output_ids: Sequence[int], num_steps: int) -> Decision:
        position = len(output_ids) + num_steps - 1
        scores = np.full(10, -50.0)
        scores[9] = 20.0 - self.margins.get(position, 40.0)  # token 9 is the runner-up everywhere
        scores[self.tokens[position]] = 20.0
        return Decision(scores, spread=3.0, number=None)

    def decisions(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Iterator[Decision]:
        for position in range(len(output_ids) + 1):
            # Past the script nothing is decided: the judge has to see that the answer is over.
            yield self.decide(prompt_ids, output_ids[: min(position, len(self.tokens) - 1)], 1)


@both_judges
def test_after_a_tie_the_rest_of_the_answer_is_audited_too(judge) -> None:
    reference = ScriptedReference([1, 2, 3, 4, 5, 6], margins={1: 0.5, 4: 0.7})
    near_tie_then_bug = judge(reference, answer_with([1, 9, 3, 4, 9, 6]), 6, TieRule(torch.bfloat16))
    assert [(found.position, found.kind) for found in near_tie_then_bug] == [(1, Kind.NEAR_TIE), (4, Kind.BUG)]
    two_ties = judge(reference, answer_with([1, 9, 3, 4, 9, 6]), 6, TieRule(torch.bfloat16, near_tie=0.3))
    assert [found.kind for found in two_ties] == [Kind.NEAR_TIE, Kind.NEAR_TIE]


@both_judges
def test_a_tie_with_a_stop_token_has_to_end_the_answer(judge) -> None:
    reference = ScriptedReference([1, 2, 3, 4], margins={1: 0.1}, stop=(9,))
    rule = TieRule(torch.bfloat16)
    assert [found.kind for found in judge(reference, answer_with([1, 9]), 4, rule)] == [Kind.NEAR_TIE]
    went_on = judge(reference, answer_with([1, 9, 3]), 4, rule)
    assert [found.kind for found in went_on] == [Kind.NEAR_TIE, Kind.BUG]


def test_tie_limits() -> None:
    assert FLOAT32.judge(0.99e-4, FLOAT32.allowed(3.0, 0.0)) is Kind.TIE
    assert FLOAT32.judge(1e-4, FLOAT32.allowed(3.0, 0.0)) is Kind.BUG
    assert FLOAT32.allowed(3.0, 0.5, number=0.5) == pytest.approx(0.5e-4)
    bfloat16 = TieRule(torch.bfloat16)
    assert bfloat16.allowed(3.5, 0.0) == pytest.approx(0.7)
    assert bfloat16.judge(0.7, 0.7) is Kind.NEAR_TIE
    assert bfloat16.judge(0.71, 0.7) is Kind.BUG
    assert bfloat16.allowed(3.5, 0.7, number=0.9) == pytest.approx(0.09)


def test_sampled_margin_is_the_distance_of_the_number_from_the_tokens_interval() -> None:
    decision = Decision(np.array([0.5, 0.0, 0.25, 0.25]), spread=1.0, number=0.6)
    assert decision.margin(2) == 0.0
    assert decision.margin(0) == pytest.approx(0.1)
    assert decision.margin(3) == pytest.approx(0.15)
    assert decision.margin(1) == float("inf")  # ruled out by a filter


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_chi_square_agrees_with_scipy_and_refuses_the_impossible() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    observed = np.array([30, 60, 80, 130])
    expected = scipy.stats.chisquare(observed, probabilities * 300).pvalue
    assert chi_square(observed, probabilities) == pytest.approx(expected)
    assert chi_square(np.array([1, 9]), np.array([0.0, 1.0])) == 0.0
    pooled = chi_square(np.array([97, 1, 2]), np.array([0.97, 0.02, 0.01]))
    assert pooled == pytest.approx(scipy.stats.chisquare([97, 3], [97, 3]).pvalue)


@pytest.mark.slow
def test_sampled_trees_follow_the_targets_distribution(tmp_path) -> None:
    """Three tokens over a vocabulary of 12, against exact probabilities; penalties, top-p and top-k are on."""
    from tests.conftest import save_tiny_model

    folder = save_tiny_model(tmp_path, "llama", vocab_size=12, seed=3)
    target = Target.load(str(folder), dtype="float32", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(
        temperature=1.3, top_p=0.95, top_k=8, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        max_new_tokens=3, ignore_eos=True,
    )  # fmt: skip
    prompt = [3, 4, 5]
    exact = exact_probabilities(model, params, prompt)
    likely = [list(tokens) for tokens in sorted(exact, key=exact.__getitem__)[-6:]]
    counts = dict.fromkeys(exact, 0)
    num_accepted = 0
    engine = Engine(
        target, FakeDrafter(target, [prompt + tokens for tokens in likely]), ddtree(10, num_candidates=6), max_slots=32,
        detokenize=False,
    )  # fmt: skip
    for seed in range(4000):
        engine.add(prompt, replace(params, seed=seed), sequence_id=str(seed))
    outputs: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for event in engine.step():
            outputs[event.sequence_id] = (*outputs.get(event.sequence_id, ()), *event.token_ids)
            num_accepted += event.summary.num_accepted if event.summary else 0
    for tokens in outputs.values():
        counts[tokens] += 1
    observed, probabilities = np.array(list(counts.values())), np.array(list(exact.values()))
    assert num_accepted > 1000  # trees took part
    assert probabilities.sum() == pytest.approx(1.0)
    assert chi_square(observed, probabilities) > 1e-3
    # Controls: the same counts do not come from the distribution without penalties, nor without the filters.
    unpenalised = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    for other in (unpenalised, replace(params, top_p=1.0, top_k=0)):
        wrong = exact_probabilities(model, other, prompt)
        assert chi_square(observed, np.array([wrong[tokens] for tokens in counts])) < 1e-6


def exact_probabilities(model, params: SamplingParams, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of each answer of three tokens, by transformers' processors one step at a time."""
    reference = reference_for(model, replace(params, seed=0))
    vocabulary = range(model.config.vocab_size)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            if probability > 0:
                step = reference.decide(prompt, list(tokens), 1).scores
            else:
                step = np.zeros(len(vocabulary))
            grown |= {(*tokens, token): probability * float(step[token]) for token in vocabulary}
        found = grown
    return found


def answer_with(tokens: list[int]) -> Answer:
    return Answer(PROMPTS[0], tokens, "", "length", None, [1] * (len(tokens) - 1), 0, 0.1, 0.2)
