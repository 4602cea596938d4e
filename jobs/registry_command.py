"""`graft policies`, `graft promote`, `graft rollback`: the registry of policies, for people."""

from __future__ import annotations

import os
from dataclasses import asdict

from graft_dist.errors import ConfigError, RegistryError
from jobs.out_file import to_json
from serve import applications
from serve.serve_args import PolicyPin, RegistryPin
from storage.registry import PolicyVersion, Promotion, Registry, default_tracking_uri, model_name

_METRICS = ("test_tokens_per_s", "test_mat", "test_mismatch_rate")
_HEADER = (
    f"{'policy':<28}{'version':>8}  {'aliases':<22}{'made':<18}{'tokens/s':>9}{'MAT':>7}{'mismatch':>10}  fingerprint"
)


def tracking_uri(given: str | None) -> str:
    """What was given, else MLFLOW_TRACKING_URI, else a SQLite file of the user's."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or default_tracking_uri()


def run_policies(slug: str | None, uri: str, format: str) -> None:
    """List the registered policies of a target, or of all."""
    versions = Registry(uri).versions(slug)
    if format == "json":
        rows = [{**asdict(version), "created_at": version.created_at.isoformat()} for version in versions]
        print(to_json(rows).rstrip("\n"))
        return
    print("\n".join([_HEADER, *(_line(version) for version in versions)]))
    print(f"{len(versions)} versions in {uri}")


def run_promote(slug: str, version: str, uri: str, address: str | None = None) -> None:
    """Make a version, named by its number or an alias, the champion, and tell those who serve at `address`."""
    registry = Registry(uri)
    number = registry.resolve(slug, version)
    if number is None:
        raise RegistryError(f"the registry {uri} holds no {model_name(slug)} {version!r}; see graft policies")
    serving = [] if address is None else _serving(slug, address, uri)
    now = registry.promote(slug, number)
    print(_promoted(slug, now))
    _tell(serving, address, now.champion, uri)


def run_rollback(slug: str, uri: str, address: str | None = None) -> None:
    """Make the previous champion the champion again, and tell those who serve at `address`."""
    serving = [] if address is None else _serving(slug, address, uri)
    now = Registry(uri).rollback(slug)
    print(_promoted(slug, now))
    _tell(serving, address, now.champion, uri)


def _serving(slug: str, address: str, uri: str) -> list[str]:
    """The applications that serve the target, asked before anything changes: a wrong address changes nothing."""
    applications.registry_seen_from(address, uri)  # or it is refused
    names = [one.name for one in applications.list_applications(address) if one.serves(slug)]
    if not names:
        raise ConfigError(f"no application at {address} serves {slug}")
    return names


def _tell(serving: list[str], address: str | None, version: int, uri: str) -> None:
    """Put the version itself into the configuration of each application, so that all its replicas use the same."""
    for name in serving:
        assert address is not None
        seen = applications.registry_seen_from(address, uri)
        pin = PolicyPin(registry=RegistryPin(version=version, tracking_uri=seen))
        applications.set_policy(address, name, pin)
        print(f"{name} at {address} is told to decode with version {version}; its /healthz shows when it does")


def _promoted(slug: str, now: Promotion) -> str:
    previous = "none" if now.previous is None else f"version {now.previous}"
    return f"{model_name(slug)}: champion is version {now.champion}, previous is {previous}"


def _line(version: PolicyVersion) -> str:
    rate, mat, mismatch = (version.metrics.get(name) for name in _METRICS)
    return (
        f"{version.name:<28}{version.version:>8}  {', '.join(version.aliases):<22}{version.created_at:%Y-%m-%d %H:%M}  "
        + ("" if rate is None else f"{rate:.1f}").rjust(9)
        + ("" if mat is None else f"{mat:.2f}").rjust(7)
        + ("" if mismatch is None else f"{mismatch:.1%}").rjust(10)
        + f"  {version.tags.get('graft.policy_fingerprint', '')}"
    ).rstrip()
