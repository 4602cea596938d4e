"""Running Serve applications of a cluster, seen through its dashboard: which there are, and the policy each is to use.

Speaks HTTP with the dashboard (`http://HEAD:8265`), with Ray's token where there is one (`RAY_AUTH_TOKEN`,
`RAY_AUTH_TOKEN_PATH`, `~/.ray/auth_token`), and imports neither Ray nor models. Serve's REST interface replaces
everything at once: an application that is missing from a `PUT` is deleted. So changes go onto what is there now.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from graft_dist.config import load_config
from graft_dist.errors import ConfigError, GraftError
from serve.serve_args import PolicyPin, UserConfig

IMPORT_PATH = "serve.app:build"
"""What an application of ours is built by."""

DEPLOYMENT = "Decoder"
"""The name of its deployment."""

_PATH = "/api/serve/applications/"
_TIMEOUT_S = 30.0
_MISSES = 5  # looks in a row that fail, while models load and keep the machine busy, before it is an error


@dataclass(frozen=True)
class ServedApplication:
    """One of our applications on a cluster."""

    name: str
    status: str  # Serve's: DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, ...
    message: str  # Serve's reason, where it gives one
    route_prefix: str | None
    target_config: str  # the target's YAML file, as its args name it
    policy: PolicyPin | None  # None also where its user_config cannot be read: replicas refuse that
    num_running: int  # replicas that serve
    pids: tuple[int, ...]  # of these and of those that take another user_config in; each on its own node

    def serves(self, slug: str) -> bool:
        """Whether it serves the target of that name; by its own name, where only the cluster has its configuration."""
        try:
            return load_config(self.target_config).slug == slug
        except ConfigError:
            return self.name == slug


def list_applications(address: str) -> list[ServedApplication]:
    """Our applications on the cluster whose dashboard is at `address`; others are left out.

    Raises:
        ConfigError: nobody answers at the address, or not a Ray dashboard.
    """
    details = _request(address, "GET")
    return [
        _application(name, entry)
        for name, entry in details.get("applications", {}).items()
        if _config_of(entry).get("import_path") == IMPORT_PATH
    ]


def set_policy(address: str, name: str, policy: PolicyPin | None) -> None:
    """Tell an application which policy to use. Its replicas swap between two rounds; nothing restarts.

    Returns once Serve has taken the configuration; what the replicas made of it is in their /healthz.

    Raises:
        ConfigError: no such application, one that was not deployed from a configuration, or the address is wrong.
    """
    details = _request(address, "GET")
    entry = details.get("applications", {}).get(name)
    if entry is None:
        there = ", ".join(details.get("applications", {})) or "none"
        raise ConfigError(f"there is no application {name!r} at {address}; there are: {there}")
    if _config_of(entry).get("import_path") != IMPORT_PATH:
        raise ConfigError(f"the application {name!r} was not deployed with import_path {IMPORT_PATH}")
    application = dict(_config_of(entry))
    deployments = [dict(deployment) for deployment in application.get("deployments") or []]
    own = next((deployment for deployment in deployments if deployment["name"] == DEPLOYMENT), None)
    if own is None:
        own = {"name": DEPLOYMENT}
        deployments.append(own)
    own["user_config"] = UserConfig(policy=policy).model_dump(mode="json")
    application["deployments"] = deployments
    deploy(address, application)


def deploy(
    address: str,
    application: Mapping[str, Any],
    http_options: Mapping[str, Any] | None = None,
) -> None:
    """Add an application to those that run, or replace the one of its name; the others stay as they are.

    Raises:
        ConfigError: Serve refuses the configuration, or the address is wrong.
    """
    details = _request(address, "GET")
    kept = [
        _config_of(entry)
        for name, entry in details.get("applications", {}).items()
        if name != application["name"] and _config_of(entry)
    ]
    config: dict[str, Any] = {"applications": [*kept, dict(application)]}
    config |= _settings(details)
    if http_options:
        config["http_options"] = dict(http_options)
    _request(address, "PUT", config)


def check_free(address: str, name: str) -> None:
    """Raise `ConfigError` if an application of that name is there, ours or not, or if the address is wrong."""
    if is_there(address, name):
        raise ConfigError(
            f"an application {name!r} is on the cluster at {address} already: take it down first, or give it another "
            "policy with `graft promote --address`"
        )


def free_route(address: str, name: str) -> str:
    """Where a new application of that name can be found: at `/`, or at `/NAME` where another is there.

    Raises:
        ConfigError: another has that place too, or the address is wrong.
    """
    there = _request(address, "GET").get("applications", {})
    taken = {entry.get("route_prefix"): other for other, entry in there.items()}
    for route in ("/", f"/{name}"):
        if route not in taken:
            return route
    raise ConfigError(f"the application {taken[f'/{name}']!r} at {address} has the place /{name}: take it down first")


def is_serving(address: str) -> bool:
    """Whether Serve runs on the cluster, with applications or without.

    Raises:
        ConfigError: the address is wrong.
    """
    return bool((_request(address, "GET").get("controller_info") or {}).get("actor_id"))


def remove(address: str, name: str) -> None:
    """Take an application down; its running requests finish first. Nothing happens if it is not there.

    Raises:
        ConfigError: the address is wrong.
    """
    details = _request(address, "GET")
    applications = details.get("applications", {})
    if name not in applications:
        return
    kept = [_config_of(entry) for other, entry in applications.items() if other != name and _config_of(entry)]
    _request(address, "PUT", {"applications": kept, **_settings(details)})


def is_there(address: str, name: str) -> bool:
    """Whether an application of that name, ours or not, is on the cluster, be it only to finish its requests.

    `list_applications` leaves out those that are being deleted: Serve no longer says what they were made of.

    Raises:
        ConfigError: the address is wrong.
    """
    return name in _request(address, "GET").get("applications", {})


def end_serve(address: str) -> None:
    """End Serve itself, its proxies and the port they listen on, unless an application is there.

    Raises:
        ConfigError: the address is wrong.
    """
    if not _request(address, "GET").get("applications"):
        _request(address, "DELETE")


def is_here(address: str) -> bool:
    """Whether a dashboard's address is one of this machine: one that can be listened on."""
    host = urlsplit(address).hostname or ""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


