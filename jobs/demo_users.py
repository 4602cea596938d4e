"""Simulated users of a server: some at a time, each asking again when it has its answer; every request is counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from graft_dist.errors import GraftError
from graft_dist.prompts import Prompt
from jobs.load_client import Ask, LoadClient, Outcome, Reply
from jobs.serve_bench import find_model

_MOST = 4  # users
_PATIENCE_S = 120.0  # for a whole answer


@dataclass(frozen=True)
class Asked:
    """One request, and what became of it."""

    num_users: int  # that asked when it was sent
    outcome: Outcome
    version: str  # of the policy that decoded the end of the answer; "" where there was no registered one, or no answer
    total_s: float
    num_tokens: int
    num_rounds: int

    @property
    def is_answered(self) -> bool:
        """Whether the answer came whole."""
        return self.outcome == Outcome.ok


class Users:
    """Users on a thread of their own, from one on; a context manager.

    At its end they wait for their last answers; after an error nobody does.
    """

    def __init__(self, url: str, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        self.asked: list[Asked] = []
        self._url, self._prompts, self._max_new_tokens = url, prompts, max_new_tokens
        self._number, self._pause_s = 1, 0.0
        self._num_sent = 0
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="users", daemon=True)

    def be(self, number: int, pause_s: float = 0.0) -> None:
        """From now on so many ask, each waiting `pause_s` between an answer and its next question."""
        assert 1 <= number <= _MOST
        self._number, self._pause_s = number, pause_s

    def __enter__(self) -> Users:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        if kind is not None:
            return
        self._thread.join()
        if self._failure is not None:
            raise GraftError(f"the users ended early: {self._failure!r}")

    def _work(self) -> None:
        try:
            asyncio.run(self._ask_all())
        except BaseException as error:
            self._failure = error

    async def _ask_all(self) -> None:
        async with LoadClient(self._url, timeout_s=_PATIENCE_S) as client, asyncio.TaskGroup() as group:
            model = await find_model(client, None)
            for index in range(_MOST):
                group.create_task(self._ask(client, model, index))

    async def _ask(self, client: LoadClient, model: str, index: int) -> None:
        while not self._has_ended.is_set():
            if index >= self._number:
                await asyncio.sleep(0.1)
                continue
            number, prompt = self._number, self._prompts[self._num_sent % len(self._prompts)]
            self._num_sent += 1
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt.turns[-1]}],
                "max_tokens": self._max_new_tokens,
                "temperature": 0.0,
                "stream": self._num_sent % 2 == 0,
                "graft": {"metrics": True},
            }
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            self.asked.append(_asked(number, await client.ask(Ask("chat", body))))
            until = time.monotonic() + self._pause_s
            while time.monotonic() < until and self._pause_s > 0 and not self._has_ended.is_set():
                await asyncio.sleep(0.1)


def _asked(num_users: int, reply: Reply) -> Asked:
    version = reply.graft.get("policy_version")
    return Asked(
        num_users=num_users,
        outcome=reply.outcome,
        version="" if version is None else f"v{version}",
        total_s=reply.total_s,
        num_tokens=reply.num_tokens or 0,
        num_rounds=reply.graft.get("rounds") or 0,
    )
