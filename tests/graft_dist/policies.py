"""A learned policy with random weights for tests, and its parts."""

from __future__ import annotations

from typing import Any

import torch

from graft_dist.budget import AcceptanceGain, PiecewiseCalibration
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import TdesConfig, TdesNetwork
from graft_dist.policy import DataIdentity, GraftPolicy

DATA = DataIdentity("sequences@3+rounds@3", ("run-1", "run-2"), 4, 20, 300, 900, 120, ("run-2", "run-3"))
CURVE = CostCurve((0, 1, 8, 64), (10.0, 12.0, 13.0, 30.0), "hand", token_ms=0.01)


def random_network(
    embedding_size: int, depth: int, gate_hidden: int = 0, seed: int = 1, reliance: bool = False
) -> TdesNetwork:
    """A network that prefers and rejects edges without sense."""
    config = TdesConfig(
        embedding_size=embedding_size,
        draft_depth=depth,
        width=8,
        projection_size=6,
        depth_size=3,
        gate_rank=2 if gate_hidden else 0,
        hidden_size=gate_hidden,
        reliance=reliance,
    )
    network = TdesNetwork(config)
    generator = torch.Generator().manual_seed(seed)
    parameters = (network.weight, network.gate_child, network.offset, network.reliance, network.parent_reliance)
    for parameter in parameters:
        torch.nn.init.normal_(parameter.data, generator=generator)
    return network.requires_grad_(False)


def make_policy(network: TdesNetwork | None, **changes: Any) -> GraftPolicy:
    """A policy of kind "marginal" for fingerprints "t..." and "d..."."""
    fields: dict[str, Any] = {
        "slug": "tiny",
        "target_fingerprint": "t" * 64,
        "drafter_fingerprint": "d" * 16,
        "software": "graft-dist 0.1.0",
        "tdes": network,
        "kind": "marginal",
        "gain": AcceptanceGain(PiecewiseCalibration((-3.0, -1.0, 0.0), (0.05, 0.4, 0.9))),
        "form": "price",
        "num_candidates": 4,
        "max_budget": 20,
        "cost_curves": {"a box, 2 threads, float32": CURVE},
        "data": DATA,
        "metrics": {"mat": 2.5},
    }
    return GraftPolicy(**{**fields, **changes})