def registry_seen_from(address: str, tracking_uri: str) -> str:
    """The registry's address for replicas of a cluster, which have other working directories than this process.

    Raises:
        ConfigError: it is a file of this machine, and the cluster is on another.
    """
    if tracking_uri.startswith("sqlite:") and not is_here(address):
        raise ConfigError(
            f"the cluster at {address} does not see {tracking_uri}; give --tracking-uri, a server that it sees"
        )
    return absolute_registry(tracking_uri)


def absolute_registry(tracking_uri: str) -> str:
    """The same registry from every working directory."""
    scheme = "sqlite:///"
    if not tracking_uri.startswith(scheme):
        return tracking_uri
    return scheme + str(Path(tracking_uri.removeprefix(scheme)).absolute())


def http_options(address: str) -> dict[str, Any]:
    """Where Serve listens on the cluster, which is settled when it starts; empty while it does not say.

    Raises:
        ConfigError: the address is wrong.
    """
    return dict(_request(address, "GET").get("http_options") or {})


def wait_until_running(address: str, name: str, timeout_s: float) -> ServedApplication:
    """Wait until an application serves.

    Raises:
        GraftError: it could not be deployed, with Serve's reason, or takes longer than `timeout_s`, or the dashboard
            does not answer several times in a row.
    """
    deadline = time.monotonic() + timeout_s
    num_misses = 0
    while True:
        try:
            found = next((one for one in list_applications(address) if one.name == name), None)
            num_misses = 0
        except ConfigError:
            num_misses += 1
            if num_misses == _MISSES:
                raise
            time.sleep(0.5)
            continue
        status = "NOT_STARTED" if found is None else found.status
        if found is not None and status == "RUNNING":
            return found
        if status in ("DEPLOY_FAILED", "UNHEALTHY"):
            assert found is not None
            raise GraftError(f"the application {name!r} could not be deployed: {_last_line(found.message)}")
        if time.monotonic() > deadline:
            raise GraftError(f"the application {name!r} is still {status} after {timeout_s:.0f} s")
        time.sleep(0.5)


def _settings(details: Mapping[str, Any]) -> dict[str, Any]:
    """What a cluster has beside its applications; left out of a `PUT`, it would go back to Serve's defaults."""
    names = ("proxy_location", "http_options", "grpc_options", "target_capacity")
    return {name: details[name] for name in names if details.get(name) is not None}


def _application(name: str, entry: Mapping[str, Any]) -> ServedApplication:
    deployment = entry.get("deployments", {}).get(DEPLOYMENT, {})
    replicas = deployment.get("replicas", [])
    config = _config_of(entry)
    return ServedApplication(
        name=name,
        status=entry.get("status", "NOT_STARTED"),
        message=entry.get("message", ""),
        route_prefix=entry.get("route_prefix"),
        target_config=str((config.get("args") or {}).get("config", "")),
        policy=_policy((deployment.get("deployment_config") or {}).get("user_config")),
        num_running=sum(replica.get("state") == "RUNNING" for replica in replicas),
        pids=tuple(
            replica["pid"]
            for replica in replicas
            if replica.get("state") in ("RUNNING", "UPDATING") and replica.get("pid")
        ),
    )


def _policy(user_config: Any) -> PolicyPin | None:
    try:
        return UserConfig.model_validate(user_config or {}).policy
    except ValidationError:
        return None


def _config_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration an application was deployed from; empty for one that was run from Python."""
    return dict(entry.get("deployed_app_config") or {})


def _request(address: str, method: str, content: Any = None) -> dict[str, Any]:
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{address!r} is no dashboard address: it looks like http://127.0.0.1:8265")
    token = _token()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(address.rstrip("/") + _PATH, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
        raise ConfigError(f"the Ray dashboard at {address} refuses ({error.code}): {_last_line(reason)}") from error
    except OSError as error:
        raise ConfigError(f"no Ray dashboard answers at {address} ({error})") from error
    try:
        return dict(json.loads(body)) if body else {}
    except ValueError as error:
        raise ConfigError(f"what answers at {address} is no Ray dashboard") from error


def _token() -> str | None:
    """The cluster's token, from where Ray's own programs take it; None: there is none, or it is switched off."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError:
            return None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is no text: Ray's token is expected there") from error
    if len(token.split()) > 1:
        raise ConfigError("Ray's token has blanks or line breaks within: it should be one word")
    return token or None


def _last_line(text: str) -> str:
    """Of a traceback, the error; of pydantic's text, what is wrong, without the pointer to its documentation."""
    lines = [line.strip() for line in text.strip().splitlines()]
    lines = [line for line in lines if line and not line.startswith("For further information visit")]
    return lines[-1] if lines else "no reason given"
