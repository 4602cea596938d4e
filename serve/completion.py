"""`Completion`: one request to a completion endpoint, from its body to the last byte of its answer.

Submits the request's sequences, follows their events, makes JSON or server-sent events of them, and leaves nothing
behind however it ends: whoever holds one calls `close`, which takes its sequences out of the batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from graft_dist.counter_random import choice_seed
from serve import errors
from serve.answer import Answer, Endpoint
from serve.decode_thread import RequestStream, Streamed
from serve.errors import ApiError
from serve.observer import Outcome, RequestReport, Submission
from serve.openai_api import ChatRequest, CompletionRequest
from serve.round_view import RoundViewer
from serve.serve_args import Method
from serve.service import Service, new_seed

CLIENT_LEFT = 499
"""The status under which a request is counted whose client has left."""

_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
"""What Unicode knows as line breaks beside those that JSON escapes anyway; some clients split streams at them."""

logger = logging.getLogger("ray.serve")


class Completion:
    """One request. Made when it arrives; `start`, then either `whole` or `events`; `close` in any case."""

    def __init__(self, service: Service, endpoint: Endpoint, request_id: str) -> None:
        self.request_id = request_id
        self.is_streamed = False
        self._service = service
        self._endpoint: Endpoint = endpoint
        self._arrived = time.monotonic()
        self._created = int(time.time())
        self._id = ("chatcmpl-" if endpoint == "chat" else "cmpl-") + uuid.uuid4().hex
        self._request: ChatRequest | CompletionRequest
        self._method: Method | None = None  # that the request chose
        self._prompts: list[list[int]] = []
        self._answers: list[Answer] = []
        self._viewers: list[RoundViewer] = []
        self._stream: RequestStream | None = None
        self._policy = service.decode.active
        self._last_token: dict[int, float] = {}  # when each answer had its last event with tokens
        self._first_token_s: float | None = None
        self._gaps_s: list[float] = []
        self._is_closed = False

    # ---- beginning

    async def start(self, request: ChatRequest | CompletionRequest) -> None:
        """Check the request and queue its sequences. Raises `ApiError`."""
        self._request = request
        self._method = request.graft.method
        self.is_streamed = request.stream
        if request.model != self._service.model:
            raise errors.unknown_model(request.model, self._service.model)
        if self._method is not None and self._method not in self._service.decode.active.methods:
            allowed = ", ".join(self._service.decode.active.methods) or "none"
            raise errors.bad_request(
                f"method {self._method!r} cannot be chosen here; allowed: {allowed}", "graft.method"
            )
        num_prompts = 1 if isinstance(request, ChatRequest) else len(request.prompts)
        # Before prompts are tokenized, which others wait for too.
        errors.check_num_answers(num_prompts, request.n, self._service.decode.limit)
        self._service.decode.refuse_new(num_prompts * request.n)
        self._prompts = await self._token_ids(request)
        await self._make_answers(request)
        self._submit(request)

    async def _token_ids(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            roles = {"developer": "system"}
            messages = [{"role": roles.get(turn.role, turn.role), "content": turn.text} for turn in request.messages]
            try:
                return [await self._service.render(messages)]
            except ValueError as error:
                raise errors.bad_request(str(error), "messages") from error
        prompts = []
        for prompt in request.prompts:
            prompts.append(await self._service.encode(prompt) if isinstance(prompt, str) else prompt)
            self._room(prompts[-1])  # before more is tokenized, or decoded for an echo
            self._check_ids(prompts[-1])
        return prompts

    def _check_ids(self, prompt: list[int]) -> None:
        """Refuse ids outside the vocabulary here: the engine, which does too, does not know a request's fields."""
        try:
            self._service.target.check_tokens(prompt)
        except ValueError as error:
            raise errors.bad_request(str(error), "prompt") from error

    async def _make_answers(self, request: ChatRequest | CompletionRequest) -> None:
        echoes = [""] * len(self._prompts)
        if isinstance(request, CompletionRequest) and request.echo:
            echoes = [
                given if isinstance(given, str) else await self._service.decode_text(given) for given in request.prompts
            ]
        texts = self._service.token_texts
        self._answers = [
            Answer(number * request.n + choice, self._endpoint, texts, echoes[number])
            for number in range(len(self._prompts))
            for choice in range(request.n)
        ]
        if request.graft.rounds:
            self._viewers = [self._service.new_viewer(request.stop) for _ in self._answers]

    def _submit(self, request: ChatRequest | CompletionRequest) -> None:
        seed = new_seed() if request.seed is None else request.seed
        submissions = [
            Submission(
                sequence_id=self._service.decode.new_sequence_id(self.request_id),
                request_id=self.request_id,
                prompt_token_ids=prompt,
                params=request.sampling(self._room(prompt), choice_seed(seed, choice), request.num_logprobs),
                method=self._method,
                index=number * request.n + choice,
            )
            for number, prompt in enumerate(self._prompts)
            for choice in range(request.n)
        ]
        self._stream = self._service.decode.submit(submissions)

    def _room(self, prompt: list[int]) -> int:
        """Tokens that the answer may have. Refuses what does not fit, with both numbers."""
        limit, wanted = self._service.max_length, self._request.wanted_tokens
        param = "messages" if self._endpoint == "chat" else "prompt"
        if not prompt:
            raise errors.bad_request("the prompt is empty", param)
        errors.check_prompt_length(len(prompt), limit, param)
        if wanted is not None and len(prompt) + wanted > limit:
            raise errors.too_long(
                f"prompt and answer together may have {limit} tokens, but {len(prompt) + wanted} were asked for: "
                f"{len(prompt)} in the prompt and {wanted} for the answer",
                self._request.limit_param,
            )
        return limit - len(prompt) if wanted is None else wanted

    # ---- the answer at once

    async def whole(self) -> dict[str, Any]:
        """The response of a request that is not streamed. Raises `ApiError`."""
        details: list[dict[str, list[Any]]] = [{} for _ in self._answers]
        while any(answer.finish_reason is None for answer in self._answers):
            streamed = await self._next()
            for key, values in self._details(streamed).items():
                details[streamed.index].setdefault(key, []).extend(values)
        choices = [
            answer.choice() | ({"graft": own} if own else {})
            for answer, own in zip(self._answers, details, strict=True)
        ]
        kind = "chat.completion" if self._endpoint == "chat" else "text_completion"
        return self._envelope(kind, choices) | {"usage": self._usage()} | self._metrics()

    # ---- the answer as it comes

    async def first(self) -> Streamed:
        """Wait for the first event, so that a failure before it still gets a status of its own. Raises `ApiError`."""
        return await self._next()

    async def events(self, first: Streamed) -> AsyncIterator[str]:
        """The server-sent events of a streamed request. A failure becomes the last of them, without [DONE]."""
        try:
            for answer in self._answers:
                beginning = answer.first_chunk()
                if beginning is not None:
                    yield self._chunk([beginning])
            streamed: Streamed | None = first
            while streamed is not None:
                for event in self._chunks(streamed):
                    yield event
                is_running = any(answer.finish_reason is None for answer in self._answers)
                streamed = await self._next() if is_running else None
            if self._request.include_usage:
                yield (
                    self._chunk([], usage=self._usage())
                    if not self._request.graft.metrics
                    else self._chunk([], usage=self._usage(), **self._metrics())
                )
            self.close("ok", 200)  # before the client knows: one that hangs up at [DONE] has its whole answer
            yield "data: [DONE]\n\n"
        except ApiError as error:
            self.close(error.outcome, error.status)
            yield _event(error.body())
        except Exception:
            logger.exception("%s: the stream failed", json.dumps(self.request_id))
            self.close("error", 500)
            yield _event(errors.internal().body())

    def _chunks(self, streamed: Streamed) -> list[str]:
        """What one engine event gives the client: text with its log-probabilities and details, then the end."""
        answer, event = self._answers[streamed.index], streamed.event
        details = self._details(streamed)
        chunks = []
        if event.text or event.logprobs or any(details.values()):
            piece = answer.chunk(event.text, event.logprobs, None)
            chunks.append(self._chunk([piece], **({"graft": details} if details else {})))
        if event.finish_reason is not None:
            is_last = not self._request.include_usage and all(one.finish_reason for one in self._answers)
            more = self._metrics() if is_last else {}
            chunks.append(self._chunk([answer.chunk("", None, event.finish_reason)], **more))
        return chunks

    def _chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._endpoint == "chat" else "text_completion"
        usage = {"usage": None} if self._request.include_usage else {}
        return _event(self._envelope(kind, choices) | usage | more)

    # ---- both

    async def _next(self) -> Streamed:
        """The next event, counted. Raises `ApiError` when time is over or decoding has failed."""
        assert self._stream is not None
        limit_s = self._service.args.max_request_s
        try:
            async with asyncio.timeout(self._arrived + limit_s - time.monotonic()):
                streamed = await self._stream.next()
        except TimeoutError:
            raise errors.timed_out(limit_s) from None
        event = streamed.event
        if event.finish_reason in ("error", "abort"):
            logger.error("%s: decoding failed: %s", json.dumps(self.request_id), event.error)
            raise errors.internal()
        self._policy = streamed.policy
        self._answers[streamed.index].take(event)
        self._time(streamed.index, len(event.token_ids))
        return streamed

    def _details(self, streamed: Streamed) -> dict[str, list[Any]]:
        """What a request that wants more is told of an event: the ids of its tokens, the view of its round if any."""
        details: dict[str, list[Any]] = {}
        if self._request.graft.token_ids:
            details["token_ids"] = streamed.event.token_ids
        if self._viewers:
            details["rounds"] = [view.to_json() for view in self._viewers[streamed.index].views(streamed.event)]
        return details

    def _time(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        if num_tokens == 0:
            return
        if self._first_token_s is None:
            self._first_token_s = now - self._arrived
        if index in self._last_token:
            self._gaps_s.append((now - self._last_token[index]) / num_tokens)
        self._last_token[index] = now

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": self._service.system_fingerprint,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(len(prompt) for prompt in self._prompts)
        num_output = sum(answer.num_tokens for answer in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def _metrics(self) -> dict[str, Any]:
        """Counts of drafting, for a request that wants them; of a single answer only, as in vLLM."""
        if not self._request.graft.metrics:
            return {}
        if len(self._answers) > 1:
            return {"metrics": {"speculative_decoding": None, "graft": None}}
        counts, policy = self._answers[0].counts, self._policy
        is_own = policy.chosen(self._method) is policy.policy
        return {
            "metrics": {
                "speculative_decoding": counts.speculative_decoding(self._service.drafter.draft_depth),
                "graft": counts.graft(policy.version, policy.fingerprint) if is_own else counts.graft(None, None),
            }
        }

    def close(self, outcome: Outcome = "cancelled", status: int = CLIENT_LEFT) -> None:
        """Take what still runs out of the batch, and report the request; only the first call counts."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._stream is not None:
            if all(answer.finish_reason for answer in self._answers):
                self._stream.finished()
            self._stream.cancel()
        self._service.report(
            RequestReport(
                request_id=self.request_id,
                endpoint=self._endpoint,
                outcome=outcome,
                status=status,
                is_streamed=self.is_streamed,
                num_prompt_tokens=sum(len(prompt) for prompt in self._prompts),
                num_output_tokens=sum(answer.num_tokens for answer in self._answers),
                first_token_s=self._first_token_s,
                duration_s=time.monotonic() - self._arrived,
                token_gaps_s=self._gaps_s,
                policy=self._policy.label,
                method=self._method,
            ),
            {"prompt_token_ids": self._prompts, "answers": [answer.text for answer in self._answers]},
        )


def _event(content: dict[str, Any]) -> str:
    """A server-sent event. Its only line breaks are at its end, whatever a client takes for one."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    escaped = _LINE_BREAKS.sub(lambda found: json.dumps(found[0])[1:-1], text)
    return f"data: {escaped}\n\n"
