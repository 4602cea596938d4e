"""How a retraining run ends when a step meets trouble, with what its steps call replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.drift import Drift, Verdict
from graft_dist.errors import GraftError, StoreError
from graft_dist.prompt_source import PromptSource
from graft_dist.retraining import Retraining
from jobs import retraining
from jobs.cluster import ClusterBusyError
from jobs.driver import Ending
from jobs.policy_training import PolicyRequest
from jobs.retraining import RetrainRequest
from storage.trajectories import Compaction

STEPS = ("choose", "collect", "compact", "train", "evaluate", "decide", "clean")


@dataclass
class Trouble:
    """What goes wrong, until a test mends it; and the store, registry and evaluator that it goes wrong in."""

    collects: int = 0  # exit code
    store: StoreError | None = None
    evaluates: GraftError | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)  # prompt files that were collected

    def collect(self, request: Any) -> int:
        self.asked.append(request.prompts)
        return self.collects

    def compact(self) -> Compaction:
        if self.store is not None:
            raise self.store
        return Compaction(4, 2, 0)

    def forget(self, **_: Any) -> int:
        if self.store is not None:
            raise self.store
        return 3

    def vacuum(self) -> list[str]:
        return ["a file"]

    def version_of(self, slug: str, policy: Path) -> int:
        return 1

    def resolve(self, slug: str, alias: str) -> None:
        return None

    def compare(self, theirs: object, ours: object) -> dict[str, Any]:
        raise self.evaluates or AssertionError("no test comes so far")


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Trouble:
    made = Trouble()
    for name in ("TrajectoryStore", "Registry", "Evaluator"):
        monkeypatch.setattr(retraining, name, lambda *_: made)
    monkeypatch.setattr(retraining, "collect", made.collect)
    monkeypatch.setattr(retraining, "train", lambda request: 0)
    monkeypatch.setattr(retraining, "find_drift", lambda request: Drift(Verdict.unknown, "nothing is known"))
    return made


@pytest.fixture
def run(tmp_path: Path, tiny_config: TargetConfig) -> Callable[[str], int]:
    """Start a run of this id, or go on with it."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello?"]}) + "\n")
    settings = Retraining(
        prompts=(PromptSource(path=str(tmp_path / "prompts.jsonl")),),
        store=str(tmp_path / "store"),
        runs=str(tmp_path / "runs"),
        every_prompt=True,
        keep_days=30,
    )

    def policy_request(out: Path) -> PolicyRequest:
        return None  # type: ignore[return-value]  # nothing is trained

    def start(run_id: str) -> int:
        request = RetrainRequest(
            config=tiny_config, settings=settings, tracking_uri="", policy_request=policy_request, run_id=run_id
        )
        return retraining.run(request)

    return start


def records(tmp_path: Path, run_id: str) -> dict[str, Any]:
    """The results of a run's finished steps, and its end if it has come to one."""
    (folder,) = (tmp_path / "runs").glob(f"*/{run_id}")
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name.rpartition("-")[2]: record.get("result", record) for name, record in found.items()}


def test_a_collection_that_is_cut_off_is_gone_on_with(
    run: Callable[[str], int], trouble: Trouble, tmp_path: Path
) -> None:
    trouble.collects = Ending.CUT_OFF.value
    assert run("1") == Ending.CUT_OFF.value
    assert records(tmp_path, "1").keys() == {"choose"}
    trouble.collects, trouble.evaluates = Ending.PARTIAL.value, GraftError("enough")
    assert run("1") == 1
    assert records(tmp_path, "1")["collect"] == {"exit_code": 3}
    assert len(trouble.asked) == 2 and trouble.asked[0] == trouble.asked[1]


def test_upkeep_that_meets_anothers_is_left_out(run: Callable[[str], int], trouble: Trouble, tmp_path: Path) -> None:
    trouble.store, trouble.evaluates = StoreError("another one was faster"), GraftError("enough")
    assert run("1") == 1
    assert records(tmp_path, "1")["compact"] == {"skipped": "another one was faster"}

    (folder,) = (tmp_path / "runs").glob("*")
    (folder / "2").mkdir()
    for number, step in enumerate(STEPS[:-1], start=1):
        (folder / "2" / f"{number}-{step}.json").write_text(json.dumps({"step": step, "result": {"line": "kept v1"}}))
    assert run("2") == 0
    assert records(tmp_path, "2")["clean"] == {"skipped": "another one was faster", "num_deleted_files": 1}


def test_a_challenger_that_was_not_judged_is_trained_again(
    run: Callable[[str], int], trouble: Trouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trouble.evaluates = ClusterBusyError("there was no room")
    assert run("1") == 1  # the same run goes on, once there is
    assert "end" not in records(tmp_path, "1") and "train" in records(tmp_path, "1")
    trouble.evaluates = GraftError("a file was gone")
    assert run("1") == 1
    assert records(tmp_path, "1")["end"]["line"] == "failed at step evaluate: a file was gone"
    capsys.readouterr()
    assert run("2") == 1  # with no prompt left to ask, the rounds of run 1 are what is new
    assert "failed at step evaluate" in capsys.readouterr().out
    assert records(tmp_path, "2")["choose"]["num_prompts"] == 0 and len(trouble.asked) == 1
