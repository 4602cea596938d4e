"""Schedule: when a target is trained again, and with which command. Data and its ticks; nothing here starts anything.

A *tick* is a moment that the cron expression names in its time zone. Ticks are handed out in UTC. Around a change of
clocks they follow Debian's cron: a job of a fixed hour that falls into the gap of spring comes right after it, and one
that falls into the repeated hour of autumn comes once; jobs that run every so many minutes or hours just go on.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_CRON = "five cron fields: minute, hour, day of month, month, day of week, such as 0 3 * * 1-5"
_ZONE = "an IANA time zone such as UTC, Europe/Berlin or Asia/Shanghai"
_ENTRYPOINT = "a command line that starts with python, may hold {config}, and is free of ; & | < > $ ` and backslashes"
_ON_FAILURE = "a list of words, the program and its arguments, such as [/opt/tell.sh, team-a], or null"
_SHELL = re.compile(r"[;&|<>$`\\\n\r\0]")


class Schedule(BaseModel):
    """When a target's retraining job is due, and how often one tick is tried."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cron: Annotated[str, Field(description=_CRON)]
    timezone: Annotated[str, Field(description=_ZONE)] = "UTC"
    # What the cluster runs; {config} becomes the --config that the scheduler was given.
    entrypoint: Annotated[str, Field(description=_ENTRYPOINT)] = "python jobs/retrain.py --config {config}"
    # A tick that nobody could act on in time (the scheduler or the cluster was down) is given up after so long.
    max_lateness_minutes: Annotated[int, Field(ge=1, le=10_080, description="whole minutes from 1 to 10080")] = 720
    max_attempts: Annotated[int, Field(ge=1, le=10, description="a whole number from 1 to 10")] = 3
    # Before the second attempt; each further one waits twice as long.
    backoff_minutes: Annotated[int, Field(ge=1, le=1_440, description="whole minutes from 1 to 1440")] = 10
    # `graft schedule run` submits a tick's job up to so much later, so that targets do not all come at once.
    jitter_s: Annotated[int, Field(ge=0, le=3_600, description="whole seconds from 0 to 3600")] = 0
    # What `graft schedule run` starts when a tick has come to nothing; see `jobs/failure_hook.py`.
    on_failure: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...] | None,
        Field(strict=False, min_length=1, description=_ON_FAILURE),
    ] = None

    @field_validator("timezone")
    @classmethod
    def _check_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"allowed is {_ZONE}") from None
        return name

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, expression: str) -> str:
        # The library also takes a sixth field for seconds; the schedulers that read the same expression do not.
        if len(expression.split()) != 5:
            raise ValueError(f"allowed is {_CRON}")
        try:
            next(CronSim(expression, datetime(2000, 1, 1)))
        except CronSimError as error:
            problem = str(error)
            raise ValueError(f"{problem[:1].lower()}{problem[1:]}, allowed is {_CRON}") from None
        except StopIteration:
            raise ValueError("there is no such day, allowed is an expression that comes true some day") from None
        return expression

    @field_validator("entrypoint")
    @classmethod
    def _check_entrypoint(cls, command: str) -> str:
        try:
            words = shlex.split(command)
        except ValueError:
            words = []
        braces = re.findall(r"\{[^}]*\}?|\}", command)
        if words[:1] != ["python"] or len(words) < 2 or _SHELL.search(command) or set(braces) - {"{config}"}:
            raise ValueError(f"allowed is {_ENTRYPOINT}")
        return command

    @model_validator(mode="after")
    def _check_jitter(self) -> Schedule:
        if self.jitter_s >= 60 * self.max_lateness_minutes:
            raise ValueError(
                f"jitter_s {self.jitter_s} would put ticks off until they are given up (max_lateness_minutes "
                f"{self.max_lateness_minutes})"
            )
        return self

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """The ticks later than `after` (with a time zone), in UTC, ascending, each once, without end."""
        last = after.astimezone(UTC)
        for local in CronSim(self.cron, after.astimezone(ZoneInfo(self.timezone))):
            tick = local.astimezone(UTC)
            # In the repeated hour the wall clock runs behind, and in the gap several ticks fall together.
            if tick > last:
                last = tick
                yield tick

    def due(self, after: datetime, now: datetime) -> list[datetime]:
        """The ticks later than `after`, up to and including `now`, that are not too late, in UTC, ascending."""
        return list(takewhile(lambda tick: tick <= now, self.ticks(max(after, now - self.max_lateness))))

    @property
    def max_lateness(self) -> timedelta:
        """How long after a tick its job may still be started."""
        return timedelta(minutes=self.max_lateness_minutes)

    def delay(self, slug: str, tick: datetime) -> timedelta:
        """How long after a tick the job of a target is submitted: the same for everybody who asks, 0 to `jitter_s`."""
        drawn = hashlib.sha256(f"{slug} {tick.astimezone(UTC).isoformat()}".encode()).digest()
        return timedelta(seconds=int.from_bytes(drawn[:8], "big") % (self.jitter_s + 1))

    def backoff(self, attempt: int) -> timedelta:
        """The pause after failed attempt `attempt`, counted from 0."""
        return timedelta(minutes=self.backoff_minutes * 2**attempt)

    def command(self, config: str) -> str:
        """The entry point for a configuration's path or name."""
        return self.entrypoint.replace("{config}", shlex.quote(config))
