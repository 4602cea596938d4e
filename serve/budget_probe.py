"""A few seconds of decoding at start that tell what rounds cost on this hardware, and what draft nodes bring.

The result is DDTree's trees with a budget chosen per round: nodes are verified as long as their calibrated chance of
acceptance pays for them under the measured cost, jointly over the batch, down to no draft at all. Which is the policy
of an application that pins none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graft_dist.budget import AcceptanceGain, PiecewiseCalibration, UtilityBudget
from graft_dist.config import TargetConfig
from graft_dist.cost_curve import CostCurve, Timing, fit_cost_curve, monotone_fit
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.engine import Engine
from graft_dist.generate import to_request
from graft_dist.policy import DecodingPolicy, ddtree, exploring
from graft_dist.prompts import read_prompts, starter_prompts_path
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target

_ENOUGH_ROUNDS = 10  # rounds of each budget after which the probe ends
_MIN_ROUNDS = 3  # rounds of a budget whose median counts
_MAX_PROBE_S = 30.0  # the probe's end however slow the machine; the first rounds, which compile, come on top
_TOKENS_PER_PROMPT = 32
_NUM_POINTS = 24  # points of the calibration


@dataclass(frozen=True)
class Probe:
    """What was measured."""

    cost: CostCurve | None  # None: too few rounds to say
    calibration: PiecewiseCalibration | None
    num_rounds: int
    seconds: float


def probe(target: Target, drafter: DFlashDrafter, config: TargetConfig) -> Probe:
    """Decode starter prompts with budgets drawn at random, on an engine of its own. Takes a few seconds."""
    started = time.monotonic()
    policy = exploring((0, *config.budgets), seed=0, num_candidates=config.num_candidates)
    room = target.max_position_embeddings
    engine = Engine(target, drafter, policy, max_slots=1, max_length=min(config.max_length, room), record=True)
    records = _records(engine, config)
    where = "measured at start"
    timings = [timing for timing in _timings(records) if timing.num_rounds >= _MIN_ROUNDS]
    return Probe(fit_cost_curve(timings, where), _calibration(records), len(records), time.monotonic() - started)


def measured_policy(found: Probe, config: TargetConfig) -> DecodingPolicy:
    """DDTree's trees with budgets that pay; with the configuration's fixed budget where too little was measured."""
    if found.cost is None or found.calibration is None:
        return ddtree(config.budget, config.num_candidates)
    budget = UtilityBudget(AcceptanceGain(found.calibration), found.cost, max(config.budgets))
    return DecodingPolicy("ddtree", MarginalScorer(), budget, config.num_candidates)


def _records(engine: Engine, config: TargetConfig) -> list[RoundRecord]:
    """Rounds of the starter prompts until there are enough; those of the first prompt only warm up."""
    assert engine.target.tokenizer is not None
    records: list[RoundRecord] = []
    missing = dict.fromkeys((0, *config.budgets), _ENOUGH_ROUNDS)
    deadline = float("inf")
    for number, prompt in enumerate(read_prompts(starter_prompts_path())):
        token_ids = to_request(prompt, engine.target.tokenizer, config).token_ids[: engine.max_length // 2]
        params = SamplingParams(max_new_tokens=min(_TOKENS_PER_PROMPT, engine.max_length // 2 - 1), ignore_eos=True)
        engine.add(token_ids, params)
        while engine.has_work:
            found = [event.round for event in engine.step() if event.finish_reason is None and event.round is not None]
            if number == 0:
                continue
            records += found
            for record in found:
                missing[record.budget] = missing.get(record.budget, 0) - 1
            if max(missing.values()) <= 0 or time.monotonic() > deadline:
                return records
        if number == 0:
            deadline = time.monotonic() + _MAX_PROBE_S
    return records


def _timings(records: list[RoundRecord]) -> Iterator[Timing]:
    """Medians by budget."""
    for budget in sorted({record.budget for record in records}):
        own = [record for record in records if record.budget == budget]
        whole = [record.draft_ns + record.build_ns + record.verify_ns + record.commit_ns for record in own]
        undrafted = [record.verify_ns + record.commit_ns for record in own]
        yield Timing(budget, float(np.median(whole)) / 1e6, float(np.median(undrafted)) / 1e6, len(own))


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
