"""The Ray cluster a job runs on: joins one or starts one, and checks that the job fits before anything is loaded.

The only place in `jobs` that reads Ray's environment variables.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import ray
import ray.util
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from graft_dist.errors import ConfigError

LOCAL_OBJECT_STORE_BYTES = 150_000_000
"""Only small records travel between driver and actors; Ray's default would take a third of the machine's memory."""

WAIT_FOR_ROOM_S = 900.0
"""For other jobs to give back what they use, or a cluster that scales by itself to start a node."""

_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables that name a cluster, the first set one before the others."""

_LOOK_S = 5.0  # for a dashboard to say which version of Ray it is

Room = PlacementGroupSchedulingStrategy | Literal["DEFAULT"]
"""A place on the cluster, as Ray takes it for a `scheduling_strategy`."""


class ClusterBusyError(ConfigError):
    """There was no room on the cluster in time; later there may be."""


@dataclass(frozen=True)
class Cluster:
    """The cluster this process is connected to."""

    is_local: bool  # started by this process, ends with it
    message: str  # what happened, for people
    resources: Mapping[str, float]


def connect(address: str | None, has_dashboard: bool = False) -> Cluster:
    """Join the cluster at `address`, or the one this job or machine belongs to; without any, start one in this process.

    `address` "local" always starts one, with Ray's dashboard (and with it the State API) if `has_dashboard`. Raises
    `ConfigError` when an address was given and does not answer.
    """
    if ray.is_initialized():  # an earlier step of this process has joined it
        found = ray.get_runtime_context().gcs_address
        return Cluster(False, f"still in the Ray cluster at {found}", ray.cluster_resources())
    wanted = address or os.environ.get("RAY_ADDRESS")
    if wanted != "local":
        try:
            with _own_sigterm():
                ray.init(address=wanted or "auto", log_to_driver=True, logging_level=logging.WARNING)
        except ConnectionError as error:
            if wanted:
                raise ConfigError(f"there is no Ray cluster at {wanted}: {' '.join(str(error).split())}") from error
        else:
            found = ray.get_runtime_context().gcs_address
            return Cluster(False, f"joined the Ray cluster at {found}", ray.cluster_resources())
    _start_local(has_dashboard)
    resources = ray.cluster_resources()
    message = f"no Ray cluster given, so one was started here ({resources.get('CPU', 0):g} CPUs)"
    if not has_dashboard:
        message += ", without a dashboard"
    return Cluster(True, message, resources)


@contextmanager
def connected(address: str | None, has_dashboard: bool = False) -> Iterator[Cluster]:
    """`connect` for a block. Afterwards this process is in a cluster if it was in one before, and else in none."""
    was_connected = ray.is_initialized()
    cluster = connect(address, has_dashboard)
    try:
        yield cluster
    finally:
        if not was_connected:
            ray.shutdown()


def _start_local(has_dashboard: bool) -> None:
    # Left to itself a local cluster writes a token file to the home directory, which then switches authentication on
    # for every later `ray start` of this user. This one listens on the loopback interface and ends with the job.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _own_sigterm():
        ray.init(
            address="local",
            include_dashboard=has_dashboard,
            object_store_memory=LOCAL_OBJECT_STORE_BYTES,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep a handler of SIGTERM that this process has set: Ray's own ends it with exit code 15."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def check_fits(
    resources: Mapping[str, float], num_actors: int, num_cpus: float, num_gpus: float, who: str = "actors"
) -> None:
    """Refuse a job that this cluster can never place: it would wait for ever without saying why."""
    for name, each in (("CPU", num_cpus), ("GPU", num_gpus)):
        wanted, there = num_actors * each, resources.get(name, 0.0)
        if wanted > there:
            raise ConfigError(
                f"{num_actors} {who} need {wanted:g} {name}s ({each:g} each), but the cluster has {there:g}; "
                f"use fewer {who}, or change resources in the target's configuration"
            )


