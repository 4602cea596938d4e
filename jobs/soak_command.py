"""What a soak does to a running Serve application, through its dashboard: swap the policy, find the processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from graft_dist.errors import ConfigError, GraftError, PolicyError
from jobs.soak import ReplicaControl
from serve import applications
from serve.serve_args import PolicyPin, RegistryPin


def parse_policies(listed: str, tracking_uri: str | None, address: str) -> list[PolicyPin | None]:
    """Policies with commas between them: `none`, a folder, `builtin:NAME`, or a registered version such as `v3`.

    Raises `PolicyError` for fewer than two, and for a version without a registry; `ConfigError` for a registry that
    the cluster at `address` does not see.
    """
    pins: list[PolicyPin | None] = []
    for text in (part.strip() for part in listed.split(",")):
        if text == "none":
            pins.append(None)
        elif text[:1] == "v" and text[1:].isdigit():
            if tracking_uri is None:
                raise PolicyError(f"--policies names the registered version {text}: say where with --tracking-uri")
            registry = RegistryPin(
                version=int(text[1:]), tracking_uri=applications.registry_seen_from(address, tracking_uri)
            )
            pins.append(PolicyPin(registry=registry))
        else:
            # Replicas have another working directory.
            pins.append(PolicyPin(folder=text if text.startswith("builtin:") else str(Path(text).absolute())))
    different = list({_name(pin): pin for pin in pins}.values())
    if len(different) < 2:
        raise PolicyError(f"--policies is {listed!r}: to swap, name at least two of them")
    return different


def application_control(address: str, name: str | None, policies: Sequence[PolicyPin | None]) -> ReplicaControl:
    """Control over the application `name` (default: the only one) at a dashboard; no policies: nothing is swapped.

    Raises `GraftError` if it is not there.
    """
    running = {application.name: application for application in applications.list_applications(address)}
    names = list(running)
    if name is None and len(names) != 1:
        raise ConfigError(f"there are {len(names)} applications at {address}: name one of {', '.join(names)} (--app)")
    chosen = names[0] if name is None else name
    if chosen not in names:
        raise ConfigError(f"there is no application {chosen!r} at {address}; there are: {', '.join(names) or 'none'}")
    # The policy that is in force comes last: each swap has to change something.
    others = [policy for policy in policies if _name(policy) != _name(running[chosen].policy)]
    turns = deque([*others, *(policy for policy in policies if policy not in others)])

    def swap() -> str:
        policy = turns[0]
        applications.set_policy(address, chosen, policy)
        turns.rotate(-1)  # only now: what failed is asked for again, whether or not it was heard
        return _name(policy)

    def pids() -> list[int]:
        found = next((one for one in applications.list_applications(address) if one.name == chosen), None)
        if found is None:
            raise GraftError(f"the application {chosen!r} has gone")
        replicas = [pid for pid in found.pids if os.path.exists(f"/proc/{pid}")]
        return [*replicas, *proxies_beside(replicas)]

    return ReplicaControl(swap if policies else None, pids)


def proxies_beside(replicas: Sequence[int]) -> list[int]:
    """Serve's proxies on this machine that belong to the same Ray node as one of the replicas.

    They hold the clients' connections, and Serve's details have no pid of theirs; a node's processes have one parent.
    """
    nodes = {_parent(pid) for pid in replicas} - {None}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if command.startswith(b"ray::ProxyActor") and _parent(int(folder.name)) in nodes:
            found.append(int(folder.name))
    return sorted(found)


def _parent(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[1])


def _name(policy: PolicyPin | None) -> str:
    return "none" if policy is None else policy.describe()
