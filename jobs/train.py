r"""Learn a policy from collected rounds: an edge scorer and budgets, tracked and registered in MLflow.

    ray job submit --working-dir . -- python jobs/train.py --config FILE
    python jobs/train.py --config FILE --store DIR --out DIR          (with --workers it starts Ray by itself)

Without --store, rounds are read where the configuration's retrain.store says, with its tracking_uri and every_prompt;
without --out, a new folder is made in retrain.runs and named. Only prompts that no drafter is trained on are used,
split by a hash of their text into rounds to fit on, to choose by and to judge by. Run again with the same --out it goes
on where it ended. The result is its folder policy, and a new version of graft-TARGET in MLflow's registry with the
alias challenger.
Exit codes: 0 learned; 2 the arguments or the store cannot work, in one sentence; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import ConfigError
from graft_dist.learning.tdes import TdesTraining
from jobs.arguments import check_folder, check_place, count, from_zero, job_parser, run_job, whole_number
from jobs.cluster import job_id
from jobs.policy_training import PolicyRequest, run
from jobs.registry_command import tracking_uri
from jobs.scorer_training import Placement, say


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    options = parser().parse_args(argv)
    again = "goes on from the last checkpoint" if options.out else "with that folder as --out goes on"
    return run_job("train", again, lambda: run(request_from(options)))


def request_from(options: argparse.Namespace) -> PolicyRequest:
    """The request that the options describe. Raises `GraftError` where they cannot work."""
    config = load_config(options.config)
    store, out = _store(options.store, config), _out(options.out, config)
    retrain = config.retrain if options.store is None else None  # its rounds, so its registry and its prompts too
    workers = options.workers
    if workers is None:  # a submitted job has a cluster to use
        workers = 0 if job_id() is None else 1
    return PolicyRequest(
        config=config,
        store=store,
        out=out,
        training=TdesTraining(
            steps=options.steps,
            seed=options.seed,
            rounds_per_step=options.rounds_per_step,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            kl_weight=options.kl_weight,
            pair_weight=options.pair_weight,
            edge_weight=options.edge_weight,
            margin=options.margin,
            every_parent=options.every_parent,
            evaluate_every=options.evaluate_every,
            patience=options.patience,
        ),
        width=options.width,
        gate_rank=options.gate_rank,
        reliance=options.reliance,
        reading=options.reading,
        max_budget=options.max_budget,
        placement=Placement(workers, options.address, options.max_failures, options.wait_for_nodes),
        threads=options.threads or config.threads or 1,
        tracking_uri=tracking_uri(options.tracking_uri or (None if retrain is None else retrain.tracking_uri)),
        registers=not options.no_register,
        every_prompt=options.all_prompts or (retrain is not None and retrain.every_prompt),
        min_rounds=options.min_rounds,
    )


def _store(given: str | None, config: TargetConfig) -> str:
    """Root of the trajectory store: the option's, else the configuration's."""
    name, store = "--store", given
    if store is None:
        if config.retrain is None:
            raise ConfigError("--store is missing, and the configuration has no retrain.store to take its place")
        name, store = "retrain.store", config.retrain.store
    store = os.path.expanduser(store)
    check_place(name, store)
    return store


def _out(given: str | None, config: TargetConfig) -> Path:
    """The folder of the run: the option's, else a new one beside the target's retraining runs."""
    if given is not None:
        check_folder("--out", given)
        return Path(given)
    if config.retrain is None:
        raise ConfigError("--out is missing, and the configuration has no retrain.runs to take its place")
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.retrain.runs).expanduser().absolute() / "_train" / config.slug / name  # no target's own runs
    check_folder("retrain.runs", str(folder))
    say(f"the run's folder is {folder}; --out {folder} goes on with it")
    return folder


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = job_parser("train.py", __doc__, needs_prompts=False)
    add = parser.add_argument
    add("--store", metavar="URI", help="trajectory store with decoded rounds, and dense ones (default: retrain.store)")
    add("--out", metavar="DIR", help="folder of the run: checkpoints, plots, report, policy/ (default: a new one)")
    add(
        "--workers",
        type=whole_number,
        metavar="N",
        help="Ray Train workers; 0: in this process (default: 1 in a submitted job, else 0)",
    )
    add("--wait-for-nodes", type=from_zero, default=0.0, metavar="S", help="let a cluster start nodes for so long (0)")
    add("--threads", type=count, metavar="N", help="CPU threads of each worker (the configuration's, else 1)")
    add("--max-failures", type=whole_number, default=3, metavar="N", help="worker deaths that are mended (3)")
    add("--tracking-uri", metavar="URI", help="MLflow (default: MLFLOW_TRACKING_URI, else a SQLite file of the user's)")
    add("--no-register", action="store_true", help="track the run, but register no version")
    add("--all-prompts", action="store_true", help="also prompts that a drafter trained here would have seen")
    add("--min-rounds", type=count, default=1000, metavar="N", help="refuse to fit on fewer rounds (1000)")
    add("--steps", type=count, default=600, metavar="N", help="optimizer steps at most (600)")
    add("--rounds-per-step", type=count, default=256, metavar="N", help="rounds in a step (256)")
    add("--evaluate-every", type=count, default=100, metavar="N", help="steps between looks at held-out rounds (100)")
    add("--patience", type=count, default=5, metavar="N", help="looks without an improvement before it ends (5)")
    add("--learning-rate", type=float, default=2e-3, help="peak learning rate (0.002)")
    add("--weight-decay", type=float, default=3.0, help="of the matrices (3.0)")
    add("--kl-weight", type=float, default=1.0, help="of the term towards the target's distribution (1.0)")
    add("--pair-weight", type=float, default=0.03, help="of the term on mismatched rounds (0.03)")
    add("--edge-weight", type=float, default=0.1, help="of the term on verified edges (0.1)")
    add("--margin", type=float, default=1.0, help="of the pair term (1.0)")
    add("--every-parent", action="store_true", help="the KL term also learns from verified parents off the path")
    add("--width", type=count, default=64, metavar="N", help="hidden width of the edge scorer (64)")
    add("--gate-rank", type=whole_number, default=0, metavar="R", help="gate by recorded hidden states; 0: none (0)")
    add("--reliance", action="store_true", help="also weigh the drafter's own probabilities by depth and parent")
    add("--reading", choices=("sum", "conditional"), default="conditional", help="of the scores (conditional)")
    add("--max-budget", type=count, default=64, metavar="B", help="largest budget that a policy may choose (64)")
    add("--seed", type=whole_number, default=0, help="of initialisation, data order and intervals (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
