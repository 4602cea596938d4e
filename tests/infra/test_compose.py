"""infra/compose.yaml and what its services read, without Docker."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import re
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

import graft_dist
from serve.serve_args import ServeArgs

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
OURS = {"ray-head", "ray-worker", "ray-worker-gpu", "mlflow", "s3-bucket"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((INFRA / "compose.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def schema() -> Any:
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    return json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))


def test_the_file_keeps_the_compose_schema(compose: dict[str, Any], schema: Any) -> None:
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message[:200] for error in validator.iter_errors(compose)] == []
    broken = json.loads(json.dumps(compose))
    broken["services"]["mlflow"]["portz"] = broken["services"]["mlflow"].pop("ports")
    assert not validator.is_valid(broken)


def test_every_port_is_bound_to_loopback(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 5
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)


def test_images_are_pinned_and_ours_carry_our_versions(compose: dict[str, Any]) -> None:
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    for name, service in compose["services"].items():
        repository, _, tag = service["image"].partition(":")
        assert re.search(r"\d+\.\d+", tag) and "latest" not in tag, name
        if repository == "graft-dist":
            assert tag == f"{graft_dist.__version__}-{service['build']['args']['VARIANT']}"
        elif repository == "graft-mlflow" and "mlflow" in lock:
            assert tag == lock["mlflow"]
    assert {name for name, service in compose["services"].items() if "build" in service} == OURS


def test_services_are_confined_limited_and_watched(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"cpus", "memory"} <= set(service["deploy"]["resources"]["limits"]), name
        assert "healthcheck" in service or name == "s3-bucket", name
        assert service.get("privileged") is None and service.get("network_mode") is None, name
        if name in OURS:
            assert service["cap_drop"] == ["ALL"], name


def test_secrets_are_files_that_git_and_docker_ignore(compose: dict[str, Any]) -> None:
    declared = compose["secrets"]
    used = {name for service in compose["services"].values() for name in service.get("secrets", [])}
    assert used == set(declared)
    assert {secret["file"] for secret in declared.values()} == {f"secrets/{name}" for name in declared}
    assert "/infra/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    for name, service in compose["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"TOKEN|KEY|PASSWORD|SECRET|CREDENTIALS", key):
                assert value.startswith("/run/secrets/"), f"{name}: {key}"
        mentioned = set(re.findall(r"/run/secrets/([\w.]+)", json.dumps(service)))
        assert mentioned == set(service.get("secrets", [])), name


def test_ray_asks_for_its_token_everywhere(compose: dict[str, Any]) -> None:
    for name in ("ray-head", "ray-worker", "ray-worker-gpu"):
        environment = compose["services"][name]["environment"]
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/secrets/ray_token")
        assert "--num-cpus=0" in compose["services"][name]["command"] or name != "ray-head"


def test_what_is_served_is_reached_from_outside_and_follows_the_registry(compose: dict[str, Any]) -> None:
    ours, laptops = (
        yaml.safe_load((INFRA / "serve" / f"{name}.yaml").read_text()) for name in ("compose", "smollm2-135m")
    )
    assert ours["http_options"] == laptops["http_options"] | {"host": "0.0.0.0"}
    port = ours["http_options"]["port"]
    assert f"127.0.0.1:{port}:{port}" in compose["services"]["ray-head"]["ports"]
    (application,) = ours["applications"]
    followed = ServeArgs.model_validate(application["args"]).poll_champion
    assert followed is not None
    for name in ("ray-head", "ray-worker", "ray-worker-gpu"):  # where jobs promote, and where replicas look
        assert compose["services"][name]["environment"]["MLFLOW_TRACKING_URI"] == followed.tracking_uri
    place = urlsplit(followed.tracking_uri)
    assert place.hostname is not None and f"--port {place.port}" in compose["services"][place.hostname]["command"][-1]
    del application["args"]["poll_champion"]
    assert ours["applications"] == laptops["applications"]


def test_secrets_are_made_once(compose: dict[str, Any], tmp_path: Path) -> None:
    module = importlib.util.spec_from_file_location("make_secrets", INFRA / "make_secrets.py")
    assert module is not None and module.loader is not None
    make_secrets = importlib.util.module_from_spec(module)
    module.loader.exec_module(make_secrets)
    folder = tmp_path / "secrets"
    assert set(make_secrets.main(folder)) == set(compose["secrets"])
    before = {file.name: file.read_text() for file in folder.iterdir()}
    assert make_secrets.main(folder) == []
    assert {file.name: file.read_text() for file in folder.iterdir()} == before
    assert len(set(before.values())) == len(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "ray_token").stat().st_mode) == 0o444
    (identity,) = json.loads(before["s3_identities.json"])["identities"]
    assert all(identity["credentials"][0][key] in before["s3_credentials"] for key in ("accessKey", "secretKey"))


def test_commands_know_their_options(compose: dict[str, Any]) -> None:
    """Of `ray start`, `ray health-check` and `mlflow server`; the other images' programs are not at hand."""
    from mlflow.cli import server
    from ray.scripts.scripts import healthcheck, start

    services = compose["services"]
    commands = [(start, services[name]["command"]) for name in services if name.startswith("ray-")]
    commands += [(healthcheck, " ".join(services["ray-worker"]["healthcheck"]["test"]))]
    commands += [(server, services["mlflow"]["command"][-1])]
    for command, line in commands:
        known = {option for parameter in command.params for option in parameter.opts}
        used = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", line))
        assert used and used - known == set()


def test_what_is_mounted_exists(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (INFRA / source).exists() if source.startswith(".") else source in compose["volumes"], name


def test_prometheus_scrapes_the_ports_that_ray_exports(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())
    assert [(INFRA / "prometheus" / file).exists() for file in config["rule_files"]] == [True]
    (ray,) = [job for job in config["scrape_configs"] if job["job_name"] == "ray"]
    (discovery,) = ray["dns_sd_configs"]
    services = [name for name in compose["services"] if name.startswith("ray-")]
    assert sorted(discovery["names"]) == sorted(services)
    for name in services:
        assert f"--metrics-export-port={discovery['port']}" in compose["services"][name]["command"]


def test_every_alert_says_what_and_how_urgent() -> None:
    (group,) = yaml.safe_load((INFRA / "prometheus" / "rules.yml").read_text())["groups"]
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert len(group["rules"]) >= 5
    for rule in group["rules"]:
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
        assert rule["labels"]["severity"] in ("page", "warn") and rule["annotations"]["summary"].endswith(".")
        assert f"`{rule['alert']}`" in page, f"docs/operations.md does not say what to do about {rule['alert']}"


def test_grafana_gets_dashboards_and_their_source(compose: dict[str, Any]) -> None:
    provisioning = INFRA / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "graft.yaml").read_text())["providers"]
    mounted = {volume.split(":")[0]: volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]}
    assert mounted["./grafana"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    for dashboard in (INFRA / "grafana").glob("*.json"):
        uids = set(re.findall(r'"uid": "([^"]+)"', json.dumps(json.loads(dashboard.read_text())["panels"])))
        assert all(uid == source["uid"] or uid.startswith("$") for uid in uids), dashboard.name
