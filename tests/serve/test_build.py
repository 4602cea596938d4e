"""The application's arguments and the deployment that is built from them; the files in infra/serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from graft_dist.config import load_config
from graft_dist.errors import ConfigError
from jobs.serve_command import default_policy
from serve.app import DEPLOYMENT, build
from serve.applications import IMPORT_PATH
from serve.replica import Decoder
from serve.serve_args import ServeArgs, UserConfig

FILES = sorted((Path(__file__).resolve().parents[2] / "infra" / "serve").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_shipped_files_can_be_built(file: Path) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    for application in config.applications:
        assert application.import_path == IMPORT_PATH
        built = build(ServeArgs.model_validate(application.args))
        assert [deployment.name for deployment in application.deployments] == [DEPLOYMENT]
        pinned = UserConfig.model_validate(application.deployments[0].user_config).policy
        target = load_config(application.args["config"])
        default = default_policy(target)  # a file starts with what `graft serve` does
        assert ("none" if pinned is None else pinned.folder) == default
        assert built._bound_deployment.name == DEPLOYMENT


def test_limits_become_the_deployments() -> None:
    args = ServeArgs(
        config="smollm2-135m", max_slots=4, max_queue=6, num_cpus=1.5, num_gpus=0.5, retry_after_s=3, replicas=2
    )
    deployment = build(args)._bound_deployment
    assert deployment.max_ongoing_requests >= 10  # our own refusal, with its proper body, comes first
    assert deployment.ray_actor_options["num_cpus"] == 1.5 and deployment.ray_actor_options["num_gpus"] == 0.5
    assert deployment.num_replicas == 2
    assert deployment.max_queued_requests >= 10  # Serve's own queue, with the same answer as ours
    refusal = deployment._deployment_config.backpressure_config
    assert (refusal.status_code, refusal.retry_after_s) == (429, 3)
    assert deployment.user_config == {"policy": None}
    assert deployment._deployment_config.graceful_shutdown_timeout_s > args.max_request_s
    short = build(ServeArgs(config="smollm2-135m", max_request_s=20, drain_timeout_s=60))._bound_deployment
    assert short._deployment_config.graceful_shutdown_timeout_s == 60
    scaled = build(ServeArgs(config="smollm2-135m", max_slots=10, autoscaling={"max_replicas": 3}))._bound_deployment
    assert scaled._deployment_config.autoscaling_config.target_ongoing_requests == 7


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_qeue": 3}, "max_qeue"),
        ({"replicas": 2, "autoscaling": {"max_replicas": 3}}, "either replicas or autoscaling"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "above max_replicas"),
        ({"policy": {"folder": "x", "registry": {"version": 1, "tracking_uri": "y"}}}, "either folder or registry"),
        ({"policy": {}}, "either folder or registry"),
        ({"methods": ["magic"]}, "methods"),
        ({"drain_timeout_s": 900}, "drain_timeout_s 900 would cut requests that max_request_s 900 allows"),
        ({"api_keys_file": "x", "api_keys_variable": "Y"}, "either api_keys_file or api_keys_variable"),
    ],
)
def test_impossible_arguments_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ServeArgs(config="smollm2-135m", **fields)


def test_an_unknown_target_is_refused_where_the_application_is_built() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        build(ServeArgs(config="nowhere.yaml"))


def test_a_replica_that_was_never_configured_is_not_healthy() -> None:
    """Serve calls `reconfigure` unless user_config is null: such a replica would decode plainly for ever."""
    decoder = object.__new__(Decoder)
    decode = SimpleNamespace(check=lambda: None)
    decoder._service = SimpleNamespace(decode=decode, close=lambda: None)  # type: ignore[assignment]
    decoder._is_configured = False
    with pytest.raises(RuntimeError, match="user_config is null"):
        asyncio.run(decoder.check_health())
    decoder._is_configured = True
    asyncio.run(decoder.check_health())
