"""Collect trajectories: decode prompts on a Ray cluster and keep what the target decided at every round.

    ray job submit --working-dir . -- python jobs/collect.py --config targets/smollm2-135m.yaml --prompts FILE --out DIR
    python jobs/collect.py --config targets/smollm2-135m.yaml --prompts FILE --out DIR      (starts Ray by itself)

Run again with the same arguments it goes on where it ended. Exit codes: 0 everything is collected; 2 the arguments,
the configuration or the cluster cannot work; 3 partial: some units were set aside, and are listed; 4 cut off: the
store could not be written any more, or no actor was left; 75 another driver of the same run is at work; 130 and 143
stopped by SIGINT or SIGTERM. Cut off or stopped, everything finished until then is committed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import ConfigError, GraftError
from graft_dist.policy import METHODS
from graft_dist.sampling import SamplingParams
from jobs.arguments import check_place, count, from_zero, job_parser, list_of, positive, whole_number
from jobs.collection import CollectRequest, run
from jobs.decode_spec import DecodeSpec
from jobs.driver import DriverSettings
from jobs.out_file import check_out_file
from jobs.ray_pool import PoolSettings


def main(argv: Sequence[str] | None = None, failpoint: Callable[[str], None] = lambda _: None) -> int:
    """Parse, run, and return the exit code; `failpoint` is for tests, see `Driver`."""
    options = _parser().parse_args(argv)
    try:
        return run(request_from(options), failpoint)
    except GraftError as error:
        print(f"collect: {error}", file=sys.stderr, flush=True)
        return 2


def request_from(options: argparse.Namespace) -> CollectRequest:
    """The request that the options describe. Raises `GraftError` where they contradict each other."""
    config = load_config(options.config)
    if options.dtype is not None:
        config = config.model_copy(update={"dtype": options.dtype})
    resources = config.resources
    return CollectRequest(
        spec=_spec(options, config),
        prompts=tuple(options.prompts),
        store=None if options.no_write else _store(options.out),
        summary=None if options.summary is None else _summary(options.summary),
        num_slots=options.slots or config.max_slots,
        pool=PoolSettings(
            num_actors=options.actors or resources.num_actors,
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
        ),
        unit_size=options.unit_size,
        limit=options.limit,
        address=options.address,
        wait_for_nodes_s=options.wait_for_nodes,
        driver=DriverSettings(
            commit_units=options.commit_units,
            commit_interval_s=options.commit_interval,
            max_attempts=options.max_attempts,
            progress_s=options.progress_interval,
        ),
    )


def _spec(options: argparse.Namespace, config: TargetConfig) -> DecodeSpec:
    budget = options.budget
    if budget is None and options.method == "ddtree":
        budget = config.budget
    try:
        sampling = SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            max_new_tokens=options.max_new_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return DecodeSpec(
        config=config,
        method=options.method,
        budget=budget,
        budgets=options.explore,
        sampling=sampling,
        seed=options.seed,
        num_samples=options.num_samples,
        dense=options.dense,
        num_hidden=options.hidden,
    )


def _store(out: str | None) -> str:
    if out is None:
        raise ConfigError("--out is missing: name the folder of the trajectory store (or use --no-write)")
    check_place("--out", os.path.expanduser(out))
    return out


def _summary(file: str) -> Path:
    path = Path(file).expanduser()
    check_place("--summary", str(path))
    check_out_file(path, "--summary")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("collect.py", __doc__)
    add = parser.add_argument
    add("--out", metavar="URI", help="root of the trajectory store; in a submitted job an absolute path or a URI")
    add("--no-write", action="store_true", help="decode without recording, to measure what recording costs")
    add("--summary", metavar="FILE", help="also write the last lines' figures there as JSON, with machine and versions")
    add("--actors", type=count, metavar="N", help="number of actors (default: the configuration's)")
    add("--wait-for-nodes", type=from_zero, default=0.0, metavar="S", help="let a cluster start nodes for so long (0)")
    add("--slots", type=count, metavar="S", help="sequences that an actor decodes together (default: max_slots)")
    add("--method", choices=METHODS, default="ddtree", help="how rounds draft (default: ddtree)")
    nodes = "draft nodes per round (default: the configuration's); chain: its depth"
    add("--budget", type=whole_number, metavar="B", help=nodes)
    budgets = list_of(int, "budgets such as 0,4,8,16")
    add("--explore", type=budgets, default=(), metavar="B,B,...", help="draw each round's budget from this list")
    add("--dense", action="store_true", help="also record the drafter and the target at every position")
    hidden = "also record the drafter's hidden states, projected to N numbers, for gated edge scorers; 0: not (0)"
    add("--hidden", type=whole_number, default=0, metavar="N", help=hidden)
    _add_sampling(parser)
    add("--limit", type=count, metavar="N", help="only the first N prompts")
    add("--unit-size", type=count, default=16, metavar="N", help="sequences decoded and committed together (16)")
    add("--commit-units", type=count, default=8, metavar="N", help="commit when so many units are finished (8)")
    add("--commit-interval", type=from_zero, default=30.0, metavar="S", help="or after so many seconds (30)")
    add("--max-attempts", type=count, default=3, metavar="N", help="tries of a unit before it is set aside (3)")
    add("--progress-interval", type=positive, default=10.0, metavar="S", help="seconds between progress lines (10)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of both models' weights (default: the configuration's)",
    )
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=count, default=128, metavar="N", help="longest answer (128)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    add("--top-p", type=float, default=1.0, help="1 turns it off (1)")
    add("--top-k", type=whole_number, default=0, help="0 turns it off (0)")
    add("--min-p", type=float, default=0.0, help="0 turns it off (0)")
    add("--seed", type=whole_number, default=0, help="of sampling and of exploration (0)")
    add("--num-samples", type=count, default=1, metavar="N", help="answers per prompt, with distinct seeds (1)")


if __name__ == "__main__":
    sys.exit(main())
