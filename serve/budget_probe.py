"""A few seconds of decoding at start that tell what rounds cost on this hardware, and what draft nodes bring.

The result is DDTree's trees with a budget chosen per round: nodes are verified as long as their calibrated chance of
acceptance pays for them under the measured cost, jointly over the batch, down to no draft at all. Which is the policy
of an application that pins none.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from graft_dist.budget import AcceptanceGain, PiecewiseCalibration, UtilityBudget
from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve, monotone_fit
from graft_dist.cost_probe import cost_of, probe_rounds
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.generate import to_request
from graft_dist.hardware import describe_hardware
from graft_dist.policy import DecodingPolicy, ddtree
from graft_dist.prompts import Prompt, read_prompts, starter_prompts_path
from graft_dist.rounds import RoundRecord
from graft_dist.target import Target

_SMALL_BUDGETS = (1, 4)  # besides the configuration's: a full batch has few nodes to spend on each sequence
_NUM_ROUNDS = 10  # of each budget
_LIMIT_S = 30.0  # the probe's end on a machine that is too slow for so many
_NUM_PROMPTS = 8
_NUM_POINTS = 24  # points of the calibration


@dataclass(frozen=True)
class Probe:
    """What was measured."""

    cost: CostCurve | None  # None: the drafter gives trees of one size only
    calibration: PiecewiseCalibration | None
    num_rounds: int
    seconds: float


def probe(target: Target, drafter: DFlashDrafter, config: TargetConfig) -> Probe:
    """Decode starter prompts at the configuration's budgets and small ones. Takes a few seconds."""
    started = time.monotonic()
    assert target.tokenizer is not None
    records = probe_rounds(
        target,
        drafter,
        [to_request(prompt, target.tokenizer, config).token_ids for prompt in probe_prompts()],
        budgets=(*_SMALL_BUDGETS, *config.budgets),
        num_candidates=config.num_candidates,
        num_rounds=_NUM_ROUNDS,
        limit_s=_LIMIT_S,
        max_length=min(config.max_length, target.max_position_embeddings),
    )
    cost = cost_of(records, describe_hardware(target.dtype_name, target.device))
    return Probe(cost, _calibration(records), len(records), time.monotonic() - started)


def probe_prompts() -> list[Prompt]:
    """The starter prompts that are decoded: the tasks take turns, for how often nodes are accepted differs by task."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(starter_prompts_path()):
        assert isinstance(prompt, Prompt)
        by_task.setdefault(prompt.task, []).append(prompt)
    turns = itertools.zip_longest(*by_task.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:_NUM_PROMPTS]


def measured_policy(found: Probe, config: TargetConfig) -> DecodingPolicy:
    """DDTree's trees with budgets that pay; with the configuration's fixed budget where too little was measured."""
    if found.cost is None or found.calibration is None:
        return ddtree(config.budget, config.num_candidates)
    budget = UtilityBudget(AcceptanceGain(found.calibration), found.cost, max(config.budgets))
    return DecodingPolicy("ddtree", MarginalScorer(), budget, config.num_candidates)


def _calibration(records: list[RoundRecord]) -> PiecewiseCalibration | None:
    """How often nodes became output, by the drafter's log-probability of their paths."""
    parts = [_node_scores(record) for record in records if record.budget > 0]
    if not parts:
        return None
    scores = np.concatenate([scores for scores, _ in parts])
    accepted = np.concatenate([accepted for _, accepted in parts])
    order = np.argsort(scores, kind="stable")
    groups = [group for group in np.array_split(order, _NUM_POINTS) if len(group) > 0]
    points = np.array([scores[group].mean() for group in groups])
    sizes = np.array([float(len(group)) for group in groups])
    chances = monotone_fit(np.array([accepted[group].mean() for group in groups]), sizes)
    rises = np.concatenate([[True], np.diff(points) > 1e-9])
    return PiecewiseCalibration(tuple(points[rises].tolist()), tuple(np.clip(chances[rises], 0, 1).tolist()))


def _node_scores(record: RoundRecord) -> tuple[np.ndarray, np.ndarray]:
    """Path scores and acceptance of a round's nodes, root excluded."""
    scores = np.zeros(record.budget + 1)
    for node in range(1, record.budget + 1):
        depth = record.tree_depths[node] - 1
        own = record.candidate_log_probs[depth][record.candidate_ids[depth] == record.tree_tokens[node]]
        scores[node] = scores[record.tree_parents[node]] + own[0]
    accepted = np.zeros(record.budget + 1)
    accepted[record.accepted] = 1.0
    return scores[1:], accepted[1:]
