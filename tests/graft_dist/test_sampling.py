"""Sampling: warping against references, lossless walks, exact probabilities, trimming, text streams."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graft_dist.counter_random import uniform
from graft_dist.draft_tree import DraftTree, build_tree, root_tree
from graft_dist.sampling import (
    SamplingParams,
    TextStream,
    TokenChooser,
    Verdict,
    accept,
    sample_tokens,
    token_logprobs,
    trim,
    warp_logits,
)

# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**64),
        ("max_new_tokens", 0),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 2),
        ("stop", ("",)),
        ("stop", "END"),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_impossible_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert repr(value) in str(caught.value)


def test_parameters() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[5])  # type: ignore[arg-type]
    assert params.stop == ("a",) and params.stop_token_ids == (5,)
    assert params.is_greedy and not params.has_penalties
    assert params.stop_set({2}) == {2, 5}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).stop_set({2}) == {5}
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=-0.1).has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties
    assert not SamplingParams(temperature=0.7).is_greedy
    hash(params)


# Warping

WARPS = [
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.3, "top_p": 0.9},
    {"repetition_penalty": 0.7, "temperature": 0.8, "top_k": 5},
]


@pytest.mark.parametrize("warp", WARPS)
def test_warping_equals_transformers(warp: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **warp})
    torch.manual_seed(0)
    logits = torch.randn(16, 600) * 3
    history = torch.randint(600, (16, 30))
    seen = torch.zeros(16, 600, dtype=torch.bool).scatter_(1, history, True)
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    processors += [TemperatureLogitsWarper(params.temperature)]
    processors += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    processors += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    processors += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    expected = LogitsProcessorList(processors)(history, logits.double()).softmax(dim=-1)
    actual = warp_logits(logits, params, seen, torch.zeros(16, 600)).softmax(dim=-1)
    torch.testing.assert_close(actual, expected)


def warp_slowly(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Probabilities of every token, step by step as the definitions read."""
    values = list(logits)
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(output).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    weights = [math.exp((value - max(values)) / params.temperature) for value in values]

    def kept(tokens: set[int]) -> None:
        for token in range(len(weights)):
            weights[token] = weights[token] if token in tokens else 0.0
        total = sum(weights)
        for token in range(len(weights)):
            weights[token] /= total

    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        kept({token for token in order if weights[token] >= weights[order[min(params.top_k, len(order)) - 1]]})
    kept(set(order))
    nucleus: set[int] = set()
    for token in order:
        if sum(weights[t] for t in nucleus) < params.top_p:
            nucleus.add(token)
    kept(nucleus)
    kept({token for token in order if weights[token] >= params.min_p * max(weights)})
    return weights


@pytest.mark.parametrize(
    "warp",
    [
        {},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.5, "presence_penalty": -0.5},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.9, "top_k": 6, "top_p": 0.85, "min_p": 0.1},
    ],
)
def test_penalties_equal_the_definitions(warp: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0.8, **warp})
    rng = np.random.default_rng(1)
    for _ in range(20):
        logits = rng.normal(size=12) * 2
        prompt, output = rng.integers(12, size=4).tolist(), rng.integers(12, size=6).tolist()
        seen = torch.zeros(1, 12, dtype=torch.bool)
        seen[0, prompt + output] = True
        counts = torch.tensor([[output.count(token) for token in range(12)]])
        actual = warp_logits(torch.tensor(logits)[None], params, seen, counts).softmax(dim=-1)[0]
        assert actual.tolist() == pytest.approx(warp_slowly(logits.tolist(), params, prompt, output))


def test_a_nucleus_wider_than_the_first_look() -> None:
    logits = torch.linspace(0, 0.1, 9000)[None]
    logits = torch.cat([logits, logits.flip(1) * 60])  # one flat row, one peaked
    kept = warp_logits(logits, SamplingParams(temperature=1.0, top_p=0.9)).isfinite()
    probs = logits.double().softmax(dim=-1)
    for row in range(2):
        order = probs[row].argsort(descending=True)
        size = int((probs[row][order].cumsum(0) < 0.9).sum()) + 1
        assert set(kept[row].nonzero()[:, 0].tolist()) == set(order[:size].tolist())


def test_ties_at_the_edge_of_filters() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, -5.0]])
    by_top_k = warp_logits(logits, SamplingParams(temperature=1.0, top_k=2)).isfinite()
    assert by_top_k.tolist() == [[True, True, True, True, False]]  # tokens tied with the second are kept
    by_top_p = warp_logits(logits, SamplingParams(temperature=1.0, top_p=0.6)).isfinite()
    assert by_top_p.tolist() == [[True, True, False, False, False]]  # the lowest id of the tied ones suffices


