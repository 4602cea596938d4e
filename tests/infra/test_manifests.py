"""The Kubernetes manifests, without a cluster: rendered, held against every schema there is, and against the code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

import graft_dist
from graft_dist.config import load_config
from graft_dist.schedule import Schedule
from jobs import retrain
from jobs.schedule import TARGET_KEY
from jobs.schedule_command import with_entrypoint
from serve.serve_args import ServeArgs
from tests.infra import kuberay_schema
from tests.infra.kustomize import Manifest, build, containers, documents, pods
from tests.infra.test_schedule_files import check_command

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "infra" / "kuberay"
TARGETS = ("qwen3-8b", "smollm2-135m")
FOLDERS = ("platform", *(f"overlays/{target}" for target in TARGETS))
OLDEST_KUBERNETES = "1.34.0"
"""The oldest version that upstream still supports; newer ones only add."""


@cache
def rendered(folder: str) -> list[Manifest]:
    return build(KUBERAY / folder)


def everything() -> list[Manifest]:
    return [manifest for folder in FOLDERS for manifest in rendered(folder)]


def of_kind(target: str, kind: str, name: str = "") -> Manifest:
    found = [one for one in rendered(f"overlays/{target}") if one["kind"] == kind and name in one["metadata"]["name"]]
    assert len(found) == 1
    return found[0]


def label(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def locked(package: str) -> str:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = re.search(rf"^{package}==(\S+)$", lock, re.MULTILINE)
    assert found, f"{package} is not in requirements.lock"
    return found[1]


def test_what_an_overlay_makes() -> None:
    for target in TARGETS:
        assert sorted(map(label, rendered(f"overlays/{target}"))) == [
            f"CronJob/graft-retrain-{target}",
            f"RayCluster/graft-{target}",
            f"RayJob/graft-collect-{target}",
            f"RayJob/graft-train-{target}",
            f"RayService/graft-serve-{target}",
        ]
    names = [(one["kind"], one["metadata"]["name"]) for one in everything()]
    assert len(names) == len(set(names))  # all overlays fit into one namespace


@pytest.mark.parametrize("folder", FOLDERS)
def test_our_rendering_is_kustomizes_own(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here: our rendering is not compared with kustomize's")
    done = subprocess.run([kubectl, "kustomize", KUBERAY / folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = {label(one): one for one in yaml.safe_load_all(done.stdout)}
    assert theirs == {label(one): one for one in rendered(folder)}


def test_custom_resources_keep_kuberays_schema() -> None:
    schemas = kuberay_schema.load()
    found = {label(one): kuberay_schema.errors(schemas, one) for one in everything() if "ray.io" in one["apiVersion"]}
    assert len(found) == 4 * len(TARGETS)
    assert {name: errors for name, errors in found.items() if errors} == {}


def test_kuberays_schema_finds_mistakes() -> None:
    schemas = kuberay_schema.load()
    job = json.loads(json.dumps(of_kind("qwen3-8b", "RayJob", "collect")))
    job["spec"]["entrypointt"] = job["spec"].pop("entrypoint")
    job["spec"]["backoffLimit"] = "none"
    assert len(kuberay_schema.errors(schemas, job)) == 2


def test_core_resources_keep_kubernetes_schema() -> None:
    core = [one for one in everything() if "ray.io" not in one["apiVersion"]]
    assert len(core) >= 8
    for manifest in core:
        kubernetes_validate.validate(manifest, OLDEST_KUBERNETES, strict=True)


def test_pods_inside_custom_resources_keep_kubernetes_schema() -> None:
    """KubeRay's schema of a pod leaves some of its rules out; so each is also looked at as a plain pod."""
    for manifest in everything():
        for number, spec in enumerate(pods(manifest)):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": spec}
            kubernetes_validate.validate(pod, OLDEST_KUBERNETES, strict=True)


def test_kubernetes_schema_finds_mistakes() -> None:
    job = json.loads(json.dumps(of_kind("qwen3-8b", "CronJob")))
    job["spec"]["concurencyPolicy"] = job["spec"].pop("concurrencyPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, OLDEST_KUBERNETES, strict=True)


def test_every_container_is_confined() -> None:
    for manifest in everything():
        for spec in pods(manifest):
            where = label(manifest)
            assert spec["securityContext"]["runAsNonRoot"] is True, where
            assert spec["securityContext"]["runAsUser"] > 0, where
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
            for container in (*spec["containers"], *spec.get("initContainers", [])):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                }, where
                assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
                assert "memory" in container["resources"]["limits"], where
            is_head = any(container["name"] == "ray-head" for container in spec["containers"])
            assert is_head or spec["automountServiceAccountToken"] is False, where


