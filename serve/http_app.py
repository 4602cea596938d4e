"""The routes: an ASGI application in front of a `Service`. Knows no Ray, so that tests can call it directly."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from graft_dist import __version__
from serve import errors
from serve.answer import Endpoint
from serve.api_keys import ApiKeys
from serve.completion import CLIENT_LEFT, Completion
from serve.errors import ApiError
from serve.openai_api import ChatRequest, CompletionRequest, parse
from serve.page import page_router
from serve.service import Service

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHOWN_ID = 200  # letters of an unusable one
_BODY_S = 60.0  # in which a body has to be there
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

logger = logging.getLogger("ray.serve")


def create_app(service: Service) -> FastAPI:
    """Return the application. Reads the API keys; raises `ConfigError` when that fails."""
    keys = ApiKeys.load(service.args.api_keys_file, service.args.api_keys_variable)
    app = FastAPI(title="graft-dist", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.include_router(_v1(service, keys))
    app.include_router(_operations(service))
    app.include_router(page_router())
    return app


def _v1(service: Service, keys: ApiKeys) -> APIRouter:
    """The OpenAI-compatible part: the only one that asks for a key."""
    router = APIRouter(prefix="/v1")

    def card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "graft-dist",
            "graft": {"methods": list(service.decode.active.methods)},  # what a request's graft.method may be now
        }

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(service, keys, request, "chat")

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await _complete(service, keys, request, "completions")

    @router.get("/models")
    async def models(request: Request) -> Response:
        keys.check(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        keys.check(request.headers.get("authorization"))
        if name != service.model:
            raise errors.unknown_model(name, service.model)
        return JSONResponse(card())

    return router


def _operations(service: Service) -> APIRouter:
    """What load balancers and people look at."""
    router = APIRouter()

    @router.head("/healthz")
    @router.get("/healthz")
    async def healthz() -> Response:
        health = service.health()
        return JSONResponse(health, 503 if health["status"] == "failed" else 200)

    @router.head("/readyz")
    @router.get("/readyz")
    async def readyz() -> Response:
        status = service.health()["status"]
        return JSONResponse({"status": status}, 200 if status in ("ok", "degraded") else 503)

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__, "system_fingerprint": service.system_fingerprint})

    return router


async def _complete(service: Service, keys: ApiKeys, request: Request, endpoint: Endpoint) -> Response:
    """Answer a completion request; every way out of here closes it."""
    completion = Completion(service, endpoint, request_id(request))
    try:
        keys.check(request.headers.get("authorization"))
        body = await _body(request, service.args.max_body_bytes, min(_BODY_S, service.args.max_request_s))
        service.decode.refuse_new(1)  # before anything is made of the body
        limits = {"max_prompts": service.decode.limit, "max_length": service.max_length}
        await completion.start(
            parse(ChatRequest, body, **limits) if endpoint == "chat" else parse(CompletionRequest, body, **limits)
        )
        if completion.is_streamed:
            return AnswerStream(completion, completion.events(await completion.first()))
        response = JSONResponse(await completion.whole())
        completion.close("ok", 200)  # only now: it could not have been written
        return response
    except ApiError as error:
        completion.close(error.outcome, error.status)
        raise
    except ClientDisconnect:  # before it had sent the whole body
        completion.close()
        return Response(status_code=CLIENT_LEFT)  # which nobody sees
    except Exception as error:
        logger.exception("%s: the request failed", json.dumps(completion.request_id))
        completion.close("error", 500)
        raise errors.internal() from error
    except BaseException:  # the client has left
        completion.close()
        raise


class AnswerStream(StreamingResponse):
    """Server-sent events of a completion, which is closed however the response ends."""

    media_type = "text/event-stream"

    def __init__(self, completion: Completion, events: Any) -> None:
        super().__init__(events, headers=_SSE_HEADERS)
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that leaves raises out of here."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.close()


def request_id(request: Request) -> str:
    """The id that proxy or client gave the request, if it can be logged as it is; else a new one.

    A given one that cannot is logged once beside the new one: the proxy may send it back, and its client look for it.
    """
    given = request.headers.get(REQUEST_ID_HEADER, "")
    if _REQUEST_ID.fullmatch(given):
        return given
    drawn = str(uuid.uuid4())
    if REQUEST_ID_HEADER in request.headers:
        logger.info(json.dumps({"event": "request_id", "request_id": drawn, "given": given[:_SHOWN_ID]}))
    return drawn


async def _body(request: Request, limit: int, limit_s: float) -> bytes:
    """The body, read no further and no longer than allowed: who sends it bit by bit would hold a place for ever."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise errors.body_too_large(size, request.headers.get("content-length"), limit)
                parts.append(part)
    except TimeoutError:
        raise errors.timed_out(limit_s) from None
    return b"".join(parts)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same shape as every other error."""
    assert isinstance(error, HTTPException)
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)
