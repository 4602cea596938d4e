"""The requests of the OpenAI-compatible API: what is understood, what is refused and with which words.

A field that is not supported is refused by name, never ignored; so is one that nobody knows. The first mistake is
looked for and no other: a body of two million of them would keep the event loop from everybody's answers. Responses are
made in `answers.py`, routes in `http_app.py`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from graft_dist.sampling import MAX_LOGPROBS, SamplingParams
from serve.errors import ApiError, bad_request, check_num_answers, check_prompt_length
from serve.serve_args import Method

MAX_CHOICES = 128
MAX_STOPS = 8
MAX_STOP_LENGTH = 512
MAX_STOP_IDS = 64  # each answer of a request keeps a set of its own
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""

_MOST = 2**31 - 1
"""Of whole numbers that have no bound of their own: what is larger is a mistake, and fits no tensor."""

_COMMON_UNSUPPORTED: dict[str, str] = {
    "logit_bias": "biases on single tokens are not supported",
    "metadata": "nothing is stored here",
    "service_tier": "there is one tier",
    "response_format": "answers are plain text: other formats are not supported",
}
_CHAT_UNSUPPORTED = _COMMON_UNSUPPORTED | {
    "tools": "tool calls are not supported",
    "tool_choice": "tool calls are not supported",
    "parallel_tool_calls": "tool calls are not supported",
    "functions": "function calls are not supported",
    "function_call": "function calls are not supported",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "prediction": "predicted outputs are not supported; drafting happens by itself",
    "reasoning_effort": "it is not supported",
    "verbosity": "it is not supported",
    "web_search_options": "web search is not supported",
    "store": "nothing is stored here",
    "prompt_cache_key": "prompts are not cached",
    "prompt_cache_retention": "prompts are not cached",
    "moderation": "moderation is not supported",
}
_COMPLETION_UNSUPPORTED = _COMMON_UNSUPPORTED | {
    "suffix": "insertion before a suffix is not supported",
    "best_of": "it is not supported; ask for n answers and choose yourself",
}
# Values of unsupported fields that ask for nothing beyond what happens anyway.
_NEUTRAL: dict[str, list[Any]] = {
    "tools": [[]],
    "functions": [[]],
    "tool_choice": ["none"],
    "function_call": ["none"],
    "logit_bias": [{}],
    "metadata": [{}],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "store": [False],
    "service_tier": ["auto", "default"],
    "best_of": [1],
    "suffix": [""],
}


class FirstMistake(FailFast):
    """pydantic's `FailFast`, which has no hash, so that no union can hold it."""

    __hash__ = object.__hash__


_MESSAGE_UNSUPPORTED = ("tool_calls", "function_call", "audio", "refusal", "name", "tool_call_id", "annotations")
"""Of messages: an answer that a client sends back as the `openai` package gave it has them, as null or empty."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding that hides how long tokens are; we send none


class GraftOptions(_Strict):
    """This project's extension: the request field `graft`."""

    method: Method | None = None  # decode this request with another method, where the server allows it
    token_ids: bool = False  # tell the ids of the answer's tokens
    rounds: bool = False  # tell what every round drafted and what was accepted
    metrics: bool = False  # add counts of drafting and acceptance at the end


class _Completion(_Strict):
    """What both endpoints share."""

    model: str
    max_tokens: Annotated[int | None, Field(ge=1, le=_MOST)] = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_MOST)] = 0  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[tuple[str, ...], FirstMistake()] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=_MOST)], ...], FirstMistake(), Field(max_length=MAX_STOP_IDS)
    ] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None  # OpenAI's newer name for `user`; neither is kept
    graft: GraftOptions = GraftOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, stops: tuple[str, ...]) -> tuple[str, ...]:
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are supported, not {len(stops)}")
        if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise ValueError(f"a stop string has from 1 to {MAX_STOP_LENGTH} characters")
        return stops

    @model_validator(mode="after")
    def _check_stream(self) -> _Completion:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int, seed: int, num_logprobs: int | None) -> SamplingParams:
        """The engine's parameters for one of the answers."""
        try:
            return SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(0, self.top_k),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=seed,
                max_new_tokens=max_new_tokens,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                logprobs=num_logprobs,
            )
        except ValueError as error:
            raise bad_request(str(error), str(error).split()[0]) from error


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[tuple[TextPart, ...], FirstMistake()]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Completion):
    """POST /v1/chat/completions."""

    messages: Annotated[tuple[Message, ...], FirstMistake(), Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=_MOST)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say different things: give one of them")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """The answer's limit, if the request has one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_param(self) -> str:
        """The name under which the limit was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token, as the engine takes them."""
        return (self.top_logprobs or 0) if self.logprobs else None


_TokenIds = Annotated[list[int], FirstMistake()]


class CompletionRequest(_Completion):
    """POST /v1/completions."""

    prompt: str | _TokenIds | Annotated[list[str], FirstMistake()] | Annotated[list[_TokenIds], FirstMistake()]
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.prompt in ([], [[]]):
            raise ValueError("prompt is empty")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: log-probabilities of the prompt are not computed")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several, all texts or all token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]

    @property
    def wanted_tokens(self) -> int | None:
        """The answer's limit: OpenAI's default where the request has none."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def limit_param(self) -> str:
        """The name under which the limit is given."""
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token, as the engine takes them."""
        return self.logprobs


