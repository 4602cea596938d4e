"""From recorded rounds to decoding, in one line: dense rounds with hidden states, a gated scorer, budgets, a policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from graft_dist.budget import AcceptanceGain
from graft_dist.cost_curve import CostCurve
from graft_dist.dense import dense_rounds
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import TdesConfig, TdesNetwork, TdesScorer, fold_projection, hidden_projection
from graft_dist.learning.saba import fit_calibrations, observe
from graft_dist.learning.tdes import TdesTraining, fit, lessons_of
from graft_dist.policy import DataIdentity, GraftPolicy, plain
from graft_dist.replay import RecordedRounds, walk_rounds
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.graft_dist.test_drafter import tiny_model
from tests.graft_dist.test_lossless import decode, prompts

NUM_HIDDEN, WIDTH, BUDGET = 6, 8, 24
COST = CostCurve((0, 1, 24), (10.0, 10.1, 10.5), "hand")


def as_rounds(records: list[RoundRecord], num_left: list[int]) -> RecordedRounds:
    """Dense records as a store gives them back."""
    depth = records[0].candidate_ids.shape[0]
    followed = [[*record.followed.tolist(), *[-1] * depth][:depth] for record in records]
    return RecordedRounds(
        groups=[("dense", "any")] * len(records),
        unit_ids=["u"] * len(records),
        sequence_ids=[record.sequence_id for record in records],
        round_indices=np.array([record.round_index for record in records], np.int32),
        context_lengths=np.array([record.context_length for record in records], np.int32),
        root_tokens=np.array([record.root_token for record in records], np.int64),
        candidate_ids=np.stack([record.candidate_ids for record in records]),
        log_probs=np.stack([record.candidate_log_probs for record in records]),
        followed=np.array(followed, np.int32),
        num_left=np.array(num_left, np.int32),
        rooms=np.array(num_left, np.int32),
        conf=np.array([record.conf for record in records], np.float32),
        degen=np.array([record.degen for record in records], np.float32),
        hist=np.zeros(len(records), np.float32),
        hidden=np.stack([record.hidden for record in records if record.hidden is not None]),
    )


def test_what_was_learned_decodes(tiny_llama: Target, tmp_path: Path) -> None:
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "untrained")
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    asked = prompts(tiny_llama.vocab_size, lengths=(7, 5, 9))
    answers = decode(tiny_llama, None, plain(), [(prompt, params) for prompt in asked])[0]
    projection = hidden_projection(drafter.fingerprint, tiny_llama.hidden_size, NUM_HIDDEN)
    records: list[RoundRecord] = []
    num_left: list[int] = []
    for index, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        records += dense_rounds(tiny_llama, drafter, f"s{index}", prompt, answer, WIDTH, projection)
        num_left += range(len(answer) - 1, 0, -1)

    lessons = lessons_of(records)
    assert lessons.hidden is not None and lessons.hidden.shape == (len(records), drafter.draft_depth, NUM_HIDDEN)
    config = TdesConfig(
        embedding_size=tiny_llama.hidden_size, draft_depth=drafter.draft_depth, width=8, gate_rank=2,
        hidden_size=NUM_HIDDEN, reliance=True,
    )  # fmt: skip
    training = TdesTraining(steps=30, rounds_per_step=32, evaluate_every=30, weight_decay=1.0)
    fitted = fit(TdesNetwork(config), tiny_llama.embedding_weight, lessons, lessons, training)
    assert fitted.best.held_out_kl < fitted.evaluations[0].held_out_kl

    scorer = TdesScorer(fitted.network, tiny_llama.embedding_weight)
    rounds = as_rounds(records, num_left)
    seen = observe(rounds, walk_rounds(rounds, scorer, BUDGET), BUDGET)
    calibration = fit_calibrations([seen, seen]).best.calibration
    policy = GraftPolicy(
        slug="tiny",
        target_fingerprint=tiny_llama.fingerprint,
        drafter_fingerprint=drafter.fingerprint,
        software="test",
        tdes=fold_projection(fitted.network, projection),
        kind="marginal",
        gain=AcceptanceGain(calibration),
        form="price",
        num_candidates=WIDTH,
        max_budget=BUDGET,
        data=DataIdentity("none", (), 0, len(asked), 0, len(records), 0),
    )
    loaded = GraftPolicy.load(policy.save(tmp_path / "policy"))
    again = walk_rounds(rounds, loaded.replay_scorer(tiny_llama.embedding_weight, NUM_HIDDEN), BUDGET)
    assert (again.path_nodes == walk_rounds(rounds, scorer, BUDGET).path_nodes).mean() > 0.99
    requests = [(prompt, params) for prompt in asked]
    decoding = loaded.decoding_policy(tiny_llama, drafter, COST)
    got, _, found = decode(tiny_llama, drafter, decoding, requests, max_slots=2, record=True)
    assert got == answers
    assert sum(record.budget for per in found for record in per) > 0
    assert torch.isfinite(torch.tensor([record.conf for per in found for record in per])).all()
