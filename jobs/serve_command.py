"""`graft serve`: one target behind an OpenAI-compatible endpoint on this machine, until Ctrl-C.

The application goes to the cluster that `--address` or the environment names, or that runs on this machine; where
there is none, or with `--address local`, a cluster is started (`RayHead`). It is deployed as `serve deploy` would, so
that `graft promote --address` and Ray's own tools work with it. What this command started, it stops.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import ConfigError, GraftError
from graft_dist.policy import shipped_policy
from jobs.cluster import running_dashboard
from jobs.ray_head import RayHead
from serve import applications
from serve.serve_args import ServeArgs

START_TIMEOUT_S = 900.0
"""How long models may take to load."""

_STOP_MARGIN_S = 10.0  # beyond the time that a replica itself may take to drain


@dataclass(frozen=True)
class ServeRequest:
    """What `graft serve` was asked for."""

    config: str
    host: str
    port: int
    replicas: int
    policy: str | None  # a folder, "builtin:NAME" or "none"; None: the shipped one where it fits
    methods: tuple[str, ...]
    threads: int | None
    address: str | None  # of a cluster's dashboard; "local": start a cluster here; None: only where there is none
    api_keys_file: Path | None
    followed_registry: str | None = None  # MLflow's address: its champion is put in force; None: the policy stays


def run_serve(request: ServeRequest) -> int:
    """Deploy, print where it is, wait for Ctrl-C (or SIGTERM), take it down.

    Returns the exit code: 0, or 130 when it was interrupted before it served.
    """
    settings = load_config(request.config)  # before anything is started
    if request.api_keys_file is not None and not request.api_keys_file.is_file():
        raise ConfigError(f"there is no file of API keys {request.api_keys_file}")
    running = _running_cluster(request.address)
    application = _application(request, settings, running)
    name, is_serving = settings.slug, False
    ending = _Ending()
    signals = {number: signal.signal(number, ending) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ExitStack() as stack:
            is_first = running is None or not applications.is_serving(running)
            if is_first and (running is None or applications.is_here(running)):
                _check_port(request.host, request.port)
            address = running or _start_ray(stack)
            _say(f"loading {settings.target} ...")
            if running is not None:
                applications.check_free(address, name)  # what is there is not ours to replace, nor to take down
                application["route_prefix"] = applications.free_route(address, name)
                if is_first:
                    stack.callback(_end_serve, address)
            drain_s = ServeArgs.model_validate(application["args"]).drain_s
            stack.callback(_take_down, address, name, drain_s + _STOP_MARGIN_S, ending)
            options = {"host": request.host, "port": request.port, "request_timeout_s": None}
            applications.deploy(address, application, http_options=options)
            applications.wait_until_running(address, name, START_TIMEOUT_S)
            is_serving = True
            _say_where(request, name, address, application["route_prefix"])
            while True:
                time.sleep(3600)
    except _Stop:
        return 0 if is_serving else 130
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)


class _Stop(BaseException):
    """Somebody wants the server to end. Not an `Exception`: nothing on the way may take it for a failure."""


class _Ending:
    """Handles Ctrl-C and SIGTERM: the first asks the server to end, a second not to wait for running requests.

    Only the first raises: what follows takes everything down, and must not be interrupted half-way.
    """

    def __init__(self) -> None:
        self.is_hurried = False
        self._is_asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            self.is_hurried = True
        else:
            self._is_asked = True
            raise _Stop


def _running_cluster(wanted: str | None) -> str | None:
    """The dashboard's address of the cluster to serve on; None: one is to be started."""
    if wanted is not None:
        return None if wanted == "local" else wanted
    found = running_dashboard()
    if found is not None:
        _say(f"serving on the Ray that runs at {found} (--address local would start another)")
    return found


def _check_port(host: str, port: int) -> None:
    """Refuse a port that somebody listens on: Serve shares it, and clients would get answers from either in turns."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be listened on ({error.strerror}): give another --port, or --address to add "
            "this target to a cluster that serves already"
        ) from error


def _start_ray(stack: ExitStack) -> str:
    """Start a head on this machine, which ends with `stack`. Returns its dashboard's address."""
    num_cpus = os.cpu_count() or 1
    _say(f"starting Ray on this machine ({num_cpus} CPUs) ...")
    # Replicas import what this process imports, also from a checkout that is not installed.
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment["RAY_worker_niceness"] = "0"  # Ray's default is the lowest priority, which is not for a server
    return stack.enter_context(RayHead(num_cpus=num_cpus, environment=environment)).dashboard_url