def test_extreme_values() -> None:
    logits = torch.tensor([[1e4, 9e3, -math.inf]])
    for params in (SamplingParams(temperature=1e-30), SamplingParams(temperature=1.0, top_p=1e-9, min_p=1.0)):
        assert warp_logits(logits, params).softmax(dim=-1).tolist() == [[1, 0, 0]]
    assert warp_logits(logits.bfloat16(), SamplingParams(temperature=1.0, top_k=99)).dtype == torch.float64
    with pytest.raises(ValueError, match="penalties need"):
        warp_logits(logits, SamplingParams(repetition_penalty=2.0))


# Drawing


def test_inverse_of_the_distribution_function() -> None:
    warped = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64).log().expand(7, 6)
    numbers = [1e-16, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53, 0.5]
    assert sample_tokens(warped, numbers).tolist() == [1, 1, 3, 3, 4, 4, 3]


def test_a_single_token_left() -> None:
    warped = torch.full((1, 1000), -math.inf, dtype=torch.float64)
    warped[0, 999] = -700.0
    assert sample_tokens(warped, [1 - 2.0**-53]).tolist() == [999]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("warp", [{}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1}])
def test_broken_logits_are_refused(value: float, warp: dict[str, Any]) -> None:
    chooser = TokenChooser(SamplingParams(temperature=1.0, **warp), 0, [1], 3)
    with pytest.raises(ValueError, match="not finite"):
        chooser.next_token(torch.tensor([0.0, value, 1.0]))


# A language model of five tokens, and decoding with trees on top of it

VOCAB = 5
LENGTH = 3
PROMPT = (0, 3)
TREES = ("none", "chain", "wide", "deep", "junk")


@cache
def lm_logits(context: tuple[int, ...]) -> torch.Tensor:
    """Logits [V] that depend on the last three tokens."""
    rng = np.random.default_rng([1 + token for token in context[-3:]])
    return torch.tensor(rng.normal(size=VOCAB) * 1.5, dtype=torch.float32)


def draft(kind: str, context: tuple[int, ...]) -> DraftTree:
    """A tree of one of several kinds after `context`, whose last token is the root."""
    rng = np.random.default_rng([len(context), *context])
    k = 1 if kind == "chain" else 3
    depth = {"none": 0, "chain": 3, "wide": 1, "deep": 3, "junk": 2}[kind]
    ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(depth)]) if depth else np.zeros((0, k))
    if kind in ("wide", "deep") and depth:  # a good drafter's first depth
        ids[0] = lm_logits(context).argsort(descending=True)[:k].numpy()
    scores = np.log(rng.dirichlet(np.ones(k), (depth, k)))
    return build_tree(context[-1], ids.astype(np.int32), scores.astype(np.float32), 8)


def node_logits(tree: DraftTree, context: tuple[int, ...]) -> torch.Tensor:
    paths = [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(tree.num_nodes + 1)]
    return torch.stack([lm_logits(context + path) for path in paths])


Rule = Callable[[TokenChooser, torch.Tensor, DraftTree], Verdict]


def by_walking(chooser: TokenChooser, logits: torch.Tensor, tree: DraftTree) -> Verdict:
    return accept(tree, chooser.walker(logits, tree))


def by_looking_up(chooser: TokenChooser, logits: torch.Tensor, tree: DraftTree) -> Verdict:
    chosen = chooser.next_tokens(logits, tree)
    assert chosen.dtype == np.int32 and chosen.shape == (tree.num_nodes + 1,)
    return accept(tree, lambda node: int(chosen[node]))


def by_drafter(chooser: TokenChooser, logits: torch.Tensor, tree: DraftTree) -> Verdict:
    """The wrong rule: a drafted token is accepted with the drafter's probability, without asking the target."""

    def next_token(node: int) -> int:
        children = np.flatnonzero(tree.parents == node)
        if len(children) > 0:
            probability = math.exp(tree.scores[children[0]] - tree.scores[node])
            if uniform(chooser.seed, 1000 + chooser.num_output + int(tree.depths[node])) < probability:
                return int(tree.tokens[children[0]])
        return chooser.walker(logits, tree)(node)

    return accept(tree, next_token)


def by_walking_without_path(chooser: TokenChooser, logits: torch.Tensor, tree: DraftTree) -> Verdict:
    """The wrong rule: penalties that see the committed output only."""

    def next_token(node: int) -> int:
        blind = copy.copy(chooser)
        blind.num_output += int(tree.depths[node])
        return blind.next_token(logits[node])

    return accept(tree, next_token)


