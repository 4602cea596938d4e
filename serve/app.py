"""The Serve application of one target: `serve run serve.app:build config=smollm2-135m`, or a config in infra/serve.

Turns `ServeArgs` into a deployment; what a replica does is in `replica.py`. Nothing is loaded here.
"""

# No `from __future__ import annotations`: Serve looks at the class in the builder's annotation to validate `args`.

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig

from graft_dist.config import TargetConfig, load_config
from serve.replica import Decoder
from serve.serve_args import ServeArgs, UserConfig

DEPLOYMENT = "Decoder"
"""The deployment's name, which a Serve config's `deployments` section has to use."""

_SPARE_REQUESTS = 16  # Serve's own limit above ours, so that health checks and refusals still get through


def build(args: ServeArgs) -> Application:
    """Return the application that serves the target of `args.config`.

    Raises `ConfigError` for a configuration that cannot be read; Serve shows it as the reason of DEPLOY_FAILED.
    """
    config = load_config(args.config)
    max_slots = args.max_slots or config.max_slots
    deployment: Any = serve.deployment(serve.ingress()(Decoder))
    bound: Application = deployment.options(
        name=DEPLOYMENT,
        ray_actor_options=_resources(args, config),
        max_ongoing_requests=max_slots + args.max_queue + _SPARE_REQUESTS,
        max_queued_requests=max_slots + args.max_queue + _SPARE_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=args.retry_after_s),
        user_config=UserConfig(policy=args.policy).model_dump(mode="json"),
        health_check_period_s=args.health_check_period_s,
        health_check_timeout_s=max(30.0, args.health_check_period_s),
        graceful_shutdown_timeout_s=args.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        **_scaling(args, max_slots),
    ).bind(args, config)
    return bound


def _resources(args: ServeArgs, config: TargetConfig) -> dict[str, Any]:
    num_cpus = config.resources.num_cpus if args.num_cpus is None else args.num_cpus
    num_gpus = config.resources.num_gpus if args.num_gpus is None else args.num_gpus
    return {"num_cpus": num_cpus, "num_gpus": num_gpus}


def _scaling(args: ServeArgs, max_slots: int) -> dict[str, Any]:
    wanted = args.autoscaling
    if wanted is None:
        return {"num_replicas": args.replicas}
    target = wanted.target_ongoing_requests or max(1.0, 0.7 * max_slots)
    return {"autoscaling_config": wanted.model_dump() | {"target_ongoing_requests": target}}