def test_servers_have_probes() -> None:
    """KubeRay adds those of Ray's pods; ours are the MLflow server's."""
    (server,) = [one for one in rendered("platform") if one["kind"] == "Deployment"]
    for container in server["spec"]["template"]["spec"]["containers"]:
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def test_commands_know_their_options() -> None:
    from mlflow.cli import server
    from ray.scripts.scripts import start

    (deployment,) = [one for one in rendered("platform") if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    known = {option for parameter in server.params for option in parameter.opts}
    assert {word.split("=")[0] for word in container["args"] if word.startswith("--")} - known == set()
    known = {option for parameter in start.params for option in parameter.opts}
    for target in TARGETS:
        for spec in clusters(target):
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                assert {f"--{name}" for name in group["rayStartParams"]} - known == set()


def test_images_are_pinned_to_this_version_and_ray_to_the_lock() -> None:
    expected = {
        "platform": {f"registry.example.com/graft-mlflow:{mlflow_version()}"},
        "overlays/qwen3-8b": {f"registry.example.com/graft-dist:{graft_dist.__version__}-cuda"},
        "overlays/smollm2-135m": {f"registry.example.com/graft-dist:{graft_dist.__version__}-cpu"},
    }
    for folder in FOLDERS:
        assert {container["image"] for one in rendered(folder) for container in containers(one)} == expected[folder]
    versions = re.findall(r"rayVersion['\"]?: ([\w.]+)", "\n".join(map(yaml.safe_dump, everything())))
    assert set(versions) == {locked("ray")}
    assert len(versions) == 2 * len(TARGETS)


def mlflow_version() -> str:
    tag = re.search(r"graft-mlflow:([\w.]+)", (ROOT / "infra" / "compose.yaml").read_text(encoding="utf-8"))
    assert tag is not None
    return tag[1]


def test_no_secret_is_in_a_manifest_and_each_that_is_named_is_explained() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set()
    for manifest in everything():
        assert manifest["kind"] != "Secret", label(manifest)
        text = json.dumps(manifest)
        named |= set(re.findall(r'"secretKeyRef": \{"name": "([\w-]+)"', text))
        named |= set(re.findall(r'"secretRef": \{"name": "([\w-]+)"', text))
        named |= set(re.findall(r'"secretName": "([\w-]+)"', text))
        for container in containers(manifest):
            for variable in container.get("env", []):
                is_sensitive = re.search(r"TOKEN|KEY|PASSWORD|SECRET", variable["name"])
                assert not is_sensitive or "valueFrom" in variable, f"{label(manifest)}: {variable['name']}"
    assert named == {"graft-api-keys", "graft-hub", "graft-mlflow", "graft-ray-token"}
    assert [name for name in named if f"create secret generic {name}" not in page] == []


def clusters(target: str) -> list[dict[str, Any]]:
    service = of_kind(target, "RayService")["spec"]["rayClusterConfig"]
    return [of_kind(target, "RayCluster")["spec"], service]


def test_heads_take_no_work_and_workers_come_and_go() -> None:
    for target in TARGETS:
        for spec in clusters(target):
            assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
            assert spec["authOptions"] == {"mode": "token", "secretName": "graft-ray-token"}
            assert spec["enableInTreeAutoscaling"] is True
            (workers,) = spec["workerGroupSpecs"]
            assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
        jobs, serve = (spec["workerGroupSpecs"][0] for spec in clusters(target))
        assert (jobs["minReplicas"], serve["minReplicas"]) == (0, 1)


@pytest.mark.parametrize("target", TARGETS)
def test_workers_have_what_the_target_asks_for(target: str) -> None:
    resources = load_config(target).resources
    for spec in clusters(target):
        for container in containers(spec["workerGroupSpecs"]):
            limits = container["resources"]["limits"]
            assert int(limits.get("nvidia.com/gpu", "0")) >= resources.num_gpus
            assert int(limits["cpu"]) >= resources.num_cpus
    entrypoint = of_kind(target, "RayJob", "collect")["spec"]["entrypoint"]
    wanted = re.search(r"--actors (\d+)", entrypoint)
    workers = clusters(target)[0]["workerGroupSpecs"][0]
    assert wanted is not None and int(wanted[1]) <= workers["maxReplicas"]


@pytest.mark.parametrize("target", TARGETS)
def test_jobs_go_to_their_targets_cluster(target: str) -> None:
    for name in ("collect", "train"):
        spec = of_kind(target, "RayJob", name)["spec"]
        assert spec["clusterSelector"] == {"ray.io/cluster": of_kind(target, "RayCluster")["metadata"]["name"]}
        # With a cluster of somebody else's KubeRay refuses these.
        assert spec["backoffLimit"] == 0
        assert not {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "suspend", "rayClusterSpec"} & set(spec)


@pytest.mark.parametrize("target", TARGETS)
def test_jobs_wait_for_workers_that_have_yet_to_start(target: str) -> None:
    """Without jobs there are no workers, and a job that does not wait for them refuses so small a cluster."""
    assert of_kind(target, "RayCluster")["spec"]["workerGroupSpecs"][0]["replicas"] == 0
    entrypoints = [one["spec"]["entrypoint"] for one in rendered(f"overlays/{target}") if one["kind"] == "RayJob"]
    assert len(entrypoints) == 2
    for entrypoint in entrypoints:
        words = shlex.split(entrypoint)
        assert float(words[words.index("--wait-for-nodes") + 1]) == 1200, entrypoint


def test_the_ray_cron_job_that_is_shown_is_one_of_our_ray_jobs_on_schedule() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (cron,) = [one for one in shown if one.get("kind") == "RayCronJob"]
    target = load_config("qwen3-8b")
    assert target.schedule is not None
    assert (cron["spec"]["schedule"], cron["spec"]["timeZone"]) == (target.schedule.cron, target.schedule.timezone)
    job, ours = cron["spec"]["jobTemplate"], of_kind("qwen3-8b", "RayJob", "train")["spec"]
    assert job == ours | {"entrypoint": job["entrypoint"], "metadata": {TARGET_KEY: target.slug}}
    (container,) = containers(of_kind("qwen3-8b", "CronJob"))
    options = dict(argument.split("=", 1) for argument in container["args"][3:])
    assert job["entrypoint"] == with_entrypoint(target.schedule, options["--entrypoint"]).command(options["--config"])
    assert cron["metadata"]["namespace"] == of_kind("qwen3-8b", "CronJob")["metadata"]["namespace"]
    assert kuberay_schema.errors(kuberay_schema.load(), cron) == []


@pytest.mark.parametrize("target", TARGETS)
def test_the_cron_job_submits_at_the_targets_own_schedule(target: str) -> None:
    spec = of_kind(target, "CronJob")["spec"]
    schedule = load_config(target).schedule
    assert isinstance(schedule, Schedule)
    assert (spec["schedule"], spec["timeZone"]) == (schedule.cron, schedule.timezone)
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] <= schedule.max_lateness_minutes * 60
    (container,) = containers(spec)
    check_command(container["args"])
    assert container["command"] == ["graft"] and container["args"][:3] == ["schedule", "submit", "--wait"]
    options = dict(argument.split("=", 1) for argument in container["args"][3:])
    assert load_config(ROOT / options["--config"]) == load_config(target)
    assert options["--address"] == f"http://{of_kind(target, 'RayCluster')['metadata']['name']}-head-svc:8265"
    assert with_entrypoint(schedule, options["--entrypoint"]).cron == schedule.cron