Request = TypeVar("Request", ChatRequest, CompletionRequest)


def parse(kind: type[Request], body: bytes, *, max_prompts: int, max_length: int) -> Request:
    """Read a request's body. Raises `ApiError` 400 that names the field at fault.

    What has more prompts than the server takes at once, or surely more tokens than prompt and answer may have, is
    refused before anything else is looked at: reading it would keep the event loop from everybody's answers.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", None) from error
    if not isinstance(content, dict):
        raise bad_request("the body has to be a JSON object", None)
    if kind is ChatRequest:
        _check_messages(content.get("messages"), max_length)
    else:
        _check_prompts(content.get("prompt"), content.get("n"), max_prompts, max_length)
    unsupported = _CHAT_UNSUPPORTED if kind is ChatRequest else _COMPLETION_UNSUPPORTED
    content = _without_nulls(content)
    for name, reason in unsupported.items():
        if name in content and content.pop(name) not in _NEUTRAL.get(name, []):
            raise bad_request(f"{name} is not supported by this server: {reason}", name, "unsupported_parameter")
    for name, options in (("stream_options", StreamOptions), ("graft", GraftOptions)):
        if isinstance(content.get(name), dict):
            content[name] = _known(_without_nulls(content[name]), options, f"{name}.")
    if kind is ChatRequest and isinstance(content.get("messages"), list):
        content["messages"] = [_message(message, at) for at, message in enumerate(content["messages"])]
    try:
        # As JSON: a list may become a tuple, "3" no number.
        return kind.model_validate_json(json.dumps(_known(content, kind, "")))
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from error


def _check_messages(messages: Any, max_length: int) -> None:
    """Every message costs at least a token, every part of one at least some time."""
    if not isinstance(messages, list):
        return
    check_prompt_length(len(messages), max_length, "messages", "at least ")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > max_length:
        raise bad_request(f"the messages have {num_parts} parts, and may have {max_length}", "messages")


def _check_prompts(prompt: Any, choices: Any, max_prompts: int, max_length: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    if not isinstance(prompt[0], str | list):  # the ids of one prompt
        check_prompt_length(len(prompt), max_length, "prompt")
        return
    if len(prompt) > max_prompts:
        num_choices = choices if isinstance(choices, int) and 1 <= choices <= MAX_CHOICES else 1
        check_num_answers(len(prompt), num_choices, max_prompts)
    for each in prompt:
        if isinstance(each, list):
            check_prompt_length(len(each), max_length, "prompt")


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """A null means "as if it were not there", for OpenAI's own fields and for ours."""
    return {name: value for name, value in fields.items() if value is not None}


def _known(fields: dict[str, Any], model: type[BaseModel], where: str) -> dict[str, Any]:
    """The fields as they are. Raises `ApiError` for the first that the model does not have."""
    unknown = next((name for name in fields if name not in model.model_fields), None)
    if unknown is not None:
        raise bad_request(f"unknown field {where}{unknown[:100]}", f"{where}{unknown[:100]}", "unknown_parameter")
    return fields


def _message(message: Any, at: int) -> Any:
    """A message without what asks for nothing. Says in plain words what is not supported, as pydantic would not."""
    if not isinstance(message, dict):
        return message
    where = f"messages[{at}]"
    message = _without_nulls(message)
    if message.get("role") in ("tool", "function"):
        raise bad_request(f"{where}.role: tool calls are not supported", f"{where}.role", "unsupported_parameter")
    for name in _MESSAGE_UNSUPPORTED:
        if message.pop(name, []) != []:
            param = f"{where}.{name}"
            raise bad_request(f"{param} is not supported by this server", param, "unsupported_parameter")
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(message["content"])]
    return _known(message, Message, f"{where}.")


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, dict):
        return part
    part = _without_nulls(part)
    for name in ("type", "text"):
        if name not in part and part.get("type") in ("text", None):
            raise bad_request(f"the field {where}.{name} is missing", f"{where}.{name}", "missing_required_parameter")
    if part["type"] != "text":
        raise bad_request(
            f"{where} is of type {str(part['type'])[:100]!r}: only text is supported", where, "unsupported_parameter"
        )
    return _known(part, TextPart, f"{where}.")


def _refusal(detail: ErrorDetails) -> ApiError:
    """One of pydantic's error entries as a sentence about the field."""
    location = list(detail["loc"])
    param = _path(location)
    if detail["type"] == "json_invalid":  # half a character, or nested too deeply
        return bad_request(detail["msg"], None)
    if detail["type"] == "extra_forbidden":
        return bad_request(f"unknown field {param}", param, "unknown_parameter")
    if detail["type"] == "missing":
        return bad_request(f"the field {param} is missing", param, "missing_required_parameter")
    message = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    if not param:  # a rule between fields: its sentence begins with the field's name
        return bad_request(message, message.split()[0], "invalid_value")
    return bad_request(f"{param}: {message}", param, "invalid_value")


def _path(location: list[int | str]) -> str:
    """`messages[0].content`; pydantic's names for the branches of a union are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "tuple", "list"):
            path += f".{part}" if path else part
    return path
