"""LoadClient: asks an OpenAI-compatible server as a user would and takes the times a user sees.

Every request comes back as a `Reply`, whatever became of it: load tests count outcomes, they do not raise. Nothing is
retried here. Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any

import httpx2

from graft_dist.errors import GraftError

PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
_DONE = "[DONE]"


class Outcome(StrEnum):
    """What became of a request."""

    ok = "ok"  # a whole answer with a reason to end
    left = "left"  # this client closed the connection on purpose
    rejected = "rejected"  # the server is full or draining, and said so (429 or 503)
    refused = "refused"  # another HTTP error: `Reply.detail` has the server's words
    failed = "failed"  # the server reported an error after it had begun to answer
    cut = "cut"  # the answer ended without its end
    timeout = "timeout"  # no whole answer within the client's patience
    unreachable = "unreachable"  # no connection, or it broke before the answer began


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: str  # "chat" or "text": see PATHS
    body: dict[str, Any]
    leave_after_s: float | None = None  # close the connection after so long

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True)
class Reply:
    """What came back. Texts and finish reasons are by choice; times count from the `since` that `ask` was given."""

    outcome: Outcome
    sent_s: float  # when the request was sent
    total_s: float
    ttft_s: float | None = None  # time to the first text; without streaming, to the answer
    gaps_s: tuple[float, ...] = ()  # between one piece of text and the next; a piece may hold several tokens
    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str | None, ...] = ()
    num_tokens: int | None = None  # as the server counted them
    token_ids: tuple[tuple[int, ...], ...] = ()  # by choice, if asked for
    graft: dict[str, Any] = field(default_factory=dict)  # the server's `metrics.graft`, if asked for
    detail: str | None = None
    retry_after_s: float | None = None


class LoadClient:
    """Connections to one server. Use as `async with LoadClient(url) as client`.

    Args:
        url: such as "http://127.0.0.1:8000".
        api_key: sent as a bearer token.
        timeout_s: patience for a whole answer.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self.url = url
        self.timeout_s = timeout_s
        # trust_env=False: a proxy of the environment must not stand between the clock and the server.
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=None, limits=unlimited, trust_env=False)

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """The JSON at a path; None where the server has none.

        Raises `GraftError` if the server cannot be reached or refuses the key.
        """
        try:
            response = await self._http.get(path, timeout=30.0)
        except httpx2.HTTPError as error:
            raise GraftError(f"no server answers at {self.url} ({type(error).__name__}): is it running?") from error
        if response.status_code in (401, 403):
            raise GraftError(f"the server at {self.url} refuses the key: {_error_message(response.text)}")
        try:
            return response.json() if response.is_success else None
        except ValueError:
            return None

    async def ask(self, ask: Ask, since: float | None = None) -> Reply:
        """Send one request and wait for what becomes of it; times count from `since` (default: now)."""
        sent = time.perf_counter()
        answer = _Answer(sent if since is None else since, sent)
        patience = self.timeout_s if ask.leave_after_s is None else min(ask.leave_after_s, self.timeout_s)
        try:
            async with asyncio.timeout(patience):
                async with self._http.stream("POST", PATHS[ask.kind], json=ask.body) as response:
                    return await self._read(ask, response, answer)
        except TimeoutError:
            return answer.reply(Outcome.timeout if patience == self.timeout_s else Outcome.left)
        except httpx2.HTTPError as error:
            outcome = Outcome.unreachable if answer.first is None else Outcome.cut
            return answer.reply(outcome, detail=f"{type(error).__name__}: {error}")
        except Exception as error:  # an answer of a shape that nobody thought of: this request's end, not the run's
            return answer.reply(Outcome.failed, detail=f"{type(error).__name__}: {error}")

    async def _read(self, ask: Ask, response: httpx2.Response, answer: _Answer) -> Reply:
        if not response.is_success:
            text = (await response.aread()).decode("utf-8", "replace")
            is_full = response.status_code in (429, 503)
            return answer.reply(
                Outcome.rejected if is_full else Outcome.refused,
                detail=f"HTTP {response.status_code}: {_error_message(text)}",
                retry_after_s=_seconds(response.headers.get("retry-after")),
            )
        if not ask.is_streamed:
            return answer.take_whole((await response.aread()).decode("utf-8", "replace"))
        reply: Reply | None = None
        # Read past the end too: closing the connection before the server has would look like leaving.
        async for data in _events(response):
            if reply is None and data == _DONE:
                reply = answer.reply(Outcome.ok if answer.is_whole else Outcome.cut)
            elif reply is None:
                error = answer.take_chunk(data)
                reply = None if error is None else answer.reply(Outcome.failed, detail=error)
        return reply or answer.reply(Outcome.cut, detail="the stream ended without [DONE]")