def serve_config(target: str) -> dict[str, Any]:
    config = yaml.safe_load(of_kind(target, "RayService")["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("target", TARGETS)
def test_the_service_is_the_one_of_infra_serve(target: str) -> None:
    file = ROOT / "infra" / "serve" / f"{target}.yaml"
    if not file.exists():
        pytest.skip(f"{file.name} is not there yet")
    (theirs,) = documents(file)
    ours = json.loads(json.dumps(serve_config(target)))
    for config in (ours, theirs):  # a file for a laptop follows no registry
        (application,) = config["applications"]
        application["args"].pop("poll_champion", None)
    assert ours["applications"] == theirs["applications"]
    assert ours["http_options"] == theirs["http_options"] | {"host": "0.0.0.0"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_service_follows_the_registry_that_the_jobs_promote_in(target: str) -> None:
    (application,) = serve_config(target)["applications"]
    followed = ServeArgs.model_validate(application["args"]).poll_champion
    assert followed is not None
    for spec in clusters(target):
        for container in containers(spec):
            (variable,) = [one for one in container["env"] if one["name"] == "MLFLOW_TRACKING_URI"]
            assert followed.tracking_uri == variable["value"]
    place = urlsplit(followed.tracking_uri)
    (service,) = [one for one in rendered("platform") if one["kind"] == "Service"]
    assert (place.hostname, place.port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])


@pytest.mark.parametrize("target", TARGETS)
def test_pods_live_until_the_longest_request_has_ended(target: str) -> None:
    service = of_kind(target, "RayService")["spec"]
    (application,) = serve_config(target)["applications"]
    drain_s = ServeArgs.model_validate(application["args"]).drain_s
    assert service["rayClusterDeletionDelaySeconds"] > drain_s
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s


@pytest.mark.parametrize("target", TARGETS)
def test_ray_serve_takes_the_configuration_and_the_builder_its_arguments(target: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(serve_config(target))
    assert [application.import_path for application in parsed.applications] == ["serve.app:build"]
    if not (ROOT / "serve" / "app.py").exists():
        pytest.skip("serve/app.py is not there yet")
    from ray.serve import Application

    from serve.app import build as build_application
    from serve.serve_args import ServeArgs

    for application in parsed.applications:
        assert isinstance(build_application(ServeArgs.model_validate(application.args)), Application)


@cache
def help_of(script: str) -> str:
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["collect", "train"])
def test_entry_points_know_their_options(target: str, name: str) -> None:
    words = shlex.split(of_kind(target, "RayJob", name)["spec"]["entrypoint"])
    assert words[0] == "python"
    assert load_config(ROOT / words[words.index("--config") + 1]) == load_config(target)
    if not (ROOT / words[1]).exists():
        pytest.skip(f"{words[1]} is not there yet")
    known = set(re.findall(r"--[a-z][a-z-]*", help_of(words[1])))
    assert {word for word in words if word.startswith("--")} - known == set()


@pytest.mark.parametrize("target", TARGETS)
def test_the_scheduled_entry_points_know_their_options(target: str) -> None:
    schedule = load_config(target).schedule
    assert schedule is not None
    (container,) = containers(of_kind(target, "CronJob"))
    options = dict(argument.split("=", 1) for argument in container["args"][3:])
    in_cluster = with_entrypoint(schedule, options["--entrypoint"])
    for one in (schedule, in_cluster):
        words = shlex.split(one.command(options["--config"]))
        if not (ROOT / words[1]).exists():
            pytest.skip(f"{words[1]} is not there yet")
        known = set(re.findall(r"--[a-z][a-z-]*", help_of(words[1])))
        assert {word for word in words if word.startswith("--")} - known == set()


@pytest.mark.parametrize("target", TARGETS)
def test_no_retraining_trains_in_the_small_head(target: str) -> None:
    """A job's own process runs in the head; workers of Ray Train do not."""
    (container,) = containers(of_kind(target, "CronJob"))
    options = dict(argument.split("=", 1) for argument in container["args"][3:])
    schedule = load_config(target).schedule
    assert schedule is not None
    command = with_entrypoint(schedule, options["--entrypoint"]).command(str(ROOT / options["--config"]))
    made = retrain.request_from(retrain._parser().parse_args(shlex.split(command)[2:]))
    assert made.settings.num_workers >= 1


def test_network_policies_close_what_they_do_not_open() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in rendered("platform") if one["kind"] == "NetworkPolicy"}
    assert policies["graft-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (clients,) = policies["graft-clients"]["ingress"]
    assert clients["ports"] == [{"port": 8000}]
    selected = policies["graft-internal"]["podSelector"]["matchLabels"].items()
    for manifest in everything():
        for template in templates(manifest):
            assert selected <= template["metadata"]["labels"].items(), label(manifest)
    roles = {
        template["metadata"]["labels"].get("graft-dist/role")
        for manifest in everything()
        for template in templates(manifest)
    }
    assert roles == {None, "jobs", "serve", "submitter"}


def test_the_page_names_the_ports_that_are_let_out() -> None:
    (policy,) = [one["spec"] for one in rendered("platform") if one["metadata"]["name"] == "graft-internal"]
    (anywhere,) = [rule["ports"] for rule in policy["egress"] if "to" not in rule]
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"the TCP ports ([\d, and]+) of\s+any address", page)
    assert {int(port) for port in re.findall(r"\d+", named)} == {one["port"] for one in anywhere}


def templates(value: Any) -> list[dict[str, Any]]:
    """Every pod template in a manifest: a mapping with metadata and a pod's specification."""
    if isinstance(value, list):
        return [found for item in value for found in templates(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if "metadata" in value and "containers" in value.get("spec", {}) else []
    return own + [found for item in value.values() for found in templates(item)]
