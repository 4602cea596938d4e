"""A real HTTP server on a thread that answers as a test's handler says: well, badly, or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

Handler = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
"""Gets path, JSON body and where to write the answer; the connection is closed afterwards."""


class ScriptedServer:
    """Reads requests and hands them to `handler`; remembers paths and headers, and how many it served at once."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.num_open = self.most_open = 0
        self.paths: list[str] = []
        self.headers: list[str] = []
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.paths.append(path)
            self.headers.append(head.lower())
            lines = head.lower().splitlines()
            length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                await self.handler(path, body, writer)
            finally:
                self.num_open -= 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left, or the test is over
        finally:
            writer.close()


@contextmanager
def serving(handler: Handler) -> Iterator[ScriptedServer]:
    """A server on a thread of its own, as long as the context lasts."""
    server, started = ScriptedServer(handler), Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def run() -> None:
        listening, is_over = await server.start(), asyncio.Event()
        started.set_result((asyncio.get_running_loop(), is_over))
        await is_over.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    loop, is_over = started.result(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()


def head(status: str = "200 OK", kind: str = "text/event-stream", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n{extra}\r\n".encode()


def json_answer(content: Any, status: str = "200 OK", extra: str = "") -> bytes:
    return head(status, "application/json", extra) + json.dumps(content).encode()


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def piece(text: str, index: int = 0, reason: str | None = None) -> bytes:
    return event(choices=[{"index": index, "delta": {"content": text}, "finish_reason": reason}])
