"""`Decoder`: a `Service` as a Ray Serve replica. The ingress deployment is the decoder itself: no further hop.

A shell: Serve's hooks on one side, the service on the other.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError

from graft_dist.config import TargetConfig
from serve.http_app import create_app
from serve.metrics import ServingMetrics
from serve.serve_args import ServeArgs, UserConfig
from serve.service import Service


class Decoder:
    """One replica. Serve calls `reconfigure` once before the first request, then whenever the user_config changes."""

    def __init__(self, args: ServeArgs, config: TargetConfig) -> None:
        metrics = ServingMetrics()
        self._service = Service(args, config, observers=[metrics], request_observers=[metrics])
        self._is_configured = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes; Serve asks for them once the replica is made."""
        return create_app(self._service)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Put another policy in force; requests under way go on. What cannot be read is refused: the old one stays."""
        self._is_configured = True
        try:
            wanted = UserConfig.model_validate(user_config)
        except ValidationError as error:
            await self._service.refuse_config(error)
        else:
            await self._service.reconfigure(wanted)
        self._service.follow_champion()

    async def check_health(self) -> None:  # async, on the event loop: one that is blocked answers nobody either
        """Fail when the round loop is dead or stuck: Serve then replaces this replica. Also without a configuration."""
        if not self._is_configured:  # Serve calls reconfigure unless it is null: nothing would ever be drafted
            raise RuntimeError("the deployment's user_config is null: leave it out, or write {policy: null}")
        self._service.decode.check()

    def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()
