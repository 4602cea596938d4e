"""What the pool makes of actors that do not load: said once, and never tried without end. Ray itself is a fake here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from graft_dist.errors import ConfigError, DrafterError
from jobs import ray_pool
from jobs.collect_actor import ModelInfo, WorkerInfo
from jobs.driver import NoWorkersLeft
from jobs.ray_pool import PoolSettings, RayPool
from jobs.work import Report, WorkerLost

LOADED = WorkerInfo(ModelInfo("target", "tokenizer", None, 0, "float32"), "host")
LOST = ActorUnavailableError("the actor is gone", b"0" * 16)


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("load", "a traceback of\nmany lines", cause)


class FakeRay:
    """An actor's `load` comes to what `loads` says of (actor, how many-th load); `work` to `works`."""

    def __init__(self, loads: Callable[[int, int], object]) -> None:
        self.loads, self.works = loads, LOST
        self.num_loads: dict[int, int] = {}
        self.num_actors = 0

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=self._make)

    def _make(self, plan: object) -> Any:
        number = self.num_actors
        self.num_actors += 1

        def load() -> object:
            self.num_loads[number] = self.num_loads.get(number, 0) + 1
            return [self.loads(number, self.num_loads[number])]

        return SimpleNamespace(load=SimpleNamespace(remote=load), work=SimpleNamespace(remote=lambda *_: [self.works]))

    def wait(self, calls: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return calls, []

    def get(self, call: list[Any]) -> object:
        if isinstance(call[0], Exception):
            raise call[0]
        return call[0]

    def kill(self, actor: object, no_restart: bool = True) -> None:
        pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], object]], tuple[RayPool, FakeRay]]:
    def make(loads: Callable[[int, int], object]) -> tuple[RayPool, FakeRay]:
        fake = FakeRay(loads)
        monkeypatch.setattr(ray_pool, "ray", fake)
        settings = PoolSettings(num_actors=2, num_cpus=1, num_gpus=0, pause_s=0.0)
        return RayPool(None, settings), fake  # type: ignore[arg-type]  # the plan is the actors' business

    return make


def test_what_an_actor_refuses_at_the_start_comes_out_as_it_is(start: Any) -> None:
    pool, fake = start(lambda actor, count: task_error(DrafterError("the drafter does not fit")))
    with pytest.raises(DrafterError, match="the drafter does not fit"):
        pool.start()
    assert max(fake.num_loads.values()) == 1


def test_any_other_error_of_loading_is_said_once_in_one_sentence(start: Any) -> None:
    pool, fake = start(lambda actor, count: task_error(RuntimeError("header too large\nsomewhere")))
    with pytest.raises(ConfigError, match=r"could not load its models \(RuntimeError: header too large somewhere\)"):
        pool.start()
    assert max(fake.num_loads.values()) == 1


def test_an_actor_that_dies_while_loading_is_not_tried_for_ever(start: Any) -> None:
    pool, fake = start(lambda actor, count: LOADED if actor else LOST)
    with pytest.raises(ConfigError, match=r"lost 3 times while loading its models \(ActorUnavailableError\)"):
        pool.start()
    assert fake.num_loads == {0: 3, 1: 1}


def test_an_actor_that_dies_once_while_loading_is_forgiven(start: Any) -> None:
    pool, _ = start(lambda actor, count: LOST if count == 1 else LOADED)
    assert pool.start() == [LOADED, LOADED]


def test_actors_that_cannot_load_again_end_the_run_in_good_order(start: Any) -> None:
    """By `NoWorkersLeft`, for which the driver commits what is finished; whatever the reason of the failure."""
    refusal = task_error(DrafterError("the folder is gone"))
    pool, fake = start(lambda actor, count: LOADED if count == 1 else refusal)
    pool.start()
    for worker in range(2):
        pool.call(worker, (), None, False)
    answers: list[Report | WorkerLost] = []
    with pytest.raises(NoWorkersLeft, match=r"8 times in a row while loading \(DrafterError: the folder is gone\)"):
        for _ in range(1000):
            answers += [answer for _, answer in pool.wait(0.0)]
    assert [type(answer) for answer in answers] == [WorkerLost] * 2
    assert max(fake.num_loads.values()) <= 1 + 8 + 1
