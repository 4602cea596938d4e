"""Time replay on one core: recorded rounds a second, read from a store, rebuilt, judged and summed up.

    python bench/replay.py --store DIR [--config smollm2-135m] [--budget 64] [--limit 50000] [--out FILE.json]

The aim is 2,000 rounds a second with trees of 64 nodes. Everything counts: DuckDB's reading and joining, the edge
scores, the trees, and the budgets of six policies (fixed, CaDDTree's rule, and those of the policy that ships
with the target). Two passes: trees under the drafter's own probabilities, and under that policy's edge scores. Each
comes once more before anything counts, on few rounds: the first call compiles. Only one processor is used. On a machine
that does anything else the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from graft_dist.budget import BudgetPolicy, FixedBudget
from graft_dist.config import load_config
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer
from graft_dist.policy import GraftPolicy, caddtree, shipped_policy
from graft_dist.replay import ALL_TASKS, RecordedRounds, replay
from graft_dist.target import read_embeddings
from jobs.provenance import provenance
from jobs.replay_command import RecordedScorer
from storage import connect
from storage.recorded_rounds import Selection, recorded_rounds

FIXED = (8, 16, 32, 64)
WARM_UP = 200  # rounds


def first(batches: Iterator[RecordedRounds], limit: int, needs_hidden: bool) -> Iterator[RecordedRounds]:
    """Batches that the scorer can judge, until `limit` rounds have passed; the last one is whole."""
    num_rounds = 0
    for batch in batches:
        if needs_hidden and batch.hidden is None:
            continue
        num_rounds += len(batch)
        yield batch
        if num_rounds >= limit:
            return


def timed(chosen: Any, policy: GraftPolicy, scorer: EdgeScorer, limit: int) -> dict[str, Any]:
    """One pass: rounds, seconds and rounds a second."""
    cost = next(iter(policy.cost_curves.values()))
    policies: dict[str, BudgetPolicy] = {f"fixed-{budget}": FixedBudget(budget) for budget in FIXED}
    policies |= {"caddtree": caddtree(cost, chosen.budget).budget, "graft": policy.budget_policy(cost)}
    selection = Selection(target=policy.slug, drafter=policy.drafter_fingerprint)
    start = time.perf_counter()
    with closing(connect(chosen.store, threads=1)) as connection:
        rounds = recorded_rounds(connection, selection, with_hidden=scorer.needs_hidden)
        report = replay(
            first(rounds, limit, scorer.needs_hidden), scorer, policies, max_budget=chosen.budget, cost=cost
        )
    seconds = time.perf_counter() - start
    if not report.rows:
        raise SystemExit(f"{chosen.store} holds no rounds of {policy.slug} and of the shipped policy's drafter")
    num_rounds = sum(row.num_rounds for row in report.rows if (row.task, row.policy) == (ALL_TASKS, "graft"))
    return {
        "policies": len(policies),
        "rounds": num_rounds,
        "seconds": round(seconds, 3),
        "rounds_per_s": round(num_rounds / seconds, 1),
    }


def measure(chosen: Any) -> list[dict[str, Any]]:
    """A row for each scorer."""
    config = load_config(chosen.config)
    folder = shipped_policy(config.slug)
    if folder is None:
        raise SystemExit(f"no policy ships with {config.slug}")
    policy = GraftPolicy.load(folder)
    learned = RecordedScorer(policy, read_embeddings(config.target, revision=config.revision))
    scorers: dict[str, EdgeScorer] = {"marginal": MarginalScorer(), "learned": learned}
    for edges in scorers.values():
        timed(chosen, policy, edges, WARM_UP)
    return [
        {"scorer": name, "budget": chosen.budget, **timed(chosen, policy, edges, chosen.limit)}
        for name, edges in scorers.items()
    ]


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--budget", type=int, default=64, help="nodes of the trees")
    parser.add_argument("--limit", type=int, default=50_000, help="rounds, about")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows = measure(chosen)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if chosen.out is not None:
        settings = {name: getattr(chosen, name) for name in ("config", "budget", "limit")}
        chosen.out.write_text(json.dumps({"settings": settings, **provenance(), "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
