r"""Train a target's policy anew and promote it if it is better.

    python jobs/retrain.py --config targets/smollm2-135m.yaml --prompts 'prompts/*.jsonl' --store DIR --runs DIR
    ray job submit --working-dir . -- python jobs/retrain.py --config targets/smollm2-135m.yaml

Its steps: choose, collect, compact, train, evaluate, decide, report, clean. Without the options it does what the
configuration says under `retrain`. One run of a target is at work at a time. A run that was killed is gone on with by
the next start of the same command, at the step it was in. The last line says what happened: promoted vN, kept vM
because ..., nothing new, failed at step X, stopped at step X. Exit codes: 0 it came to one of the first three; 1 a step
failed, or found no room on the cluster or no registry; 2 the arguments or the configuration cannot work; 4 the
collection was cut off; 75 another run of the target is at work; 130 and 143 stopped by SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import ValidationError

from graft_dist.config import load_config
from graft_dist.errors import ConfigError
from graft_dist.retraining import Retraining
from jobs import train
from jobs.arguments import count, job_parser, run_job, whole_number
from jobs.registry_command import tracking_uri
from jobs.retraining import WAIT_FOR_NODES_S, RetrainRequest, run
from storage.place import Place


def main(argv: Sequence[str] | None = None, failpoint: Callable[[str], None] = lambda _: None) -> int:
    """Parse, run, and return the exit code; `failpoint` is for tests."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    return run_job("retrain", "goes on at this step", lambda: run(request_from(options), failpoint))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def request_from(options: argparse.Namespace) -> RetrainRequest:
    """The request that the options and the configuration describe. Raises `GraftError` where they cannot work."""
    config = load_config(options.config)
    given: dict[str, Any] = {
        "prompts": None if options.prompts is None else [{"path": path} for path in options.prompts],
        "store": options.store,
        "runs": options.runs,
        "tracking_uri": options.tracking_uri,
        "num_prompts": options.num_prompts,
        "num_workers": options.num_workers,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if config.retrain is None and "prompts" not in given:
        raise ConfigError(f"{options.config} has no section retrain: say with --prompts where fresh prompts come from")
    known = {} if config.retrain is None else config.retrain.model_dump(exclude_unset=True)
    try:
        settings = Retraining.model_validate({**known, **given})
    except ValidationError as error:  # of an option: the configuration was checked when it was read
        name = str(error.errors()[0]["loc"][0])  # of a field: none of the options goes against another
        allowed = Retraining.model_fields[name].description
        raise ConfigError(f"--{name.replace('_', '-')}: allowed is {allowed}") from error

    def policy_request(out: Path) -> Any:
        # Absolute, since a submitted job refuses anything else: not ~/folder, as the configuration has it.
        store = str(Place.parse(settings.store))
        arguments = ["--config", options.config, "--store", store, "--out", str(out.absolute())]
        arguments += ["--steps", str(settings.steps), "--min-rounds", str(settings.min_rounds)]
        arguments += ["--workers", str(settings.num_workers), "--tracking-uri", tracking_uri(settings.tracking_uri)]
        arguments += ["--gate-rank", str(settings.gate_rank)]
        arguments += ["--all-prompts"] if settings.every_prompt else []
        arguments += ["--address", options.address] if options.address is not None else []
        made = train.request_from(train.parser().parse_args(arguments))
        return replace(made, placement=replace(made.placement, wait_for_nodes_s=WAIT_FOR_NODES_S))

    return RetrainRequest(
        config=config,
        settings=settings,
        tracking_uri=tracking_uri(settings.tracking_uri),
        policy_request=policy_request,
        run_id=options.run_id,
        wait_s=options.wait,
        only_if_drifted=options.if_drifted,
        address=options.address,
    )


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("retrain.py", __doc__, needs_prompts=False)
    add = parser.add_argument
    add("--prompts", nargs="+", metavar="FILE", help="files or patterns of prompts, instead of the configuration's")
    add("--store", metavar="URI", help="trajectory store, instead of the configuration's")
    add("--runs", metavar="DIR", help="folder of runs, instead of the configuration's")
    add("--tracking-uri", metavar="URI", help="MLflow, instead of the configuration's")
    add("--num-prompts", type=count, metavar="N", help="fresh prompts at most, instead of the configuration's")
    add("--num-workers", type=whole_number, metavar="N", help="Ray Train workers, instead of the configuration's")
    add("--run-id", metavar="ID", help="go on with this run, or begin one of this name (default: the unfinished one)")
    add("--if-drifted", action="store_true", help="only if recorded traffic accepts less than the champion's training")
    add("--wait", type=float, default=0.0, metavar="S", help="wait so many seconds for another run to end (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
