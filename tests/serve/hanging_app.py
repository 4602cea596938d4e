"""The served application with a route that hangs its decode thread, for a test of what Serve makes of it."""

import asyncio
import threading

from fastapi import FastAPI
from ray.serve import Application

from serve import app
from serve.replica import Decoder
from serve.serve_args import ServeArgs


class HangingDecoder(Decoder):
    """A replica whose decode thread never comes back after `POST /hang`."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        routes = super().__serve_build_asgi_app__()

        @routes.post("/hang")
        async def hang() -> None:
            self._hanging = asyncio.create_task(self._service.decode.call(threading.Event().wait))

        return routes


def build(args: ServeArgs) -> Application:
    usual, app.Decoder = app.Decoder, HangingDecoder
    try:
        return app.build(args)
    finally:
        app.Decoder = usual