def _application(request: ServeRequest, settings: TargetConfig, running: str | None) -> dict[str, Any]:
    """The application as a Serve config describes it, for a cluster that runs or one that is to be started here."""
    file = Path(request.config).expanduser()
    args: dict[str, Any] = {
        "config": str(file.resolve()) if file.is_file() else request.config,
        "replicas": request.replicas,
        "methods": list(request.methods),
    }
    if running is None:
        # This machine is ours: its processors are shared out among the replicas. Reserved is half of them, so that
        # there is room for another application, or for a job, beside this one.
        share = max(1, (os.cpu_count() or 1) // request.replicas)
        args["num_cpus"] = 0.5 * (os.cpu_count() or 1) / request.replicas
        args["threads"] = request.threads or settings.threads or share
    elif request.threads is not None:
        args["threads"] = request.threads
    if request.api_keys_file is not None:
        args["api_keys_file"] = str(request.api_keys_file.resolve())
    if request.followed_registry is not None:
        if request.policy not in (None, "none"):
            raise ConfigError(
                f"--follow-champion would put the registry's champion in the place of --policy {request.policy}: give "
                "one of the two"
            )
        registry = request.followed_registry
        seen = applications.absolute_registry(registry)
        if running is not None:
            seen = applications.registry_seen_from(running, registry)
        args["poll_champion"] = {"tracking_uri": seen}
    policy = request.policy or default_policy(settings)
    pin = None if policy == "none" else {"folder": _folder(policy)}
    return {
        "name": settings.slug,
        "route_prefix": "/",
        "import_path": applications.IMPORT_PATH,
        "args": args,
        "deployments": [{"name": applications.DEPLOYMENT, "user_config": {"policy": pin}}],
    }


def default_policy(settings: TargetConfig) -> str:
    """The policy that comes with the package, where the drafter is the one that it was learned with; else "none"."""
    builtin = f"builtin:{settings.slug}"
    return builtin if settings.drafter == builtin and shipped_policy(settings.slug) is not None else "none"


def _folder(policy: str) -> str:
    if policy.startswith("builtin:"):
        return policy
    folder = Path(policy).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"there is no policy folder {policy}")
    return str(folder.resolve())


def _say_where(request: ServeRequest, name: str, address: str, route: str) -> None:
    try:
        options = applications.http_options(address)
    except GraftError:  # it serves all the same
        options = {}
    # A cluster's Serve that ran before listens where it did, whatever was asked for now.
    host, port = options.get("host") or request.host, options.get("port") or request.port
    if host in ("0.0.0.0", "::"):
        host = urlsplit(address).hostname  # any address of its machines, and the dashboard is on one
    url = (f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}") + route.rstrip("/")
    print(f"{name} is served at {url}/v1 (page: {url}/, health: {url}/healthz)", flush=True)
    print(f"Ray dashboard: {address}", flush=True)
    print("Ctrl-C ends it.", flush=True)


def _take_down(address: str, name: str, patience_s: float, ending: _Ending) -> None:
    """Take the application down and wait until its requests have finished, or nobody wants to wait for them."""
    _say("stopping; running requests may finish (Ctrl-C again cuts them) ...")
    try:
        applications.remove(address, name)
        deadline = time.monotonic() + patience_s
        while _is_there(address, name):
            if ending.is_hurried or time.monotonic() > deadline:
                _say("requests still run; nobody waits for them any more")
                return
            time.sleep(0.3)
    except GraftError as error:
        _say(f"the application could not be taken down: {error}")


def _end_serve(address: str) -> None:
    """End Serve, which ran on the cluster for this application alone."""
    try:
        applications.end_serve(address)
    except GraftError as error:
        _say(f"Serve could not be ended: {error}")


def _is_there(address: str, name: str) -> bool:
    """Whether the application may still have requests: also where a busy dashboard does not answer."""
    try:
        return applications.is_there(address, name)
    except GraftError:
        return True


def _say(text: str) -> None:
    print(f"graft: {text}", file=sys.stderr, flush=True)
