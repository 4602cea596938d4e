"""The gate's evidence by replay, from a store whose prompts are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graft_dist.config import TargetConfig
from graft_dist.drafter import fingerprint, read_config, read_tensors
from graft_dist.errors import PolicyError
from graft_dist.prompt_source import PromptSource
from graft_dist.retraining import Retraining
from graft_dist.target import Target
from jobs.evaluation import Evaluator, _cost, evidence_of
from tests.graft_dist.policies import CURVE, make_policy
from tests.jobs.learning_store import write_store


def test_evidence_is_of_the_prompts_that_have_rounds_to_replay(
    tmp_path: Path, tiny_config: TargetConfig, tiny_llama: Target, tiny_drafter_folder: Path
) -> None:
    drafter = fingerprint(read_config(tiny_drafter_folder), read_tensors(tiny_drafter_folder)[0])
    store = tmp_path / "store"
    write_store(store, tiny_config, tiny_llama, drafter, 22)  # of which 5 are of the test split
    write_store(store, tiny_config, tiny_llama, drafter, 42, run_id="dense", dense_only=True)  # and 10: these and more
    policy = make_policy(
        None, kind="fixed", gain=None, fixed_budget=3, max_budget=4, slug=tiny_config.slug,
        target_fingerprint=tiny_llama.fingerprint, drafter_fingerprint=drafter,
    )  # fmt: skip
    settings = Retraining(prompts=(PromptSource(path="unread.jsonl"),), num_live_prompts=0, num_audit_prompts=0)
    evaluator = Evaluator(tiny_config, settings, str(store), None)
    found = evaluator.compare(None, (1, policy.save(tmp_path / "policy")))
    assert found["live"] is None and found["replay"]["num_prompts"] == 5
    evidence = evidence_of(found["replay"])
    assert evidence is not None and evidence.mat is not None and evidence.mismatch is not None
    assert evidence.mat.low <= evidence.mat.value <= evidence.mat.high
    assert evidence.mat.value == pytest.approx(evidence.challenger.mat / evidence.champion.mat)
    earlier = {name: value for name, value in found["replay"].items() if name not in ("mat", "mismatch")}
    assert evidence_of(earlier) == replace(evidence, mat=None, mismatch=None)  # as an earlier version recorded it


def test_the_gate_judges_under_the_costs_that_the_challenger_was_chosen_under() -> None:
    """Of several hardware's, of the first on which rounds were timed; the file's own order says nothing."""
    curves = {name: replace(CURVE, source=name) for name in ("a", "b, share of 8 sequences", "c")}
    policy = make_policy(None, cost_curves=curves)
    assert _cost(policy, ["unknown", "c", "a"]).source == "c"
    assert _cost(policy, ["b", "a"]).source == "b, share of 8 sequences"
    assert _cost(policy, ["unknown"]) in curves.values()
    with pytest.raises(PolicyError, match="no cost curve"):
        _cost(make_policy(None, cost_curves={}), ["a"])
