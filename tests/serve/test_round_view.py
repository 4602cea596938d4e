"""Views of rounds: texts that add up to the answer, whatever the tokens split, and trees that read right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft_dist.active_sequence import SequenceEvent
from graft_dist.engine import Engine
from graft_dist.policy import ddtree, plain
from graft_dist.rounds import RoundTrace
from graft_dist.sampling import SamplingParams, TextStream
from graft_dist.target import Target
from serve.round_view import Pieces, RoundView, RoundViewer
from tests.conftest import FakeDrafter, build_tokenizer

TOKENIZER = build_tokenizer()
PIECES = Pieces(TOKENIZER)
FLAG = "🏴‍☠️"  # 13 bytes, 4 code points; the tokenizer never saw them, so every byte is a token


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_trace(
    tree: Sequence[tuple[int, int]], root: int, accepted: Sequence[int], num_tokens: int, is_mismatch: bool = False
) -> RoundTrace:
    """A round whose tree is given as (token, parent) of nodes 1, 2, ..."""
    tokens, parents = [root, *(token for token, _ in tree)], [-1, *(parent for _, parent in tree)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return RoundTrace(
        round_index=3,
        budget=len(tree),
        tree_tokens=np.array(tokens, np.int32),
        tree_parents=np.array(parents, np.int32),
        tree_depths=np.array(depths, np.int32),
        accepted=np.array(accepted, np.int32),
        num_tokens=num_tokens,
        is_mismatch=is_mismatch,
        draft_ns=2_000_000,
        build_ns=500_000,
        verify_ns=30_000_000,
        commit_ns=1_250_000,
        batch_size=2,
        batch_rows=9,
    )


def event(token_ids: Sequence[int], trace: RoundTrace | None = None, **fields: Any) -> SequenceEvent:
    return SequenceEvent("s", list(token_ids), text="", logprobs=None, trace=trace, **fields)


def only(views: list[RoundView]) -> RoundView:
    assert len(views) == 1
    return views[0]


def test_a_round_as_a_client_sees_it() -> None:
    root, b, c, d, space = tokens_of("QbcZ ")
    viewer = RoundViewer(PIECES)
    assert viewer.views(event([root])) == []  # the first token belongs to no round
    # Nodes: 1 "b", 2 "c", 3 "Z" below "b", 4 " " below "c". The target wants "b", and then " ".
    trace = make_trace([(b, 0), (c, 0), (d, 1), (space, 2)], root, accepted=[1], num_tokens=2, is_mismatch=True)
    view = only(viewer.views(event([b, space], trace)))
    assert view.to_json() == {
        "index": 3,
        "budget": 4,
        "tokens": [{"text": "b", "is_bonus": False}, {"text": " ", "is_bonus": True}],
        "mismatch": True,  # " " was there, but under "c"
        "round_ms": 33.75,
        "stages": {"draft_ms": 2.0, "build_ms": 0.5, "verify_ms": 30.0, "commit_ms": 1.25},
        "batch_size": 2,
        "tree": {
            "parents": [-1, 0, 0, 1, 2],
            "depths": [0, 1, 1, 2, 2],
            "texts": ["Q", "b", "c", "Z", " "],
            "accepted": [1],
            "elsewhere": [4],
        },
    }
    json.dumps(view.to_json())


def test_a_plain_round_is_one_bonus_token() -> None:
    a, b = tokens_of("ab")
    viewer = RoundViewer(PIECES)
    viewer.views(event([a]))
    view = only(viewer.views(event([b], make_trace([], a, accepted=[], num_tokens=1))))
    assert [(token.text, token.is_bonus) for token in view.tokens] == [("b", True)]
    assert (view.budget, view.mismatch, view.tree.texts, view.tree.accepted) == (0, False, ["a"], [])


def test_a_sequence_that_ends_inside_the_path_has_no_bonus_token() -> None:
    a, b, c = tokens_of("abc")
    viewer = RoundViewer(PIECES)
    viewer.views(event([a]))
    trace = make_trace([(b, 0), (c, 1)], a, accepted=[1, 2], num_tokens=2)
    view = only(viewer.views(event([b, c], trace, finish_reason="length")))
    assert [(token.text, token.is_bonus) for token in view.tokens] == [("b", False), ("c", False)]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    a, *bytes_of_flag = tokens_of("a🎉")
    assert len(bytes_of_flag) == 4
    viewer = RoundViewer(PIECES)
    assert viewer.views(event([a])) == []
    first, second, third, fourth = bytes_of_flag
    # The other branch, "b", is a character of its own; in the second round the root is inside the character.
    other = tokens_of("b")[0]
    trace = make_trace([(first, 0), (other, 0), (second, 1)], a, [1, 3], 3)
    view = only(viewer.views(event([first, second, third], trace)))
    assert [token.text for token in view.tokens] == ["", "", ""]
    assert view.tree.texts == ["a", "", "b", ""]
    trace = make_trace([(fourth, 0), (other, 1)], third, [1], 2)
    view = only(viewer.views(event([fourth, a], trace)))
    assert [token.text for token in view.tokens] == ["🎉", "a"]
    assert view.tree.texts == ["", "🎉", "b"]


def test_special_tokens_are_named_in_the_tree_and_silent_in_the_text() -> None:
    a, end = tokens_of("a")[0], TOKENIZER.eos_token_id
    viewer = RoundViewer(PIECES)
    viewer.views(event([a]))
    trace = make_trace([(end, 0)], a, accepted=[1], num_tokens=1)
    view = only(viewer.views(event([end], trace, finish_reason="stop")))
    assert [token.text for token in view.tokens] == [""]
    assert view.tree.texts == ["a", "<|im_end|>"]


@given(
    pieces=st.lists(st.sampled_from([*"ab \n.é東", "🎉", FLAG, "END"]), max_size=12),
    extra=st.lists(st.integers(0, 319), max_size=6),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    stop=st.lists(st.sampled_from(["END", "ab", "é", "🎉", ". "]), max_size=2),
)
def test_texts_add_up_to_the_stream(pieces: list[str], extra: list[int], sizes: list[int], stop: list[str]) -> None:
    """Event by event, the tokens' texts are what the engine's own stream gives out."""
    tokens = [*tokens_of("".join(pieces)), *extra]
    stream, viewer = TextStream(TOKENIZER, stop), RoundViewer(PIECES, stop)
    if not tokens:
        return
    first = stream.push(tokens[:1])
    viewer.views(event(tokens[:1]))
    given_out, shown, done, is_stopped = first.text, first.text, 1, first.is_stopped
    for size in sizes * len(tokens):
        chunk = tokens[done : done + size]
        if is_stopped or not chunk:
            break
        delta = stream.push(chunk)
        done += delta.num_tokens
        is_stopped = delta.is_stopped
        is_last = is_stopped or done >= len(tokens)
        given_out += delta.text + (stream.finish() if is_last else "")
        trace = make_trace([], 3, [], num_tokens=delta.num_tokens)
        reason = "stop" if is_last else None
        view = only(viewer.views(event(chunk[: delta.num_tokens], trace, finish_reason=reason)))
        assert len(view.tokens) == delta.num_tokens
        shown += "".join(token.text for token in view.tokens)
        assert shown == given_out
    assert not any(string in shown for string in stop)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_engine_s_rounds_add_up_to_its_text(tiny_llama: Target, is_stopped: bool) -> None:
    """A random model writes broken UTF-8 and special tokens; event by event, the views match the engine's text."""
    prompt = tokens_of("the drafter")
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=60, ignore_eos=True)
    plainly = Engine(tiny_llama, None, plain())
    plainly.add(prompt, params)
    events = list(run(plainly))
    text = "".join(step.text for step in events)
    if is_stopped:
        params = replace(params, stop=(text[len(text) // 2 :][:3],))
    output = [token for step in events for token in step.token_ids]
    engine = Engine(tiny_llama, FakeDrafter(tiny_llama, [[*prompt, *output]]), ddtree(8, 4))
    engine.add(prompt, params)
    viewer = RoundViewer(Pieces(tiny_llama.tokenizer), params.stop)
    lengths = []
    for number, step in enumerate(run(engine)):
        views = viewer.views(step)
        if number == 0:
            assert views == [] and step.text  # else the first round's texts would hold the first token's
            continue
        view = only(views)
        assert view.index == number - 1
        assert "".join(token.text for token in view.tokens) == step.text
        assert len(view.tokens) == len(step.token_ids)
        assert len(view.tree.texts) == len(view.tree.parents) == view.budget + 1
        lengths.append(len(view.tokens))
    assert len(lengths) > 3 and max(lengths) > 2


def run(engine: Engine) -> Iterator[SequenceEvent]:
    while engine.has_work:
        yield from engine.step()
