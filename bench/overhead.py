"""Time what learned scores and budgets add to a round: scorer, tree, state, budget and mask, one sequence, no model.

    python bench/overhead.py [--depth 15] [--candidates 16] [--threads 2] [--rounds 500] [--out FILE.json]

Weights, embeddings and drafts are random: the time does not depend on what was learned. Medians in microseconds, one
row for each variant of the scorer and cap of the tree; the aim is 500 for a tree of 64 nodes. Then the tree builder
alone on marginal scores, 15 deep with 32 candidates whatever the options say; the aim is 100 for 64 nodes and 2000 for
1024. `--out` keeps every round's times with the machine they were taken on. On a machine that does anything else the
numbers mean nothing. What share of verification that is, `graft bench` says: it keeps the milliseconds of building and
verifying of each answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the folder on the path is bench/, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from graft_dist.budget import AcceptanceGain, DraftState, StateCalibration, UtilityBudget, confidences, degenerations
from graft_dist.cost_curve import CostCurve
from graft_dist.draft_tree import ancestor_mask, build_tree
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer, Reading, TdesConfig, TdesNetwork, TdesScorer
from jobs.provenance import provenance

VOCAB_SIZE, EMBEDDING_SIZE, GATE_RANK = 49152, 576, 32
CURVE = CostCurve((0, 1, 8, 16, 32, 64), (46.0, 56.0, 60.0, 64.0, 87.0, 116.0), "an example")
GAIN = AcceptanceGain(
    StateCalibration((0.5, 0.1, 0.1), tuple(np.linspace(-9, 0, 48)), tuple(np.linspace(0.01, 0.9, 48)))
)
CAPS = (64, 256)
BUILDER_DEPTH, BUILDER_CANDIDATES, BUILDER_NODES = 15, 32, (64, 1024)  # what the aims of the builder are about
STAGES = ("score", "tree", "state", "budget", "mask", "all")
WARM_UP = 50


@dataclass(frozen=True)
class Draft:
    """A random proposal of one slot."""

    candidate_ids: np.ndarray  # int32 [1, D, K]
    log_probs: np.ndarray  # float32 [1, D, K]
    hidden: torch.Tensor  # [1, D, H]


def random_draft(depth: int, num_candidates: int) -> Draft:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB_SIZE, (1, depth, num_candidates)).astype(np.int32)
    log_probs = -np.sort(rng.exponential(2, ids.shape)).astype(np.float32)
    return Draft(ids, log_probs, torch.randn(1, depth, EMBEDDING_SIZE))


def tdes_scorer(depth: int, gate_rank: int, reading: Reading, reliance: bool = False) -> TdesScorer:
    embeddings = torch.randn(VOCAB_SIZE, EMBEDDING_SIZE)
    hidden_size = EMBEDDING_SIZE if gate_rank else 0
    network = TdesNetwork(TdesConfig(
        embedding_size=EMBEDDING_SIZE, draft_depth=depth, gate_rank=gate_rank, hidden_size=hidden_size,
        reliance=reliance,
    ))  # fmt: skip
    torch.nn.init.normal_(network.weight.data, std=0.1)
    return TdesScorer(network, embeddings, reading)


def stages_us(scorer: EdgeScorer, draft: Draft, max_budget: int, num_rounds: int) -> np.ndarray:
    """Microseconds of each of `STAGES`, [rounds, 6]; the first rounds are dropped."""
    policy = UtilityBudget(GAIN, CURVE, max_budget, "price")
    roots = np.zeros(1, np.int64)
    spent = np.zeros((WARM_UP + num_rounds, len(STAGES)))
    for row in spent:
        start = time.perf_counter_ns()
        scores = scorer.score(roots, draft.candidate_ids, draft.log_probs, draft.hidden)
        scored = time.perf_counter_ns()
        tree = build_tree(0, draft.candidate_ids[0], scores[0], max_budget)
        built = time.perf_counter_ns()
        conf, degen = float(confidences(draft.log_probs)[0]), float(degenerations(draft.hidden)[0])
        state = DraftState(conf, degen, 2.0, context_length=100, max_budget=4096, sequence_key=1, round_index=3)
        known = time.perf_counter_ns()
        policy.limits([state])
        budget = policy.choose([tree], [state])[0]
        chosen = time.perf_counter_ns()
        tree.take(budget)
        ancestor_mask(tree.parents)  # of the whole tree: what the largest budget costs
        end = time.perf_counter_ns()
        row[:] = [*np.diff([start, scored, built, known, chosen, end]).tolist(), end - start]
    return spent[WARM_UP:] / 1000


def builder_us(num_nodes: int, num_rounds: int) -> np.ndarray:
    """Microseconds of building a tree of so many nodes, [rounds]; the first rounds are dropped."""
    draft = random_draft(BUILDER_DEPTH, BUILDER_CANDIDATES)
    scores = MarginalScorer().score(np.zeros(1, np.int64), draft.candidate_ids, draft.log_probs, draft.hidden)
    spent = np.zeros(WARM_UP + num_rounds)
    for index in range(len(spent)):
        start = time.perf_counter_ns()
        tree = build_tree(0, draft.candidate_ids[0], scores[0], num_nodes)
        spent[index] = time.perf_counter_ns() - start
        assert tree.num_nodes == num_nodes
    return spent[WARM_UP:] / 1000


def variants(depth: int) -> dict[str, EdgeScorer]:
    return {
        "marginal": MarginalScorer(),
        "tdes sum": tdes_scorer(depth, 0, "sum"),
        "tdes conditional": tdes_scorer(depth, 0, "conditional"),
        "tdes gated": tdes_scorer(depth, GATE_RANK, "conditional"),
        "tdes gated, relying": tdes_scorer(depth, GATE_RANK, "conditional", reliance=True),
    }


def arguments(words: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    draft = random_draft(chosen.depth, chosen.candidates)
    print(f"depth {chosen.depth}, {chosen.candidates} candidates, {chosen.threads} threads; microseconds, median")
    print(f"{'scorer':20}{'cap':>5}" + "".join(f"{stage:>8}" for stage in STAGES))
    rows = []
    for name, scorer in variants(chosen.depth).items():
        for cap in CAPS:
            spent = stages_us(scorer, draft, cap, chosen.rounds)
            print(f"{name:20}{cap:5}" + "".join(f"{us:8.0f}" for us in np.median(spent, axis=0)))
            rows.append({"scorer": name, "cap": cap, "stages": STAGES, "microseconds": spent.round(1).tolist()})
    builder = []
    for num_nodes in BUILDER_NODES:
        spent = builder_us(num_nodes, chosen.rounds)
        size = {"depth": BUILDER_DEPTH, "candidates": BUILDER_CANDIDATES, "nodes": num_nodes}
        print(f"builder alone, {size}: {np.median(spent):.0f}")
        builder.append(size | {"microseconds": spent.round(1).tolist()})
    if chosen.out is not None:
        settings = {"depth": chosen.depth, "candidates": chosen.candidates, "threads": chosen.threads}
        kept = {"settings": settings, **provenance(), "rows": rows, "builder": builder}
        chosen.out.write_text(json.dumps(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