class _Answer:
    """An answer while it arrives."""

    def __init__(self, since: float, sent: float) -> None:
        self.since, self.sent = since, sent
        self.first: float | None = None  # when the first text came
        self.last = 0.0
        self.gaps: list[float] = []
        self.texts: dict[int, list[str]] = {}
        self.reasons: dict[int, str | None] = {}
        self.num_tokens: int | None = None
        self.token_ids: dict[int, list[int]] = {}
        self.graft: dict[str, Any] = {}

    @property
    def is_whole(self) -> bool:
        return bool(self.texts) and all(self.reasons.get(index) is not None for index in self.texts)

    def take_chunk(self, data: str) -> str | None:
        """Take one event of a stream; returns the server's error if it is one."""
        chunk = _object(data)
        if chunk is None:
            return f"an event is no JSON object: {data[:80]!r}"
        if chunk.get("error"):
            return _error_message(data)
        self._take_totals(chunk)
        for choice in chunk.get("choices", ()):
            index = choice.get("index", 0)
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content")
            self.texts.setdefault(index, [])
            self._take_ids(index, chunk)  # a chunk with details has one choice
            if text:
                self._mark(time.perf_counter())
                self.texts[index].append(text)
            if choice.get("finish_reason") is not None:
                self.reasons[index] = choice["finish_reason"]
        return None

    def take_whole(self, body: str) -> Reply:
        """Take an answer that was not streamed."""
        answer = _object(body)
        if answer is None:
            return self.reply(Outcome.cut, detail="the answer is no whole JSON object")
        if answer.get("error"):
            return self.reply(Outcome.failed, detail=_error_message(body))
        self._take_totals(answer)
        self._mark(time.perf_counter())
        for choice in answer.get("choices", ()):
            message = choice.get("message")
            text = choice.get("text") if message is None else message.get("content")
            self.texts[choice.get("index", 0)] = [text or ""]
            self.reasons[choice.get("index", 0)] = choice.get("finish_reason")
            self._take_ids(choice.get("index", 0), choice)
        return self.reply(Outcome.ok if self.is_whole else Outcome.cut)

    def _take_ids(self, index: int, holder: dict[str, Any]) -> None:
        ids = (holder.get("graft") or {}).get("token_ids")
        if ids is not None:
            self.token_ids.setdefault(index, []).extend(ids)

    def _take_totals(self, chunk: dict[str, Any]) -> None:
        if chunk.get("usage"):
            self.num_tokens = chunk["usage"].get("completion_tokens")
        metrics = chunk.get("metrics") or {}
        self.graft = metrics.get("graft") or self.graft

    def _mark(self, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def reply(self, outcome: Outcome, detail: str | None = None, retry_after_s: float | None = None) -> Reply:
        order = sorted(self.texts)
        return Reply(
            outcome=outcome,
            sent_s=self.sent,
            total_s=time.perf_counter() - self.since,
            ttft_s=None if self.first is None else self.first - self.since,
            gaps_s=tuple(self.gaps),
            texts=tuple("".join(self.texts[index]) for index in order),
            finish_reasons=tuple(self.reasons.get(index) for index in order),
            num_tokens=self.num_tokens,
            token_ids=tuple(tuple(self.token_ids[index]) for index in sorted(self.token_ids)),
            graft=self.graft,
            detail=detail,
            retry_after_s=retry_after_s,
        )


async def _events(response: httpx2.Response) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    rest = b""
    async for part in response.aiter_bytes():  # not `aiter_lines`, which splits at whatever Unicode takes for a break
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield _data(line)
    if rest.startswith(b"data:"):
        yield _data(rest)


def _data(line: bytes) -> str:
    return line[5:].strip().decode("utf-8", "replace")


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _error_message(body: str) -> str:
    """The sentence of an OpenAI error body, or the beginning of whatever it is, on one line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body
    return " ".join(text.split())[:300]


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # HTTP also allows a date
        return None
