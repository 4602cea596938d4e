"""RayPool: the driver's workers as Ray actors, with their restarts, their timeouts and nothing else.

An actor is restarted by Ray as often as it takes, but none of its calls ever is: a call that was lost is reported as
such. After a loss the actor is asked to load again, with a pause in between; once that works it reports for work. At
the start of a run nothing is repeated that the actor itself refused or failed in: it would fail again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from graft_dist.errors import ConfigError, GraftError
from jobs.collect_actor import ActorPlan, CollectActor, WorkerInfo
from jobs.driver import NoWorkersLeft
from jobs.work import Assignment, Report, WorkerLost


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How many actors, what each may use, and how patient the pool is."""

    num_actors: int
    num_cpus: float
    num_gpus: float
    start_timeout_s: float = 900.0  # models may have to be downloaded
    call_timeout_s: float = 600.0  # a slice takes seconds; an actor silent for this long is killed
    pause_s: float = 1.0  # after a loss, doubled with each further one in a row
    max_losses: int = 8  # in a row, without ever loading: the actor is given up
    max_start_losses: int = 3  # the same at the start of a run, which then ends


@dataclass
class _Worker:
    actor: Any
    info: WorkerInfo | None = None
    call: ray.ObjectRef[Any] | None = None
    called_at: float = 0.0
    is_loading: bool = False
    load_at: float | None = 0.0  # when to ask it to load; None while it is usable or given up
    num_losses: int = 0


class RayPool:
    """Workers 0..num_actors-1, each a `CollectActor`. Implements `jobs.driver.WorkerPool`."""

    def __init__(self, plan: ActorPlan, settings: PoolSettings) -> None:
        self._settings = settings
        self._plan = plan  # by value: an actor that restarts must not depend on an object in the store
        self._remote = ray.remote(
            num_cpus=settings.num_cpus, num_gpus=settings.num_gpus, max_restarts=-1, max_task_retries=0
        )(CollectActor)
        self._workers = [_Worker(self._remote.remote(self._plan)) for _ in range(settings.num_actors)]
        self._is_started = False
        self._last_loss = ""

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def start(self) -> list[WorkerInfo]:
        """Wait until every actor has loaded its models. Raises the `GraftError` that an actor met, or `ConfigError`."""
        most = self._settings.max_start_losses
        deadline = time.monotonic() + self._settings.start_timeout_s
        while any(worker.info is None for worker in self._workers):
            if time.monotonic() > deadline:
                ready = sum(worker.info is not None for worker in self._workers)
                raise ConfigError(
                    f"only {ready} of {self.num_workers} actors were ready after {self._settings.start_timeout_s:g} s; "
                    f"free in the cluster: {_short(ray.available_resources())}"
                )
            self.wait(1.0)
            if any(worker.num_losses >= most for worker in self._workers):
                raise ConfigError(
                    f"an actor was lost {most} times while loading its models ({self._last_loss}); it may need more "
                    "memory than there is"
                )
        self._is_started = True
        return [worker.info for worker in self._workers if worker.info is not None]

    def call(self, worker: int, held: Sequence[str], new: Assignment | None, has_more: bool) -> None:
        entry = self._workers[worker]
        assert entry.call is None, f"worker {worker} already has a call in flight"
        entry.call = entry.actor.work.remote(list(held), None if new is None else new.unit, has_more)
        entry.called_at = time.monotonic()

    def wait(self, timeout_s: float) -> list[tuple[int, Report | WorkerLost]]:
        """The calls that came back, and workers that became usable (again): those report without any result."""
        self._ask_to_load()
        self._kill_silent()
        in_flight = [worker.call for worker in self._workers if worker.call is not None]
        if not in_flight:
            time.sleep(min(timeout_s, self._settings.pause_s))
            return []
        ready, _ = ray.wait(in_flight, num_returns=1, timeout=timeout_s)
        answers = []
        for index, worker in enumerate(self._workers):
            if worker.call is not None and worker.call in ready:
                answer = self._receive(worker)
                if answer is not None:
                    answers.append((index, answer))
        return answers

    def close(self) -> None:
        """Kill the actors; what they had in hand is lost."""
        for worker in self._workers:
            ray.kill(worker.actor)

    def _ask_to_load(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.load_at is not None and now >= worker.load_at:
                worker.load_at, worker.is_loading = None, True
                worker.call, worker.called_at = worker.actor.load.remote(), now
        if all(worker.num_losses > self._settings.max_losses for worker in self._workers):
            raise NoWorkersLeft(
                f"every actor was lost {self._settings.max_losses} times in a row while loading ({self._last_loss})"
            )

    def _kill_silent(self) -> None:
        for worker in self._workers:
            limit = self._settings.start_timeout_s if worker.is_loading else self._settings.call_timeout_s
            if worker.call is not None and time.monotonic() - worker.called_at > limit:
                worker.called_at = time.monotonic()
                ray.kill(worker.actor, no_restart=False)  # its call comes back as lost

    def _receive(self, worker: _Worker) -> Report | WorkerLost | None:
        """The answer of a finished call; None where there is nothing to tell the driver."""
        call, was_loading = worker.call, worker.is_loading
        worker.call, worker.is_loading = None, False
        assert call is not None
        try:
            answer = ray.get(call)
        except RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"
            if was_loading and not self._is_started:
                if isinstance(error.cause, GraftError):
                    raise error.cause from None
                raise ConfigError(f"an actor could not load its models ({reason})") from None
            ray.kill(worker.actor, no_restart=False)  # it failed outside its units: start it afresh
            return self._lose(worker, reason, was_loading)
        except RayError as error:
            if isinstance(error, ActorDiedError):  # for good, such as with its node's removal
                worker.actor = self._remote.remote(self._plan)
            return self._lose(worker, type(error).__name__, was_loading)
        worker.num_losses = 0
        if isinstance(answer, WorkerInfo):
            self._check_same(answer)
            worker.info = answer
            return Report()
        assert isinstance(answer, Report)
        return answer

    def _lose(self, worker: _Worker, reason: str, was_loading: bool) -> WorkerLost | None:
        worker.num_losses += 1
        self._last_loss = reason
        if worker.num_losses <= self._settings.max_losses:
            worker.load_at = time.monotonic() + self._settings.pause_s * 2 ** min(worker.num_losses - 1, 5)
        return None if was_loading else WorkerLost(reason)

    def _check_same(self, info: WorkerInfo) -> None:
        """All actors must have loaded the same models, or the run's identity would be a lie."""
        for other in self._workers:
            if other.info is not None and other.info.models != info.models:
                reason = (
                    f"two actors loaded different models: {other.info.models} on {other.info.host}, "
                    f"{info.models} on {info.host}; pin the revisions and the dtype in the configuration"
                )
                raise NoWorkersLeft(reason) if self._is_started else ConfigError(reason)


def _short(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
