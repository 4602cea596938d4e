"""The load client against a real HTTP server that behaves, breaks off, refuses, hangs and lies as it is told."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from graft_dist.errors import GraftError
from jobs.load_client import Ask, LoadClient, Outcome, Reply
from jobs.serve_bench import closed_loop, find_model, open_loop
from tests.jobs.scripted_server import Handler, event, head, json_answer, piece, serving

STREAM = [
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
    piece("Hel"),
    piece("lo, "),
    piece("wörld"),
    event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    event(choices=[], usage={"completion_tokens": 5}, metrics={"graft": {"rounds": 2, "mean_budget": 6.0}}),
    b"data: [DONE]\n\n",
]


def scripted(*parts: bytes, pause_s: float = 0.0) -> Handler:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for part in parts:
            await asyncio.sleep(pause_s)
            writer.write(part)
            await writer.drain()

    return handler


def ask(handler: Handler, wanted: Ask, **options: Any) -> Reply:
    async def run(url: str) -> Reply:
        async with LoadClient(url, **options) as client:
            return await client.ask(wanted)

    with serving(handler) as server:
        return asyncio.run(run(server.url))


CHAT = Ask("chat", {"stream": True})


def test_a_streamed_answer() -> None:
    reply = ask(scripted(head(), *STREAM, pause_s=0.01), CHAT)
    assert reply.outcome == Outcome.ok
    assert reply.texts == ("Hello, wörld",) and reply.finish_reasons == ("stop",)
    assert reply.num_tokens == 5 and reply.graft == {"rounds": 2, "mean_budget": 6.0}
    assert len(reply.gaps_s) == 2  # pieces of text, not events
    assert reply.ttft_s is not None and reply.ttft_s + sum(reply.gaps_s) <= reply.total_s


def test_unicodes_line_breaks_end_no_event() -> None:
    text = "a\x85b\u2028c\u2029d"
    raw = event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]).replace(
        json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode()
    )
    assert "\u2028".encode() in raw  # as it is, not escaped
    reply = ask(scripted(head(), raw[:40], raw[40:], b"data: [DONE]", pause_s=0.01), CHAT)
    assert (reply.outcome, reply.texts) == (Outcome.ok, (text,))


def test_choices_are_kept_apart() -> None:
    parts = [piece("a", 0), piece("x", 1), piece("b", 0, "stop"), piece("y", 1, "length"), b"data: [DONE]\n\n"]
    reply = ask(scripted(head(), *parts), CHAT)
    assert (reply.outcome, reply.texts, reply.finish_reasons) == (Outcome.ok, ("ab", "xy"), ("stop", "length"))


def test_an_answer_at_once() -> None:
    body = json.dumps(
        {"choices": [{"index": 0, "text": "Hi", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    )
    reply = ask(scripted(head(kind="application/json"), body.encode()), Ask("text", {}))
    assert (reply.outcome, reply.texts, reply.num_tokens, reply.gaps_s) == (Outcome.ok, ("Hi",), 1, ())


@pytest.mark.parametrize(
    ("parts", "outcome", "detail"),
    [
        ([head(), *STREAM[:3]], Outcome.cut, "without [DONE]"),
        ([head(), *STREAM[:3], b"data: [DONE]\n\n"], Outcome.cut, None),  # no reason to end
        ([head(), *STREAM[:3], event(error={"message": "out of luck"})], Outcome.failed, "out of luck"),
        ([head(), b"data: {broken\n\n"], Outcome.failed, "no JSON object"),
        ([head(), b"data: [1]\n\n"], Outcome.failed, "no JSON object"),
        ([head(), *STREAM[:3], b'data: {"choices": [7]}\n\n'], Outcome.failed, "AttributeError: "),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\ndata: "], Outcome.unreachable, "ProtocolError"),
        ([head("400 No", "application/json"), b'{"error": {"message": "no arm"}}'], Outcome.refused, "400: no arm"),
        ([head("500 Oh", "text/plain"), b"<html>\n sorry"], Outcome.refused, "HTTP 500: <html> sorry"),
        ([head("429 Busy", "text/plain", "Retry-After: 3\r\n"), b'{"error": "full"}'], Outcome.rejected, "full"),
        ([head("503 Draining", "text/plain"), b"going"], Outcome.rejected, "HTTP 503: going"),
        ([], Outcome.unreachable, "Error"),
    ],
)  # fmt: skip
def test_what_is_no_whole_answer_is_none(parts: list[bytes], outcome: Outcome, detail: str | None) -> None:
    reply = ask(scripted(*parts), CHAT)
    assert reply.outcome == outcome
    assert (reply.detail is None) if detail is None else (detail in str(reply.detail))
    assert reply.retry_after_s == (3.0 if "429" in str(reply.detail) else None)


def test_patience_ends_and_a_client_may_leave() -> None:
    async def hang(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(head() + STREAM[1])
        await asyncio.sleep(600)

    def until_it_has_text(ask_for: Callable[[float], Reply]) -> Reply:
        """Be patient for ever longer: on a busy machine even the first piece takes its time."""
        return next(reply for reply in map(ask_for, (0.2, 2.0, 20.0, 60.0)) if reply.texts)

    reply = until_it_has_text(lambda patience_s: ask(hang, CHAT, timeout_s=patience_s))
    assert (reply.outcome, reply.texts) == (Outcome.timeout, ("Hel",))
    left = until_it_has_text(lambda patience_s: ask(hang, Ask("chat", {"stream": True}, leave_after_s=patience_s)))
    assert (left.outcome, left.texts) == (Outcome.left, ("Hel",))


def test_a_closed_loop_has_so_many_users_and_an_open_one_keeps_its_moments() -> None:
    due = [0.0, 0.01, 0.02, 0.3]

    async def run(url: str) -> tuple[list[Reply], list[Reply], float]:
        async with LoadClient(url, "key") as client:
            closed = await closed_loop(client, [CHAT] * 7, 3)
            start = time.perf_counter()
            return closed, await open_loop(client, [CHAT] * 4, due), start

    with serving(scripted(head(), *STREAM, pause_s=0.01)) as server:
        closed, opened, start = asyncio.run(run(server.url))
    assert {reply.outcome for reply in (*closed, *opened)} == {Outcome.ok} and len(closed) == 7
    assert 1 < server.most_open <= 4
    assert all(reply.sent_s - start >= moment for reply, moment in zip(opened, due, strict=True))
    assert set(server.paths) == {"/v1/chat/completions"}
    assert all("authorization: bearer key" in each for each in server.headers)


def test_a_closed_loop_never_has_more_requests_under_way_than_users() -> None:
    class Counting:
        num_open = most_open = 0

        async def ask(self, ask: Ask) -> Reply:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            await asyncio.sleep(0)
            self.num_open -= 1
            return Reply(Outcome.ok, 0.0, 0.0, texts=(str(ask.body["n"]),))

    counting = Counting()
    asks = [Ask("chat", {"n": number}) for number in range(20)]
    replies = asyncio.run(closed_loop(counting, asks, 3))  # type: ignore[arg-type]
    assert counting.most_open == 3
    assert [reply.texts for reply in replies] == [(str(number),) for number in range(20)]


def test_the_servers_only_model_is_taken_and_others_are_refused() -> None:
    async def listing(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({"data": [{"id": "one"}, {"id": "two"}]}))

    async def find(url: str, wanted: str | None) -> str:
        async with LoadClient(url) as client:
            return await find_model(client, wanted)

    with serving(listing) as server:
        assert asyncio.run(find(server.url, "two")) == "two"
        with pytest.raises(GraftError, match="no model 'three', it has one, two"):
            asyncio.run(find(server.url, "three"))
        with pytest.raises(GraftError, match="has 2 models"):
            asyncio.run(find(server.url, None))
    with pytest.raises(GraftError, match="no server answers"):
        asyncio.run(find(server.url, None))
