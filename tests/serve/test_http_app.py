"""The HTTP API with the `openai` package as its client, in front of a service without Ray."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import ValidationError

from graft_dist.sampling import TokenLogprob
from graft_dist.target import Target
from serve import errors
from serve.answer import Answer, TokenTexts
from serve.completion import Completion
from serve.openai_api import CompletionRequest
from tests.serve.conftest import MODEL, RECITAL, Running, recite

LENGTH = len(RECITAL.encode())
MESSAGES: list[Any] = [{"role": "user", "content": "recite"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
CONTINUE: dict[str, Any] = {"model": MODEL, "prompt": "recite", "temperature": 0}


@pytest.fixture(scope="module")
def client(reciter: Running) -> OpenAI:
    return reciter.client()


def streamed(client: OpenAI, **fields: Any) -> tuple[str, list[Any]]:
    """(text, chunks) of a streamed chat."""
    chunks = list(client.chat.completions.create(**(ASK | fields), stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, chunks


# ---- answers


def test_an_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, max_tokens=LENGTH)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", RECITAL, "length")
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("graft-")
    assert answer.usage is not None and answer.usage.completion_tokens == LENGTH
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + LENGTH


def test_a_streamed_answer_has_the_shape_clients_expect(client: OpenAI) -> None:
    text, chunks = streamed(client, max_tokens=LENGTH)
    assert text == RECITAL
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_chunk_comes_last_and_only_when_asked_for(client: OpenAI) -> None:
    _, chunks = streamed(client, max_tokens=7, stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("method", ["plain", "ddtree"])
def test_streamed_text_is_the_whole_text_wherever_a_character_is_cut(client: OpenAI, method: str) -> None:
    body = {"graft": {"method": method}}
    for num_tokens in range(1, LENGTH + 8):
        whole = client.chat.completions.create(**ASK, max_tokens=num_tokens, extra_body=body).choices[0].message.content
        assert whole == recite(num_tokens)
        assert streamed(client, max_tokens=num_tokens, extra_body=body)[0] == whole


@pytest.mark.parametrize("stop", ["?", "é", "世👋", "👋", "Д\nSt", ["zz", "p? é"], "op", "Stop? é世👋Д\nStop"])
def test_nothing_after_a_stop_string_leaks(client: OpenAI, stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    expected = min((RECITAL * 3).split(one)[0] for one in stops if one in RECITAL * 3)
    body = {"graft": {"method": "ddtree"}}
    answer = client.chat.completions.create(**ASK, stop=stop, max_tokens=3 * LENGTH, logprobs=True, extra_body=body)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    # The token that completes the stop string is counted, and nothing after it.
    with_stop = expected + next(one for one in stops if (RECITAL * 3).startswith(expected + one))
    assert answer.usage.completion_tokens == len(with_stop.encode()) == len(choice.logprobs.content)
    text, chunks = streamed(client, stop=stop, max_tokens=3 * LENGTH, extra_body=body)
    assert text == expected and chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_that_never_comes_is_given_out_at_the_end(client: OpenAI) -> None:
    text, _ = streamed(client, stop="p! and more", max_tokens=4)
    assert text == "Stop"


def test_sampling_repeats_with_a_seed_whatever_the_method(client: OpenAI) -> None:
    def sample(seed: int | None, method: str) -> str:
        fields = ASK | {"temperature": 2.0, "max_tokens": 24, "seed": seed, "extra_body": {"graft": {"method": method}}}
        return client.chat.completions.create(**fields).choices[0].message.content or ""

    first = sample(7, "plain")
    assert sample(7, "plain") == first == sample(7, "ddtree")
    assert sample(8, "plain") != first
    assert sample(None, "plain") != sample(None, "plain")


def test_several_answers_are_different_and_repeat_with_a_seed(client: OpenAI) -> None:
    fields = ASK | {"temperature": 2.0, "max_tokens": 16, "seed": 3, "n": 3}
    answer = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens <= 48
    again: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**fields, stream=True):
        again[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(again.values()) == texts
    alone = client.chat.completions.create(**(fields | {"n": 1}))
    assert alone.choices[0].message.content == texts[0]


def test_penalties_filters_and_ignore_eos_reach_the_engine(client: OpenAI) -> None:
    fields = ASK | {"temperature": 1.0, "seed": 1, "top_p": 0.99, "presence_penalty": 2, "frequency_penalty": 2}
    body = {"top_k": 50, "min_p": 0.001, "repetition_penalty": 1.5, "ignore_eos": True, "stop_token_ids": []}
    penalised = client.chat.completions.create(**fields, max_tokens=30, extra_body=body)
    plain = client.chat.completions.create(**ASK, max_tokens=30)
    assert penalised.choices[0].message.content != plain.choices[0].message.content
    greedy = client.chat.completions.create(**(ASK | {"temperature": 1.0}), max_tokens=LENGTH, extra_body={"top_k": 1})
    assert greedy.choices[0].message.content == RECITAL


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, max_tokens=LENGTH, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == LENGTH
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or []) == RECITAL.encode()
    for entry in logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the likeliest was taken
    _, chunks = streamed(client, max_tokens=LENGTH, logprobs=True, top_logprobs=2)
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry.token for piece in pieces for entry in piece] == [entry.token for entry in logprobs.content]


# ---- completions


def test_a_completion_of_text_of_token_ids_and_of_several(client: OpenAI, reciter: Running) -> None:
    ids = reciter.service.target.tokenizer.encode("recite")
    text = client.completions.create(**CONTINUE, max_tokens=9)
    assert text.choices[0].text == recite(9) and text.object == "text_completion" and text.id.startswith("cmpl-")
    assert text.usage is not None and text.usage.prompt_tokens == len(ids)
    assert client.completions.create(**(CONTINUE | {"prompt": ids}), max_tokens=9).choices[0].text == recite(9)
    both = client.completions.create(**(CONTINUE | {"prompt": ["recite", "now"]}), max_tokens=5, n=2)
    assert [(choice.index, choice.text) for choice in both.choices] == [(index, recite(5)) for index in range(4)]
    lists = client.completions.create(**(CONTINUE | {"prompt": [ids, ids]}), max_tokens=5)
    assert [choice.text for choice in lists.choices] == [recite(5), recite(5)]
    assert lists.usage is not None and lists.usage.prompt_tokens == 2 * len(ids)


def test_a_completion_has_openais_default_length_and_streams(client: OpenAI) -> None:
    assert client.completions.create(**CONTINUE).choices[0].text == recite(16)
    chunks = list(client.completions.create(**CONTINUE, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == recite(16)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_echo(client: OpenAI) -> None:
    assert client.completions.create(**CONTINUE, max_tokens=5, echo=True).choices[0].text == "recite" + recite(5)
    chunks = list(client.completions.create(**CONTINUE, max_tokens=5, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "recite" + recite(5)


def test_an_echo_is_the_text_that_was_sent(client: OpenAI, reciting_target: Target) -> None:
    """Special tokens, which no answer shows, included."""
    assert reciting_target.tokenizer is not None
    prompts = [f"{reciting_target.tokenizer.eos_token}recite", "recite"]
    found = client.completions.create(**CONTINUE | {"prompt": prompts}, max_tokens=5, echo=True).choices
    assert [choice.text for choice in found] == [prompt + recite(5) for prompt in prompts]


def test_the_token_itself_is_among_its_alternatives(client: OpenAI) -> None:
    fields = CONTINUE | {"temperature": 2.0, "max_tokens": 40, "logprobs": 1}
    logprobs = client.completions.create(**fields, seed=3, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None and logprobs.tokens is not None
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True):
        assert top[token] >= value and len(top) <= 2  # two tokens may show as the same text
    assert max(len(top) for top in logprobs.top_logprobs) == 2  # one that was not the likeliest


def test_log_probabilities_of_a_completion(client: OpenAI) -> None:
    logprobs = client.completions.create(**CONTINUE, max_tokens=6, logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Stop? ") and logprobs.text_offset == list(range(6))
    assert [list(top) for top in logprobs.top_logprobs or []] == [[letter] for letter in "Stop? "]


def test_a_character_of_several_tokens_has_one_offset(reciting_target: Target) -> None:
    tokenizer = reciting_target.tokenizer
    ids = tokenizer.encode("a\N{SNOWMAN}b", add_special_tokens=False)
    assert len(ids) == 5  # a letter, the three bytes of a snowman, a letter
    answer = Answer(0, "completions", TokenTexts(tokenizer))
    entries = [TokenLogprob(token, -1.0, 1) for token in ids]
    shown = [answer.chunk("", part, None)["logprobs"] for part in (entries[:2], entries[2:])]
    assert [offset for part in shown for offset in part["text_offset"]] == [0, 1, 1, 1, 2]


def test_offsets_count_what_the_text_has(reciting_target: Target) -> None:
    tokenizer = reciting_target.tokenizer
    letter, begun, *_ = tokenizer.encode("a\N{SNOWMAN}", add_special_tokens=False)
    ids = [begun, letter, tokenizer.eos_token_id, letter]  # a character that never ends; a token that no text has
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\N{REPLACEMENT CHARACTER}aa"
    answer = Answer(0, "completions", TokenTexts(tokenizer))
    shown = answer.chunk("", [TokenLogprob(token, -1.0, 1) for token in ids], None)["logprobs"]
    assert shown["text_offset"] == [0, 1, 2, 2]


def test_an_impossible_token_has_a_number_that_json_has(reciting_target: Target) -> None:
    entry = TokenLogprob(65, -math.inf, 1, top=((66, 0.0), (67, -math.inf)))
    completion = Answer(0, "completions", TokenTexts(reciting_target.tokenizer)).chunk("", [entry], None)["logprobs"]
    assert completion["token_logprobs"] == [-9999.0]
    assert list(completion["top_logprobs"][0].values()) == [0.0, -9999.0, -9999.0]
    [chat] = Answer(0, "chat", TokenTexts(reciting_target.tokenizer)).chunk("", [entry], None)["logprobs"]["content"]
    assert chat["logprob"] == -9999.0
    assert [top["logprob"] for top in chat["top_logprobs"]] == [0.0, -9999.0]


def test_an_event_has_no_line_breaks_of_its_own(reciter: Running) -> None:
    prompt = "a\x85b\u2028c\u2029d"
    body = CONTINUE | {"prompt": prompt, "max_tokens": 3, "echo": True, "stream": True}
    request = urllib.request.Request(
        f"{reciter.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        raw = response.read().decode()
    lines = [line for line in raw.splitlines() if line]  # wherever Unicode breaks lines
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(pieces) == prompt + recite(3)


# ---- our extension


def test_metrics_count_what_rounds_did(client: OpenAI) -> None:
    body = {"graft": {"method": "ddtree", "metrics": True}}
    answer = client.chat.completions.create(**ASK, max_tokens=40, extra_body=body).model_dump()
    counts, ours = answer["metrics"]["speculative_decoding"], answer["metrics"]["graft"]
    rounds = counts["num_spec_steps"]
    assert ours["rounds"] == rounds > 0
    # The first token comes from the prompt's own pass; the last round may be cut.
    assert rounds * ours["acceptance_length"] == pytest.approx(39)
    assert counts["num_accepted_draft_tokens"] > 0 and ours["acceptance_length"] > 1.5
    assert counts["mean_acceptance_length"] == 1 + counts["num_accepted_draft_tokens"] / rounds
    assert sum(counts["acceptance_histogram"]) == rounds
    assert (
        sum(accepted * number for accepted, number in enumerate(counts["acceptance_histogram"]))
        == (counts["num_accepted_draft_tokens"])
    )
    by_length = counts["acceptance_histogram_by_draft_length"]
    assert sum(int(length) * sum(histogram) for length, histogram in by_length.items()) == counts["num_draft_tokens"]
    plain = client.chat.completions.create(**ASK, max_tokens=5, extra_body={"graft": {"metrics": True}}).model_dump()
    assert plain["metrics"]["graft"]["acceptance_length"] == 1 and plain["metrics"]["graft"]["mean_budget"] == 0
    assert client.chat.completions.create(**ASK, max_tokens=5).model_dump().get("metrics") is None


@pytest.mark.parametrize("usage", [False, True])
def test_metrics_of_a_stream_are_in_its_last_chunk(client: OpenAI, usage: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    _, chunks = streamed(client, max_tokens=9, extra_body={"graft": {"metrics": True}}, **more)
    assert [bool(chunk.model_dump().get("metrics")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_rounds_show_what_was_drafted(client: OpenAI) -> None:
    body = {"graft": {"method": "ddtree", "rounds": True}}
    text, chunks = streamed(client, max_tokens=40, extra_body=body)
    rounds = [one for chunk in chunks for one in (chunk.model_dump().get("graft") or {}).get("rounds", [])]
    assert [one["index"] for one in rounds] == list(range(len(rounds))) and text == recite(40)
    for one in rounds:
        tree = one["tree"]
        assert len(tree["parents"]) == len(tree["depths"]) == len(tree["texts"]) == one["budget"] + 1
        path = [tree["texts"][node] for node in tree["accepted"]]
        assert [token["text"] for token in one["tokens"]][: len(path)] == path
    assert sum(len(one["tokens"]) for one in rounds) == 39
    whole = client.chat.completions.create(**ASK, max_tokens=40, extra_body=body).choices[0].model_dump()
    assert len(whole["graft"]["rounds"]) == len(rounds)


@pytest.mark.parametrize("method", ["plain", "ddtree"])
def test_token_ids_are_those_of_the_text_streamed_or_not(client: OpenAI, reciter: Running, method: str) -> None:
    body = {"graft": {"method": method, "token_ids": True}}
    fields = {"max_tokens": 40, "n": 2, "stop": ["Д"], "extra_body": body}
    whole = [choice.model_dump() for choice in client.chat.completions.create(**ASK, **fields).choices]
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**ASK, **fields, stream=True):
        content = chunk.model_dump()
        ids[content["choices"][0]["index"]] += (content.get("graft") or {}).get("token_ids", [])
    assert ids == {index: choice["graft"]["token_ids"] for index, choice in enumerate(whole)}
    text = recite(40)
    expected = text[: text.index("Д") + 1]  # the token that completes the stop string is the last one
    assert [reciter.service.target.tokenizer.decode(own) for own in ids.values()] == [expected, expected]


# ---- what is refused

IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
CHAT_REFUSALS = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"nonsense": 1}, "nonsense", "unknown_parameter"),
    ({"graft": {"tree": True}}, "graft.tree", "unknown_parameter"),
    ({"graft": {"method": "graft"}}, "graft.method", None),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 100}, "n", None),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
    ({"stop": ["a"] * 9}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "invalid_value"),
    ({"seed": "7"}, "seed", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": IMAGE}, "messages[0].content[0]", "unsupported_parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", "unsupported_parameter"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": "recite"}, "messages", "invalid_value"),
    ({"messages": [1] * 100}, "messages[0]", "invalid_value"),
    ({"max_tokens": 10**4299}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 10**4299}, "max_completion_tokens", "invalid_value"),
    ({"top_k": 2**31}, "top_k", "invalid_value"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text",
     "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type",
     "missing_required_parameter"),
    ({"messages": [MESSAGES[0] | {"nonsense": 1}]}, "messages[0].nonsense", "unknown_parameter"),
    ({"messages": [MESSAGES[0] | {"annotations": [1]}]}, "messages[0].annotations", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "detail": "low"}]}]},
     "messages[0].content[0].detail", "unknown_parameter"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
    ({"model": None}, "model", "missing_required_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "code"), CHAT_REFUSALS, ids=lambda value: str(value)[:40])
def test_a_request_is_refused_by_the_fields_name(reciter: Running, change: Any, param: str, code: str | None) -> None:
    status, body, headers = post(reciter, "/v1/chat/completions", ASK | change)
    error = body["error"]
    assert status == 400 and error["type"] == "invalid_request_error" and headers["x-should-retry"] == "false"
    assert (error["param"], error["code"]) == (param, code) and param.split(".")[-1] in error["message"]


HALF = {"\ud800": 1}  # half a character, which JSON can name and UTF-8 cannot say
HALF_NAMES = [
    (HALF, "\\ud800"),
    ({"graft": HALF}, "graft.\\ud800"),
    ({"stream": True, "stream_options": HALF}, "stream_options.\\ud800"),
    ({"messages": [MESSAGES[0] | HALF]}, "messages[0].\\ud800"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"} | HALF]}]},
     "messages[0].content[0].\\ud800"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), HALF_NAMES, ids=lambda value: ascii(value)[:40])
def test_a_field_named_by_half_a_character_is_refused_like_any_other(reciter: Running, change: Any, param: str) -> None:
    status, body, _ = post(reciter, "/v1/chat/completions", ASK | change)
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, param, "unknown_parameter")
    assert error["message"] == f"unknown field {param}"


COMPLETION_REFUSALS = [
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [1, 99999]}, "prompt"),
    ({"prompt": [[1], [-1]], "echo": True}, "prompt"),
    ({"prompt": [1, 10**4299]}, "prompt"),
    ({"prompt": [[1]] * 100}, "prompt"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": MESSAGES}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), COMPLETION_REFUSALS, ids=lambda value: str(value)[:40])
def test_a_completion_is_refused_by_the_fields_name(reciter: Running, change: Any, param: str) -> None:
    status, body, _ = post(reciter, "/v1/completions", CONTINUE | change)
    assert (status, body["error"]["param"]) == (400, param)


def test_the_first_token_id_outside_the_vocabulary_is_named(reciter: Running) -> None:
    size = reciter.service.target.vocab_size
    for token in (-1, size, 10**30):
        for prompt in ([5, token], [[5], [size - 1, token, -7]]):
            _, body, _ = post(reciter, "/v1/completions", CONTINUE | {"prompt": prompt})
            assert body["error"]["message"] == f"token id {token} is outside the vocabulary of {size}"
    assert post(reciter, "/v1/completions", CONTINUE | {"prompt": [0, size - 1], "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [True] * 1000}, {"prompt": [["x"] * 1000] * 9}, {"stop": [1] * 1000}, {"stop_token_ids": ["x"] * 1000}],
    ids=lambda fields: next(iter(fields)),
)
def test_the_first_mistake_of_a_kind_is_the_last_that_is_looked_for(fields: dict[str, Any]) -> None:
    """Describing a million of them would keep everybody's streams waiting."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(json.dumps(CONTINUE | fields))
    assert caught.value.error_count() < 10


