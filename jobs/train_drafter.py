r"""Train a DFlash drafter for a target: let the target answer prompts, then distil its answers.

    python jobs/train_drafter.py --config FILE --prompts FILE --store DIR --out DIR --taps 1,10,19,28 --mask-token 4 \
        --steps 2000                                           (starts Ray by itself)
    ray job submit --working-dir . -- python jobs/train_drafter.py ...      (the same options)

A fifth of the prompts, by hash, is held out: never trained on, used for the score. Run again with the same arguments it
goes on where it ended, in the answers and in the training. The checkpoint is DIR/drafter, in the public layout.
Exit codes: 0 trained; 2 the arguments cannot work; others as `jobs/collect.py` has them while answering.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the folder on the path is jobs/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from graft_dist.config import load_config
from graft_dist.errors import ConfigError
from graft_dist.learning.drafter import DrafterTraining
from jobs.arguments import (
    check_folder,
    check_place,
    count,
    from_zero,
    job_parser,
    list_of,
    positive,
    run_job,
    whole_number,
)
from jobs.drafter_training import DrafterRequest, DrafterShape, run


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    options = _parser().parse_args(argv)
    return run_job("train_drafter", "goes on from the last checkpoint", lambda: run(request_from(options)))


def request_from(options: argparse.Namespace) -> DrafterRequest:
    """The request that the options describe. Raises `GraftError` where they cannot work."""
    check_folder("--out", options.out)
    check_place("--store", options.store)
    try:
        training = DrafterTraining(
            steps=options.steps,
            seed=options.seed,
            sequences_per_step=options.sequences_per_step,
            anchors_per_sequence=options.anchors,
            learning_rate=options.learning_rate,
            depth_gamma=options.gamma,
            soft_weight=options.soft_weight,
            feature_cache_bytes=int(options.feature_cache_gb * 1e9),
            evaluate_every=options.evaluate_every,
            checkpoint_every=options.checkpoint_every,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return DrafterRequest(
        config=load_config(options.config),
        prompts=tuple(options.prompts),
        store=options.store,
        out=Path(options.out),
        shape=DrafterShape(
            num_layers=options.layers,
            block_size=options.block_size,
            target_layer_ids=options.taps,
            mask_token_id=options.mask_token,
        ),
        training=training,
        temperatures=options.temperatures,
        max_new_tokens=options.max_new_tokens,
        num_slots=options.slots,
        num_workers=options.workers,
        threads_per_worker=options.threads,
        address=options.address,
    )


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("train_drafter.py", __doc__)
    add = parser.add_argument
    numbers, layers = list_of(from_zero, "numbers such as 0,0.7"), list_of(int, "layers such as 1,10,19,28")
    add("--store", required=True, metavar="URI", help="trajectory store that holds the answers")
    add("--out", required=True, metavar="DIR", help="folder of the run: checkpoints, log, and drafter/")
    add("--temperatures", type=numbers, default=(0.0,), metavar="T,T", help="an answer per prompt at each (0)")
    add("--max-new-tokens", type=count, default=256, metavar="N", help="longest answer (256)")
    add("--slots", type=whole_number, default=32, metavar="S", help="answers that an actor decodes together (32)")
    add("--taps", type=layers, required=True, metavar="L,L", help="layers of the target whose output the drafter sees")
    add(
        "--mask-token",
        type=whole_number,
        required=True,
        metavar="ID",
        help="a token id of the target that no text contains",
    )
    add("--layers", type=whole_number, default=2, metavar="N", help="layers of the drafter (2)")
    add("--block-size", type=whole_number, default=8, metavar="N", help="draft depth + 1 (8)")
    add("--steps", type=whole_number, required=True, metavar="N", help="optimizer steps of the whole run")
    add("--sequences-per-step", type=whole_number, default=16, metavar="N", help="answers in a step (16)")
    add("--anchors", type=whole_number, default=64, metavar="N", help="blocks drawn from an answer (64)")
    add("--learning-rate", type=positive, default=5e-3, help="peak learning rate (0.005)")
    add("--gamma", type=positive, default=4.0, help="decay of the loss with depth: 4 for blocks of 8, 7 for 16 (4)")
    add("--soft-weight", type=float, default=0.7, help="share of the target's distribution in the labels (0.7)")
    add("--feature-cache-gb", type=from_zero, default=8.0, help="memory per worker for the target's features (8)")
    add("--evaluate-every", type=count, default=100, metavar="N", help="steps between scores (100)")
    add("--checkpoint-every", type=count, default=100, metavar="N", help="steps between checkpoints (100)")
    add("--workers", type=whole_number, default=1, metavar="N", help="training workers: 1, 2, 4 or 8 (1)")
    add("--threads", type=whole_number, default=1, metavar="N", help="CPU threads of each worker (1)")
    add("--seed", type=whole_number, default=0, help="of sampling, initialisation and data order (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
