"""The replay benchmark passes through a store and keeps its rows; how long it takes is nobody's test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import replay as bench
from tests.graft_dist.policies import make_policy, random_network
from tests.storage.records import commit_replayable


def test_every_scorer_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_replayable(tmp_path / "store")
    make_policy(random_network(8, depth=2), drafter_fingerprint="d-1").save(tmp_path / "policy")
    monkeypatch.setattr(bench, "load_config", lambda name: SimpleNamespace(slug="tiny", target="any", revision=None))
    monkeypatch.setattr(bench, "shipped_policy", lambda slug: tmp_path / "policy")
    monkeypatch.setattr(bench, "read_embeddings", lambda target, revision: torch.randn(1000, 8))
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, processors: None)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    out = tmp_path / "replay.json"
    bench.main(["--store", str(tmp_path / "store"), "--out", str(out)])
    kept = json.loads(out.read_text())
    assert [(row["scorer"], row["budget"], row["policies"]) for row in kept["rows"]] == [
        ("marginal", 64, 6), ("learned", 64, 6),
    ]  # fmt: skip
    # Five rounds that can be replayed, decoded and dense.
    assert all(row["rounds"] == 5 and row["rounds_per_s"] > 0 for row in kept["rows"])
    assert kept["machine"]["cpu"]
