"""`ApiError`: what goes wrong with a request, in the shape that OpenAI's clients know.

Every error body is `{"error": {"message", "type", "param", "code"}}`; the status decides which exception the `openai`
package raises.
"""

from __future__ import annotations

from typing import Any

from serve.observer import Outcome


class ApiError(Exception):
    """An answer that is an error: status, body and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        outcome: Outcome = "refused",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.outcome: Outcome = outcome
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of the last event of a stream."""
        param = None if self.param is None else _encodable(self.param)
        return {"error": {"message": _encodable(self.message), "type": self.kind, "param": param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Whether and when the client may try again."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"Retry-After": str(self.retry_after_s)}


def _encodable(text: str) -> str:
    """The text with halves of characters escaped: JSON can name a field by one, and no UTF-8 can say it again."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the request itself is at fault, in the field `param`."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str) -> ApiError:
    """400: prompt and answer do not fit; the message has both numbers."""
    return ApiError(400, message, param=param, code="context_length_exceeded", outcome="too_long")


def check_prompt_length(num_tokens: int, limit: int, param: str, least: str = "") -> None:
    """Raise `too_long` for a prompt that leaves no room for an answer; `least` where the number is a lower bound."""
    if num_tokens >= limit:
        raise too_long(
            f"the prompt has {least}{num_tokens} tokens, and prompt and answer together may have {limit}", param
        )


def check_num_answers(num_prompts: int, num_choices: int, limit: int) -> None:
    """Raise 400 for more answers at once, `num_choices` to each prompt, than the server takes."""
    num_answers = num_prompts * num_choices
    if num_answers > limit:
        param = "prompt" if num_prompts > limit else "n"
        raise bad_request(f"{num_answers} answers are asked for at once, this server takes {limit}", param)


def body_too_large(num_read: int, declared: str | None, limit: int) -> ApiError:
    """413: the body has more bytes than allowed; how many its header says, or else how many were read until then."""
    size = declared if declared is not None and declared.isdecimal() else f"at least {num_read}"
    message = f"the body has {size} bytes, and may have {limit}"
    return ApiError(413, message, code="body_too_large", outcome="too_long")


def unauthorized() -> ApiError:
    """401; says nothing about the key that was sent."""
    return ApiError(
        401,
        "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
        kind="authentication_error",
        code="invalid_api_key",
        outcome="unauthorized",
    )


def unknown_model(name: str, served: str) -> ApiError:
    """404: another model than the one served here."""
    message = f"the model {name[:200]!r} does not exist here, this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def busy(num_sequences: int, limit: int, retry_after_s: int) -> ApiError:
    """429: the queue is full."""
    return ApiError(
        429,
        f"the server is busy: {num_sequences} sequences are decoded or waiting, the limit is {limit}; try again later",
        kind="rate_limit_error",
        code="server_busy",
        outcome="busy",
        retry_after_s=retry_after_s,
    )


def draining(retry_after_s: int) -> ApiError:
    """503: this replica ends, and with it what it has not finished."""
    return ApiError(
        503,
        "this replica is shutting down and takes no new requests; try again",
        kind="service_unavailable",
        code="draining",
        outcome="draining",
        retry_after_s=retry_after_s,
    )


def timed_out(limit_s: float) -> ApiError:
    """504: the request took longer than any may."""
    return ApiError(
        504, f"the request was ended after {limit_s:g} s", kind="timeout_error", code="timeout", outcome="timeout"
    )


def internal(message: str = "the server failed to decode this request", retry_after_s: int | None = None) -> ApiError:
    """500: our fault, with details in the server's log. `retry_after_s` None: trying again is useless."""
    return ApiError(
        500, message, kind="server_error", code="internal_error", outcome="error", retry_after_s=retry_after_s
    )