def decode(params: SamplingParams, seed: int, kind: str, rule: Rule, length: int = LENGTH) -> tuple[int, ...]:
    """Decode `length` tokens after the prompt, the first as prefill does, the rest in rounds."""
    chooser = TokenChooser(params, seed, PROMPT, VOCAB)
    output = [chooser.next_token(lm_logits(PROMPT))]
    chooser.commit(output)
    while len(output) < length:
        context = PROMPT + tuple(output)
        tree = draft(kind, context)
        tokens = rule(chooser, node_logits(tree, context), tree).token_ids(tree)
        tokens = tokens[: trim(tokens, (), length - len(output))[0]]
        chooser.commit(tokens)
        output += tokens
    return tuple(output)


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, top_k=3, frequency_penalty=0.8),
    SamplingParams(temperature=1.5, min_p=0.15, presence_penalty=-0.6, repetition_penalty=0.8),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.85, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5),
]


def exact_probabilities(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every output, from the definitions."""
    probabilities = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for index, token in enumerate(output):
            logits = lm_logits(PROMPT + output[:index]).double().tolist()
            probability *= warp_slowly(logits, params, PROMPT, output[:index])[token]
        probabilities[output] = probability
    return probabilities


def goodness_of_fit(outputs: Sequence[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """The p-value of a chi-square test; outputs expected fewer than five times share a cell."""
    counts = Counter(outputs)
    assert all(probabilities[output] > 0 for output in counts), "an output of probability zero"
    common = [output for output, probability in probabilities.items() if probability * len(outputs) >= 5]
    observed = [counts[output] for output in common]
    expected = [probabilities[output] * len(outputs) for output in common]
    rest = len(outputs) - sum(expected)
    if rest > 1e-6:
        observed.append(len(outputs) - sum(observed))
        expected.append(rest)
    return float(stats.chisquare(observed, expected).pvalue)


NUM_SEEDS = 1000


@pytest.mark.parametrize("kind", ["none", "deep", "junk"])
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_outputs_follow_the_exact_distribution(params: SamplingParams, kind: str) -> None:
    outputs = [decode(params, seed, kind, by_walking) for seed in range(NUM_SEEDS)]
    assert goodness_of_fit(outputs, exact_probabilities(params)) > 1e-3


@pytest.mark.parametrize("kind", ["chain", "wide", "deep", "junk"])
def test_control_a_wrong_rule_fails_the_same_test(kind: str) -> None:
    params = SamplingParams(temperature=1.0)
    outputs = [decode(params, seed, kind, by_drafter) for seed in range(NUM_SEEDS)]
    assert goodness_of_fit(outputs, exact_probabilities(params)) < 1e-6


def test_control_penalties_that_ignore_the_path_fail_the_same_test() -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=-2.0)  # repeating is likely, and shows
    probabilities = exact_probabilities(params)
    p_values = {
        rule: goodness_of_fit([decode(params, seed, "deep", rule) for seed in range(NUM_SEEDS)], probabilities)
        for rule in (by_walking, by_walking_without_path)
    }
    assert p_values[by_walking] > 1e-3 and p_values[by_walking_without_path] < 1e-6


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.5), *PARAMS], ids=range(7))
def test_same_text_for_the_same_seed_whatever_the_tree(params: SamplingParams) -> None:
    for seed in range(12):
        expected = decode(params, seed, "none", by_walking, length=12)
        for kind in TREES:
            for rule in (by_walking, by_looking_up):
                assert decode(params, seed, kind, rule, length=12) == expected


def test_different_seeds_differ() -> None:
    texts = {decode(PARAMS[0], seed, "deep", by_walking, length=12) for seed in range(50)}
    assert len(texts) > 45


def test_greedy_takes_the_lowest_of_tied_tokens() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert TokenChooser(SamplingParams(), 0, [0], 4).next_token(logits) == 1
    assert TokenChooser(SamplingParams(presence_penalty=1e-9), 0, [0], 4).next_token(logits) == 1


def test_greedy_penalties_see_the_nodes_own_path() -> None:
    chooser = TokenChooser(SamplingParams(presence_penalty=2.0), 0, [], 4)
    logits = torch.tensor([0.0, 3.0, 2.0, 1.5])
    assert chooser.next_token(logits) == 1
    assert chooser.next_token(logits, [1]) == 2
    assert chooser.next_token(logits, [1, 2]) == 3
    chooser.commit([2])
    assert chooser.next_token(logits, [1]) == 3
    assert chooser.next_token(logits) == 1  # paths leave no trace


def test_prompt_counts_for_repetition_only() -> None:
    logits = torch.tensor([1.0, 1.2])
    assert TokenChooser(SamplingParams(presence_penalty=2.0, frequency_penalty=2.0), 0, [1], 2).next_token(logits) == 1
    assert TokenChooser(SamplingParams(repetition_penalty=2.0), 0, [1], 2).next_token(logits) == 0


def test_many_rows_equal_one_by_one() -> None:
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    ids = np.stack([rng.choice(300, 8, replace=False) for _ in range(4)]).astype(np.int32)
    tree = build_tree(1, ids, np.log(rng.dirichlet(np.ones(8), (4, 8))).astype(np.float32), 40)
    logits = torch.randn(41, 300) * 2
    for params in PARAMS:
        chooser = TokenChooser(params, 11, [5, 6], 300)
        chooser.commit([1])
        walker = chooser.walker(logits, tree)
        assert chooser.next_tokens(logits, tree).tolist() == [walker(node) for node in range(41)]


# The walk


def test_walk_literal_cases() -> None:
    ids = np.array([[10, 11], [20, 21]], np.int32)
    tree = build_tree(7, ids, np.zeros((2, 1, 2), np.float32), 6)  # complete
    where = {(tree.parents[node], tree.tokens[node]): node for node in range(1, 7)}
    first, second = where[(0, 11)], where[(where[(0, 11)], 20)]
    asked: list[int] = []

    def target(wanted: dict[int, int]) -> Callable[[int], int]:
        return lambda node: (asked.append(node), wanted[node])[1]

    verdict = accept(tree, target({0: 11, first: 20, second: 99}))
    assert verdict == Verdict([first, second], 99) and verdict.token_ids(tree) == [11, 20, 99]
    assert asked == [0, first, second]  # lazily, each once
    assert accept(tree, target({0: 11, first: 77})) == Verdict([first], 77)
    assert accept(tree, target({0: 99})) == Verdict([], 99)
    assert accept(root_tree(7), target({0: 10})) == Verdict([], 10)
    assert accept(root_tree(7), target({0: 10})).token_ids(root_tree(7)) == [10]


@pytest.mark.parametrize(
    ("tokens", "room", "expected"),
    [
        ([4, 5, 6], 9, (3, None)),
        ([4, 2, 6], 9, (2, "stop")),
        ([2, 2], 9, (1, "stop")),
        ([4, 5, 6], 2, (2, "length")),
        ([4, 5, 6], 3, (3, "length")),
        ([4, 5, 2], 3, (3, "stop")),  # the stop token just fits
        ([4, 5, 2], 2, (2, "length")),  # a stop token beyond the limit was never output
        ([4], 1, (1, "length")),
    ],
)
def test_trimming(tokens: list[int], room: int, expected: tuple[int, str | None]) -> None:
    assert trim(tokens, {2, 3}, room) == expected


# Log-probabilities


def test_logprobs_are_the_raw_targets() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 50) * 3).bfloat16()
    expected = logits.float().log_softmax(dim=-1)
    tokens = [int(logits[0].argmax()), 7, 49]
    for row, entry in enumerate(token_logprobs(logits, tokens, num_top=4)):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item())
        assert entry.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        assert [value for _, value in entry.top] == pytest.approx(expected[row].topk(4).values.tolist())
        assert all(expected[row, token].item() == pytest.approx(value) for token, value in entry.top)
    assert token_logprobs(logits, tokens)[0].top == () and token_logprobs(logits, tokens)[0].rank == 1


# Text

TEXTS = (
    "Hello there, this is a test.\n\nIt has words, words and more words; numbers 12345 too.",
    "naïve café, 東京タワー, 👩‍👩‍👧‍👦 family, 👍🏽 and €20 — “quotes”.",
    "    def f(x):\n        return x  # indent\n\tEND",
    "Ünïcödé ñandú 中文 한국어 русский 🎉🎉🎉",
)


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>", "<pad>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@cache
def leading_space_tokenizer() -> PreTrainedTokenizerFast:
    """Llama-2's scheme: a space belongs to the next word, the text's first is dropped, rare characters are bytes."""
    vocab = {"<end>": 0, "<unk>": 1}
    vocab |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    pieces = ["▁", "▁▁", "▁▁▁▁", "▁Hello", "▁there", "▁this", "▁is", "▁a", "▁test", "▁words", "▁and", "END", "▁END"]
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    for char in sorted(set("".join(TEXTS))):
        if char.isascii() and char.isprintable() and char != " ":
            vocab.setdefault(char, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


def stream_text(
    tokenizer: Any, tokens: Sequence[int], sizes: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], int, bool]:
    """Push tokens in chunks of the given sizes (cycled); return the deltas, the tokens output, and whether stopped."""
    stream = TextStream(tokenizer, stop)
    deltas: list[str] = []
    done = 0
    for size in itertools.cycle(sizes):
        chunk = list(tokens[done : done + size])
        if not chunk:
            break
        delta = stream.push(chunk)
        deltas.append(delta.text)
        done += delta.num_tokens
        if delta.is_stopped:
            assert stream.finish() == ""
            return deltas, done, True
        assert delta.num_tokens == len(chunk)
    deltas.append(stream.finish())
    return deltas, done, False


def cut_text(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, int, bool]:
    """The text, number of tokens and whether stopped, by decoding everything after each token."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True).rstrip("\ufffd")
        places = [text.find(string) for string in stop if string in text]
        if places:
            return text[: min(places)], count, True
    return tokenizer.decode(tokens, skip_special_tokens=True), len(tokens), False


CHUNKS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
STOPS = st.lists(
    st.sampled_from(["END", "\n\n", "words", "words and", "rds, w", "🎉🎉", "東京", " ", "é", "e", "is a t", "zzz"]),
    max_size=3,
)


@given(st.data(), CHUNKS, STOPS)
@settings(deadline=None, max_examples=200)
def test_text_of_random_byte_level_tokens(data: st.DataObject, sizes: list[int], stop: list[str]) -> None:
    tokenizer = byte_level_tokenizer()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    deltas, count, is_stopped = stream_text(tokenizer, tokens, sizes, stop)
    assert ("".join(deltas), count, is_stopped) == cut_text(tokenizer, tokens, stop)


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), st.booleans(), CHUNKS, STOPS)
@settings(deadline=None, max_examples=200)
def test_text_of_real_sentences(texts: list[str], is_byte_level: bool, sizes: list[int], stop: list[str]) -> None:
    tokenizer = byte_level_tokenizer() if is_byte_level else leading_space_tokenizer()
    tokens: list[int] = []
    for text in texts:
        pieces = text if is_byte_level else "▁" + text.replace(" ", "▁")
        tokens += [*tokenizer.encode(pieces, add_special_tokens=False), 0]
    deltas, count, is_stopped = stream_text(tokenizer, tokens, sizes, stop)
    assert ("".join(deltas), count, is_stopped) == cut_text(tokenizer, tokens, stop)