def test_an_answer_can_be_sent_back_as_the_client_got_it(client: OpenAI) -> None:
    first = client.chat.completions.create(**ASK, max_tokens=3).choices[0].message
    messages: list[Any] = [*MESSAGES, first.model_dump(), {"role": "user", "content": "recite", "name": None}]
    assert client.chat.completions.create(**(ASK | {"messages": messages}), max_tokens=3).choices[0].message.content


def test_values_that_ask_for_nothing_special_are_accepted(reciter: Running) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "store": False,
    }
    absent = {"stop": None, "seed": None, "user": "somebody", "reasoning_effort": None, "max_tokens": 3}
    absent |= {"graft": {"method": None}}
    assert post(reciter, "/v1/chat/completions", ASK | neutral | absent)[0] == 200


@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"prompt": "x " * 300}, "prompt", ["256"]),
        ({"prompt": "recite", "max_tokens": 255}, "max_tokens", ["256", "255"]),
    ],
)
def test_what_is_too_long_is_refused_with_both_numbers(
    reciter: Running, fields: Any, param: str, numbers: list[str]
) -> None:
    status, body, _ = post(reciter, "/v1/completions", CONTINUE | fields)
    error = body["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    tokens = len(reciter.service.target.tokenizer.encode(fields["prompt"]))
    assert all(number in error["message"] for number in [*numbers, str(tokens)])


@pytest.mark.parametrize(("path", "param"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_a_text_that_is_surely_too_long_is_refused_before_it_is_tokenized(
    reciter: Running, path: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reciter.service._tokenizer, "encode", None)
    text = "x " * 10_000
    fields = (
        CONTINUE | {"prompt": text} if param == "prompt" else ASK | {"messages": [{"role": "user", "content": text}]}
    )
    status, body, _ = post(reciter, path, fields)
    error = body["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "at least " in error["message"] and "may have 256" in error["message"]


def test_too_many_token_ids_are_refused_before_they_are_decoded(
    reciter: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reciter.service, "decode_text", None)
    status, body, _ = post(reciter, "/v1/completions", CONTINUE | {"prompt": [5] * 300, "echo": True})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "has 300 tokens" in body["error"]["message"] and "may have 256" in body["error"]["message"]


def test_a_conversation_has_the_templates_own_tokens(reciter: Running) -> None:
    messages = [{"role": "user", "content": "recite <|im_end|> é\n"}, {"role": "assistant", "content": " so "}]
    ids = reciter.service.target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asyncio.run(reciter.service.render(messages)) == list(ids)


def test_too_many_prompts_are_refused_before_they_are_tokenized(
    reciter: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reciter.service, "encode", None)
    for prompts, n, param in ((9, 1, "prompt"), (9, 2, "prompt"), (8, 2, "n"), (1, 9, "n")):
        status, body, _ = post(reciter, "/v1/completions", CONTINUE | {"prompt": ["a"] * prompts, "n": n})
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["message"].startswith(f"{prompts * n} answers are asked for at once")


def test_a_full_server_refuses_before_it_tokenizes(reciter: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reciter.service, "encode", None)
    monkeypatch.setattr(reciter.service.decode, "_num_sequences", 8)
    status, body, headers = post(reciter, "/v1/completions", CONTINUE)
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, "server_busy", "1")


def test_an_answer_without_a_limit_ends_at_the_context(client: OpenAI, reciter: Running) -> None:
    answer = client.chat.completions.create(**ASK)
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert answer.usage.total_tokens == reciter.service.max_length


def test_another_model_and_unknown_paths(client: OpenAI, reciter: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**(ASK | {"model": "other"}))
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    status, body, _ = get(reciter, "/v1/nowhere")
    assert status == 404 and body["error"]["type"] == "invalid_request_error"
    assert get(reciter, "/v1/chat/completions")[0] == 405


def test_a_body_that_is_no_json_or_too_large(serve_reciter: Callable[..., Running], reciter: Running) -> None:
    assert post(reciter, "/v1/chat/completions", b"{broken")[0] == 400
    assert post(reciter, "/v1/chat/completions", b"[1]")[0] == 400
    status, body, _ = post(reciter, "/v1/chat/completions", b'{"model": "\\ud800"}')
    assert status == 400 and body["error"]["param"] is None and "JSON" in body["error"]["message"]
    status, body, _ = post(reciter, "/v1/chat/completions", b"x" * 4_000_001)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert body["error"]["message"] == "the body has 4000001 bytes, and may have 4000000"
    assert errors.body_too_large(4_065_536, None, 4_000_000).message.startswith("the body has at least 4065536 bytes")


# ---- operations


def test_models_health_and_version(client: OpenAI, reciter: Running) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "graft-dist"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")
    status, health, _ = get(reciter, "/healthz")
    assert status == 200 and health["status"] == "ok" and health["limit"] == 8
    assert get(reciter, "/readyz")[:2] == (200, {"status": "ok"})
    assert get(reciter, "/version")[1]["system_fingerprint"] == health["system_fingerprint"]


def test_a_replica_that_ends_sends_requests_elsewhere(serve_reciter: Callable[..., Running]) -> None:
    running = serve_reciter(retry_after_s=3)
    try:
        assert get(running, "/readyz")[0] == 200
        running.service.decode.stop()
        for path, fields in (("/v1/chat/completions", ASK), ("/v1/completions", CONTINUE | {"stream": True})):
            status, body, headers = post(running, path, fields)
            assert (status, body["error"]["code"], headers["retry-after"]) == (503, "draining", "3")
            assert headers["x-should-retry"] is None  # for clients would not come back then
        assert get(running, "/readyz")[0] == get(running, "/healthz")[0] == 503
        assert [(report.outcome, report.status) for report in running.reports.requests] == [("draining", 503)] * 2
    finally:
        running.close()


def test_every_request_is_reported_once(client: OpenAI, reciter: Running) -> None:
    before = len(reciter.reports.requests)
    client.chat.completions.create(**ASK, max_tokens=6, extra_headers={"X-Request-ID": "mine-1"})
    post(reciter, "/v1/completions", CONTINUE | {"nonsense": 1})
    done, refused = reciter.reports.requests[before:]
    assert (done.request_id, done.endpoint, done.outcome, done.status) == ("mine-1", "chat", "ok", 200)
    assert done.num_output_tokens == 6 and done.first_token_s is not None and done.num_prompt_tokens > 0
    assert (refused.endpoint, refused.outcome, refused.status) == ("completions", "refused", 400)


def test_a_stream_that_fails_says_so_and_counts_as_an_error(
    client: OpenAI, reciter: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(completion: Completion, streamed: Any) -> list[str]:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(Completion, "_chunks", failing)
    with pytest.raises(openai.APIError, match="failed to decode"):
        streamed(client, max_tokens=6)
    assert (reciter.reports.requests[-1].outcome, reciter.reports.requests[-1].status) == ("error", 500)


def test_a_client_that_leaves_in_the_middle_of_its_stream_is_counted(client: OpenAI, reciter: Running) -> None:
    before = len(reciter.reports.requests)
    plain = {"graft": {"method": "plain"}}
    stream = client.chat.completions.create(**ASK, max_tokens=200, stream=True, extra_body=plain)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    decode = reciter.service.decode
    while (len(reciter.reports.requests) == before or decode.num_sequences > 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    (report,) = reciter.reports.requests[before:]
    assert report.outcome == "cancelled" and 0 < report.num_output_tokens < 200
    assert decode.num_sequences == 0


def test_the_time_between_tokens_is_that_of_each_answer(client: OpenAI, reciter: Running) -> None:
    """Two answers whose pieces come at the same moments: gaps are between an answer's own pieces."""
    client.chat.completions.create(**ASK, max_tokens=12, n=2, extra_body={"graft": {"method": "plain"}})
    report = reciter.reports.requests[-1]
    assert len(report.token_gaps_s) == 2 * 11  # and none from one answer to the other


def test_a_client_that_leaves_before_its_body_is_sent_is_no_error_of_ours(reciter: Running) -> None:
    before = len(reciter.reports.requests)
    host, port = reciter.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b'{"model"')
    deadline = time.monotonic() + 30
    while len(reciter.reports.requests) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [report.outcome for report in reciter.reports.requests[before:]] == ["cancelled"]


def test_a_body_that_never_ends_holds_its_place_no_longer_than_a_request_may(
    serve_reciter: Callable[..., Running],
) -> None:
    running = serve_reciter(max_request_s=0.2)
    try:
        host, port = running.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head.encode() + b'{"model"')
            assert connection.recv(4096).startswith(b"HTTP/1.1 504 ")
        assert [report.outcome for report in running.reports.requests] == ["timeout"]
    finally:
        running.close()


def test_the_log_has_a_line_of_json_per_request_and_no_texts(
    client: OpenAI, serve_reciter: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("ray.serve")
    headers = {"X-Request-ID": "logged-1"}
    talkative = serve_reciter(log_prompts=True)
    # On the logger itself: Ray Serve, once set up in a process, lets nothing through to the root.
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "ray.serve"):
            client.chat.completions.create(**ASK, max_tokens=5, extra_headers=headers)
            talkative.client().chat.completions.create(**ASK, max_tokens=5, extra_headers=headers)
            own = ASK | {"extra_body": {"graft": {"method": "plain"}}}
            client.chat.completions.create(**own, max_tokens=5, extra_headers={"X-Request-ID": "not an id"})
    finally:
        logger.removeHandler(caplog.handler)
        talkative.close()
    messages = list(dict.fromkeys(record.message for record in caplog.records))  # pytest may have listened, too
    quiet, loud = (json.loads(message) for message in messages if "logged-1" in message)
    assert (quiet["request_id"], quiet["outcome"], quiet["output_tokens"]) == ("logged-1", "ok", 5)
    assert "answers" not in quiet and "prompt_token_ids" not in quiet
    assert loud["answers"] == ["Stop?"] and loud["method"] is None
    (given,) = (json.loads(message) for message in messages if "not an id" in message)
    drawn = [message for message in messages if given["request_id"] in message]
    assert json.loads(drawn[-1])["method"] == "plain" and len(drawn) == 2


def test_keys(serve_reciter: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst-key\nsecond-key  # of somebody\nfourth#key\n")
    running = serve_reciter(api_keys_file=str(tmp_path / "keys"))
    try:
        assert running.client(api_key="second-key").chat.completions.create(**ASK, max_tokens=3)
        assert running.client(api_key="fourth#key").chat.completions.create(**ASK, max_tokens=3)
        for wrong in ("third-key", "first-ke", "ours", "fourth"):
            with pytest.raises(openai.AuthenticationError) as caught:
                running.client(api_key=wrong).chat.completions.create(**ASK, max_tokens=3)
            assert caught.value.code == "invalid_api_key" and wrong not in caught.value.message
        with pytest.raises(openai.AuthenticationError):
            running.client(api_key="third-key").models.list()
        assert get(running, "/healthz")[0] == 200 and get(running, "/v1/models")[0] == 401
        assert {report.outcome for report in running.reports.requests} == {"ok", "unauthorized"}
    finally:
        running.close()


def get(running: Running, path: str) -> tuple[int, Any, Any]:
    return send(urllib.request.Request(running.url + path))


def post(running: Running, path: str, content: Any) -> tuple[int, Any, Any]:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return send(urllib.request.Request(running.url + path, data, {"Content-Type": "application/json"}))


def send(request: urllib.request.Request) -> tuple[int, Any, Any]:
    """(status, body, headers) of a response, whatever its status."""
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers
