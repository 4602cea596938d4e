"""What a request's fields become in the engine."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from graft_dist.sampling import SamplingParams
from serve.errors import ApiError
from serve.openai_api import ChatRequest, CompletionRequest, parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "recite"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "recite"}
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 11,
    "min_p": 0.05,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": -0.6,
    "stop": ["first", "second"],
    "stop_token_ids": [3, 13],
    "ignore_eos": True,
}


LIMITS = {"max_prompts": 4, "max_length": 50}


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_every_sampling_field_reaches_the_engine(kind: Any, body: dict[str, Any]) -> None:
    request = parse(kind, json.dumps(body | SAMPLING).encode(), **LIMITS)
    expected = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=11,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=-0.6,
        seed=7,
        max_new_tokens=5,
        stop=("first", "second"),
        stop_token_ids=(3, 13),
        ignore_eos=True,
        logprobs=2,
    )
    assert request.sampling(5, 7, 2) == expected
    # A parameter that is new in the engine fails here until somebody decides whether requests may set it.
    assert [own.name for own in fields(expected) if getattr(expected, own.name) == own.default] == []


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_a_request_that_says_nothing_samples_as_openai_does(kind: Any, body: dict[str, Any]) -> None:
    expected = SamplingParams(temperature=1.0, seed=7, max_new_tokens=5)
    for more in ({}, {"top_k": -1}, dict.fromkeys(SAMPLING)):
        assert parse(kind, json.dumps(body | more).encode(), **LIMITS).sampling(5, 7, None) == expected


def test_limits_and_log_probabilities_go_by_each_endpoints_own_names() -> None:
    chat = CHAT | {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 3}
    completion = COMPLETION | {"max_tokens": 6, "logprobs": 3}
    for request in (
        parse(ChatRequest, json.dumps(chat).encode(), **LIMITS),
        parse(CompletionRequest, json.dumps(completion).encode(), **LIMITS),
    ):
        assert (request.wanted_tokens, request.num_logprobs) == (6, 3)


@pytest.mark.parametrize(
    ("kind", "body", "param", "code", "words"),
    [
        (CompletionRequest, {"prompt": [[1]] * 5}, "prompt", None, "5 answers are asked for at once"),
        (CompletionRequest, {"prompt": ["a"] * 5}, "prompt", None, "this server takes 4"),
        (CompletionRequest, {"prompt": [1] * 60}, "prompt", "context_length_exceeded", "has 60 tokens"),
        (CompletionRequest, {"prompt": [[1], [1] * 60]}, "prompt", "context_length_exceeded", "may have 50"),
        (ChatRequest, {"messages": [{}] * 60}, "messages", "context_length_exceeded", "at least 60 tokens"),
        (ChatRequest, {"messages": [{"content": [1] * 30}] * 2}, "messages", None, "have 60 parts, and may have 50"),
    ],
)
def test_what_is_surely_too_much_is_refused_before_it_is_read(
    kind: Any, body: dict[str, Any], param: str, code: str | None, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(kind, json.dumps({"temperature": "its mistakes are not looked for"} | body).encode(), **LIMITS)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, CHAT | {"messages": "x"}, "messages"),
        (CompletionRequest, COMPLETION | {"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_what_is_no_list_is_refused_as_what_it_is(kind: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(body).encode(), **LIMITS)
    assert (caught.value.param, caught.value.code) == (
        next(name for name in ("messages", "prompt") if name in body),
        "invalid_value",
    )
