"""Fitting to a store in which some rounds are broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from graft_dist.edge_scorer import TdesConfig
from graft_dist.learning.tdes import TdesTraining
from graft_dist.rounds import RoundRecord
from jobs.scorer_training import Placement, ScorerPlan, fit_scorer
from storage import TrajectoryStore, UnitKey, connect
from storage.learning_rounds import RoundShape, recorded_sequences
from tests.storage.records import DATASET, PROVENANCE, make_round, make_sequence


def spoilt(record: RoundRecord, column: str, value: float) -> RoundRecord:
    numbers = getattr(record, column).copy()
    numbers[0, 1] = value
    return replace(record, **{column: numbers})


def test_rounds_that_are_not_finite_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("fit-1", "fit-2", "tune-1")
    rounds = [make_round(name, index, hidden=np.ones((2, 4), np.float32)) for name in names for index in range(4)]
    rounds[1] = spoilt(rounds[1], "parent_logits", np.nan)
    rounds[4] = spoilt(rounds[4], "candidate_log_probs", -np.inf)
    rounds[6] = spoilt(rounds[6], "hidden", np.inf)
    rounds[9] = spoilt(rounds[9], "parent_logits", np.nan)
    store = TrajectoryStore(tmp_path / "store")
    turn = store.begin("run", "tiny", DATASET)
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, [make_sequence(name, 4) for name in names], rounds), "run", turn)
    shape = RoundShape(2, 3, 4)
    with connect(str(tmp_path / "store"), threads=1) as connection:
        sequences = recorded_sequences(connection, "tiny", "d-1", shape)
    plan = ScorerPlan(
        store=str(tmp_path / "store"),
        snapshot=store.snapshot(),
        slug="tiny",
        shape=shape,
        fit=tuple(sequences[:2]),
        tune=tuple(sequences[2:]),
        target="tiny",
        revision=None,
        network=TdesConfig(embedding_size=6, draft_depth=2, width=4, projection_size=4, gate_rank=2, hidden_size=4),
        training=TdesTraining(steps=4, rounds_per_step=3, evaluate_every=2),
        out=tmp_path / "run",
        identity="run",
        threads=1,
        lessons=tmp_path / "run" / "lessons",
    )
    network, looks = fit_scorer(plan, Placement(0, None), torch.randn(16, 6))
    assert [look.step for look in looks] == [0, 2, 4]
    assert all(np.isfinite([look.loss, look.held_out_kl]).all() for look in looks)
    assert all(bool(parameter.isfinite().all()) for parameter in network.parameters())
    printed = capsys.readouterr().out
    assert "3 rounds to fit on hold numbers that are not finite" in printed
    assert "1 rounds to tune on hold numbers that are not finite" in printed