def wait_until_fits(
    cluster: Cluster,
    num_actors: int,
    num_cpus: float,
    num_gpus: float,
    wait_s: float,
    say: Callable[[str], None],
    who: str = "actors",
) -> None:
    """Like `check_fits`, but lets a cluster that scales by itself start the missing nodes first, for at most `wait_s`.

    The autoscaler is asked through a placement group of the job's size, which ends with this process however it ends:
    nodes are not kept for a job that died.
    """
    try:
        check_fits(cluster.resources, num_actors, num_cpus, num_gpus, who)
    except ConfigError:
        if cluster.is_local or wait_s <= 0:
            raise
    else:
        return
    say(f"the cluster is too small yet; waiting up to {wait_s:g} s for it to start nodes")
    with _placement(num_actors, num_cpus, num_gpus) as group:
        _wait_for(group, wait_s)
    check_fits(ray.cluster_resources(), num_actors, num_cpus, num_gpus, who)


@contextmanager
def reserved(num_cpus: float, num_gpus: float, who: str, wait_s: float = WAIT_FOR_ROOM_S) -> Iterator[Room]:
    """Room for one actor or task, to be given to it as its `scheduling_strategy`, once others have left so much.

    What still runs in it at the block's end is killed. Raises `ClusterBusyError` when it is not free within `wait_s`:
    Ray itself would wait for ever without saying why.
    """
    if num_cpus == num_gpus == 0:  # fits everywhere, but Ray makes no empty group
        yield "DEFAULT"
        return
    with _placement(1, num_cpus, num_gpus) as group:
        if not _wait_for(group, wait_s):
            free = ray.available_resources()
            raise ClusterBusyError(
                f"there was no room for {who} within {wait_s:g} s: it needs {num_cpus:g} CPUs and {num_gpus:g} GPUs on "
                f"one node, and the whole cluster has {free.get('CPU', 0):g} and {free.get('GPU', 0):g} free; start "
                "again when other jobs have ended"
            )
        yield PlacementGroupSchedulingStrategy(group)


@contextmanager
def _placement(num_bundles: int, num_cpus: float, num_gpus: float) -> Iterator[PlacementGroup]:
    bundle = {name: each for name, each in (("CPU", num_cpus), ("GPU", num_gpus)) if each > 0}
    group = ray.util.placement_group([bundle] * num_bundles)
    try:
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _wait_for(group: PlacementGroup, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not group.wait(2):  # in short turns, between which signals are heard
        if time.monotonic() >= deadline:
            return False
    return True


def dashboard_address(address: str | None) -> str:
    """The HTTP address that jobs are submitted to: the given one, else the environment's, else this machine's."""
    environment = next((os.environ[name] for name in _ADDRESSES if os.environ.get(name)), "")
    wanted = address or (environment if environment.startswith("http") else "http://127.0.0.1:8265")
    if not wanted.startswith(("http://", "https://")):
        raise ConfigError(f"--address is {wanted}, allowed is the URL of a Ray dashboard such as http://127.0.0.1:8265")
    return wanted


def running_dashboard() -> str | None:
    """`dashboard_address` of the Ray that the environment names or that runs on this machine; None: there is none.

    Raises `ConfigError` when the environment names one that does not answer.
    """
    address = dashboard_address(None)
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=_LOOK_S) as response:
            is_ray = "ray_version" in json.loads(response.read())
    except urllib.error.HTTPError as error:
        is_ray = error.code in (401, 403)  # one that asks for a token, or a program that is nothing to us
    except (OSError, ValueError, TypeError):
        is_ray = False
    if is_ray:
        return address
    named = next((name for name in _ADDRESSES if os.environ.get(name) == address), None)
    if named is not None:
        raise ConfigError(f"no Ray dashboard answers at {address}, which {named} names")
    return None


@contextmanager
def without_addresses() -> Iterator[None]:
    """A block in which Ray's clients go where they are told: they would go to an address of the environment instead."""
    taken = {name: os.environ.pop(name) for name in _ADDRESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


def job_id() -> str | None:
    """The submission id when this driver runs as a Ray job."""
    described = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    if not described:
        return None
    submission: str | None = json.loads(described).get("metadata", {}).get("job_submission_id")
    return submission
