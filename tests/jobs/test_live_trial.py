"""The live trial with a tiny random target: both policies take turns, and the audit does not depend on that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graft_dist.config import TargetConfig
from graft_dist.drafter import fingerprint, read_config, read_tensors
from graft_dist.generate import Request
from graft_dist.target import Target
from jobs.live_trial import LivePlan, run_live
from tests.graft_dist.policies import make_policy


@pytest.fixture
def plan(tmp_path: Path, tiny_config: TargetConfig, tiny_drafter_folder: Path, tiny_llama: Target) -> LivePlan:
    drafter = fingerprint(read_config(tiny_drafter_folder), read_tensors(tiny_drafter_folder)[0])
    policy = make_policy(
        None, kind="fixed", gain=None, fixed_budget=3, max_budget=4,
        target_fingerprint=tiny_llama.fingerprint, drafter_fingerprint=drafter,
    )  # fmt: skip
    return LivePlan(
        config=tiny_config,
        requests=tuple(Request(f"r{number}", "chat", [5, 6, 7 + number]) for number in range(3)),
        num_turns=3,
        num_audited=2,
        max_new_tokens=8,
        challenger=str(policy.save(tmp_path / "policy")),
        champion=None,
        ddtree_budget=4,
        num_threads=1,
    )


def test_turns_and_audit(plan: LivePlan) -> None:
    found = run_live(plan)
    assert found.turns is not None and [len(side.num_tokens) for side in found.turns] == [3, 3]
    assert found.audit is not None and (found.audit.num_audited, found.audit.num_bugs) == (2, 0)


def test_without_turns_the_audit_is_made_all_the_same(plan: LivePlan) -> None:
    found = run_live(replace(plan, num_turns=0))
    assert found.turns is None
    assert found.audit is not None and (found.audit.num_audited, found.audit.num_bugs) == (2, 0)
    assert run_live(replace(plan, num_turns=1)).audit == found.audit
    assert run_live(replace(plan, num_turns=1, num_audited=0)).audit is None
