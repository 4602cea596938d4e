"""The HTTP API with the `openai` package as its client, in front of a service without Ray."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.serve.conftest import MODEL, RECITAL, Running

LENGTH = len(RECITAL.encode())
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "recite"}], "temperature": 0}


@pytest.fixture(scope="module")
def client(reciter: Running) -> OpenAI:
    return reciter.client()


def test_an_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, max_tokens=LENGTH)
    assert answer.choices[0].message.content == RECITAL
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == LENGTH


def test_a_streamed_answer(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(**ASK, max_tokens=LENGTH, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == RECITAL
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