@given(st.data(), CHUNKS, STOPS)
@settings(deadline=None, max_examples=200)
def test_text_of_random_leading_space_tokens(data: st.DataObject, sizes: list[int], stop: list[str]) -> None:
    tokenizer = leading_space_tokenizer()
    # Special tokens and pieces in any order; no lone bytes, see the class's limits.
    tokens = data.draw(st.lists(st.sampled_from([0, *range(258, len(tokenizer))]), max_size=80))
    deltas, count, is_stopped = stream_text(tokenizer, tokens, sizes, stop)
    assert ("".join(deltas), count, is_stopped) == cut_text(tokenizer, tokens, stop)


def test_characters_come_whole() -> None:
    tokenizer = byte_level_tokenizer()
    ((units, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂")
    tokens = [tokenizer.convert_tokens_to_ids(unit) for unit in ("a", *units, "b")]
    assert len(tokens) == 6  # the face is four bytes, each a token
    assert stream_text(tokenizer, tokens, [1])[0] == ["a", "", "", "", "🙂", "b", ""]
    assert stream_text(tokenizer, tokens[:3], [1])[0] == ["a", "", "", "\ufffd"]


def test_the_start_of_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level_tokenizer()

    def tokens_of(text: str) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(char) for char in text]

    assert stream_text(tokenizer, tokens_of("xENxEND!"), [1], ["END"]) == (["x", "", "", "ENx", "", "", ""], 7, True)
    assert stream_text(tokenizer, tokens_of("xEN"), [1], ["END"]) == (["x", "", "", "EN"], 3, False)
    assert stream_text(tokenizer, tokens_of("aENDb"), [5], ["END"]) == (["a"], 4, True)
    assert stream_text(tokenizer, tokens_of("ababac"), [1], ["abac"])[0] == ["", "", "", "ab", "", ""]


def test_long_texts_are_decoded_in_windows() -> None:
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode(" ".join(TEXTS) * 5, add_special_tokens=False)
    lengths: list[int] = []

    class Spy:
        def decode(self, token_ids: list[int], **options: Any) -> str:
            lengths.append(len(token_ids))
            return str(tokenizer.decode(token_ids, **options))

    deltas, _, _ = stream_text(Spy(), tokens, [3])
    assert "".join(deltas) == tokenizer.decode(tokens)
    assert len(tokens) > 500 and max(lengths) < 80
