"""Measure a whole plan on a Ray cluster: every target, temperature and batch, with budgets frozen beforehand.

    ray job submit --working-dir . -- python jobs/benchmark.py --plan bench/smollm2-135m.yaml --out /abs/DIR
    python jobs/benchmark.py --plan bench/smollm2-135m.yaml --out runs/benchmark         (starts Ray by itself)

One actor does all the measuring, one group of prompts at a time with the arms in turn; what it asks of the cluster
nobody else gets meanwhile. Run again with the same arguments it goes on where it ended. Exit codes: 0 everything is
measured; 1 some prompts could not be decoded, or the actor was lost; 2 the arguments, the plan or the cluster cannot
work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import ray
from ray.exceptions import RayActorError, RayTaskError

from graft_dist.bench import Arm, Measurement
from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import ConfigError, GraftError
from jobs.arguments import check_folder, count
from jobs.bench_plan import BenchPlan, Cell, Group, first_of_each_task, measured_prompts, read_plan, tuning_prompts
from jobs.bench_run import BenchRun, render_table
from jobs.bench_worker import BenchWorker
from jobs.cluster import Room, check_fits, connect, reserved
from jobs.out_file import make_out_folder, write_aside

MAX_RESTARTS = 2
"""Of the actor: its calls leave nothing behind, so Ray may repeat them."""


class RayWorker:
    """A `BenchWorker` on the cluster, in a room of its own."""

    def __init__(self, config: TargetConfig, plan: BenchPlan, num_cpus: int, num_gpus: float, room: Room) -> None:
        actor_class = ray.remote(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
            scheduling_strategy=room,
        )(BenchWorker)
        self._actor: Any = actor_class.remote(config, plan, num_cpus)

    def describe(self, cell: Cell) -> dict[str, Any]:
        return _result(self._actor.describe.remote(cell))

    def arms(self, methods: Sequence[str], budgets: Sequence[int]) -> list[Arm]:
        return _result(self._actor.arms.remote(methods, budgets))

    def measure(self, cell: Cell, arms: Sequence[Arm], turn: int, group: Group) -> list[Measurement] | str:
        return _result(self._actor.measure.remote(cell, arms, turn, group))


def _result(call: Any) -> Any:
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, GraftError):
            raise error.cause from error
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, and return the exit code."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except GraftError as error:
        print(f"benchmark: {error}", file=sys.stderr, flush=True)
        return 2
    except RayActorError as error:
        reason = str(error).strip().splitlines()[0]
        print(f"benchmark: the actor was lost ({reason}); start again to go on", file=sys.stderr, flush=True)
        return 1


def _run(options: argparse.Namespace) -> int:
    check_folder("--out", str(options.out))
    plan = read_plan(options.plan)
    configs = [load_config(name) for name in plan.targets if options.target in (None, name)]
    if not configs:
        raise ConfigError(f"--target is {options.target}, but the plan has {', '.join(plan.targets)}")
    if plan.threads is not None:
        configs = [config.model_copy(update={"threads": plan.threads}) for config in configs]
    make_out_folder(options.out)
    whole = measured_prompts(plan)
    measured = first_of_each_task(whole, options.limit)
    tuning = first_of_each_task(tuning_prompts(plan, whole), options.limit)
    cluster = connect(options.address)
    print(f"benchmark: {cluster.message}", file=sys.stderr, flush=True)
    num_failed = 0
    try:
        for config in configs:
            num_cpus = config.threads or max(1, int(config.resources.num_cpus))
            check_fits(cluster.resources, 1, num_cpus, config.resources.num_gpus, who="benchmark actors")
            with reserved(num_cpus, config.resources.num_gpus, who="the benchmark's actor") as room:
                worker = RayWorker(config, plan, num_cpus, config.resources.num_gpus, room)
                run = BenchRun(
                    plan=plan, config=config, worker=worker, measured=measured, tuning=tuning, out=options.out
                )
                num_failed += run.run()
            write_aside(options.out / "table.md", render_table(options.out))
    finally:
        if cluster.is_local:
            ray.shutdown()
    print(f"benchmark: {options.out / 'table.md'}", file=sys.stderr, flush=True)
    return 1 if num_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plan", required=True, type=Path, metavar="FILE", help="what to measure, such as bench/smollm2-135m.yaml")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the rows, absolute in a submitted job")
    add("--target", metavar="NAME", help="only this one of the plan's targets")
    add("--limit", type=count, metavar="N", help="only the first N prompts of every task")
    add("--address", help='of the Ray cluster (default: RAY_ADDRESS, else one that runs here); "local" starts one')
    return parser


if __name__ == "__main__":
    sys.exit(main())
