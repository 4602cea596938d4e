"""Drift out of a store whose drafter is known to miss more or not, and what a retraining run makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from graft_dist.config import TargetConfig
from graft_dist.drafter import fingerprint, read_config, read_tensors
from graft_dist.drift import Drift, Verdict
from graft_dist.errors import GraftError
from graft_dist.policy import GraftPolicy
from graft_dist.prompt_source import PromptSource
from graft_dist.retraining import DriftRule, Retraining
from graft_dist.target import Target
from jobs.drift import DriftRequest, find_drift, run_drift
from jobs.policy_training import PolicyRequest
from jobs.retraining import RetrainRequest, run
from storage.registry import CHAMPION, PolicyVersion
from tests.graft_dist.policies import DATA, make_policy
from tests.jobs.learning_store import write_store


@dataclass
class FakeRegistry:
    """Holds one champion, or none."""

    folder: Path
    created_at: datetime | None

    def versions(self, slug: str) -> list[PolicyVersion]:
        if self.created_at is None:
            return []
        return [PolicyVersion(f"graft-{slug}", 3, (CHAMPION,), self.created_at, {}, {}, None)]

    def fetch(self, slug: str, version: int) -> Path:
        return self.folder


@dataclass
class Place:
    """A store with a run that the champion was trained on."""

    request: DriftRequest
    policy: GraftPolicy
    policy_folder: Path
    write: Callable[..., None]
    registry: FakeRegistry


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: TargetConfig, tiny_llama: Target, tiny_drafter_folder: Path
) -> Place:
    folder = tmp_path_factory.mktemp("drift")
    drafter = fingerprint(read_config(tiny_drafter_folder), read_tensors(tiny_drafter_folder)[0])

    def write(store: str, run_id: str, *, num_prompts: int = 30, **changes: object) -> None:
        write_store(Path(store), tiny_config, tiny_llama, drafter, num_prompts, run_id=run_id, **changes)  # type: ignore[arg-type]

    write(str(folder / "store"), "run-1")
    policy = make_policy(
        None, target_fingerprint=tiny_llama.fingerprint, drafter_fingerprint=drafter, slug=tiny_config.slug, data=DATA
    )
    request = DriftRequest(
        config=tiny_config,
        rule=DriftRule(min_rounds=400),
        store=str(folder / "store"),
        tracking_uri="sqlite:///nowhere",
        every_prompt=False,
    )
    policy.save(folder / "policy")
    return Place(request, policy, folder / "policy", write, FakeRegistry(folder / "policy", datetime.now(UTC)))


@pytest.fixture
def place(trained: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The same with a store of its own."""
    store = shutil.copytree(trained.request.store, tmp_path / "store")
    registry = replace(trained.registry)
    monkeypatch.setattr("jobs.drift.Registry", lambda uri: registry)
    return replace(trained, request=replace(trained.request, store=str(store)), registry=registry)


def test_traffic_that_is_drafted_worse_has_drifted(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_drift(place.request).verdict is Verdict.unseen  # there is none yet
    place.write(place.request.store, "serve-1", source="traffic", misses=0.5)
    drift = find_drift(place.request)
    assert drift.verdict is Verdict.drifted and drift.ratio is not None and drift.ratio < 0.8
    sides = {(row.side, row.task): row for row in drift.rows}
    # Two of the 30 prompts are such as a drafter was trained on: left out of training, but not of what users ask.
    assert (sides["training", "all"].num_prompts, sides["recent", "all"].num_prompts) == (28, 30)
    assert run_drift(place.request, "json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "drifted"


def test_traffic_that_is_drafted_alike_has_not(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.write(place.request.store, "serve-1", source="traffic")
    place.write(place.request.store, "later-run", misses=0.5)  # no traffic
    drift = find_drift(place.request)
    assert drift.verdict is Verdict.steady and drift.ratio == pytest.approx(1.0, abs=0.1)
    assert run_drift(place.request, "table") == 0
    assert capsys.readouterr().out.splitlines()[-1] == drift.sentence
    assert find_drift(replace(place.request, source="collect")).verdict is Verdict.drifted


def test_no_or_too_little_traffic_says_so(place: Place) -> None:
    assert find_drift(place.request).sentence.startswith("no drift seen (no traffic was recorded since 20")
    place.write(place.request.store, "serve-1", source="traffic", num_prompts=6, misses=0.5)
    few = find_drift(place.request)
    assert (
        few.verdict is Verdict.unseen and "rounds of traffic since" in few.sentence and "400 are asked" in few.sentence
    )
    future = replace(place.request, since=datetime(2100, 1, 1, tzinfo=UTC))
    assert find_drift(future).sentence == "no drift seen (no traffic was recorded since 2100-01-01 00:00 UTC)"


def test_without_anything_to_compare_with(place: Place, tmp_path: Path) -> None:
    place.write(place.request.store, "serve-1", source="traffic")
    place.registry.folder = replace(place.policy, data=replace(DATA, run_ids=("gone",))).save(tmp_path / "other")
    drift = find_drift(place.request)
    assert drift.verdict is Verdict.unknown and "no longer holds the rounds that champion v3" in drift.sentence
    place.write(place.request.store, "dense-1", dense_only=True)
    place.registry.created_at = datetime.now(UTC)
    place.write(place.request.store, "serve-2", source="traffic")
    place.registry.folder = replace(place.policy, data=replace(DATA, run_ids=("dense-1",))).save(tmp_path / "dense")
    assert "no longer holds the rounds that champion v3" in find_drift(place.request).sentence
    place.registry.created_at = None
    assert find_drift(place.request).sentence == "drift cannot be measured (there is no champion yet)"


@pytest.mark.parametrize("verdict", [Verdict.steady, Verdict.unseen, Verdict.drifted, Verdict.unknown])
def test_a_run_that_waits_for_drift(
    verdict: Verdict,
    tmp_path: Path,
    tiny_config: TargetConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("jobs.retraining.find_drift", lambda request: Drift(verdict, "what was found"))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello?"]}) + "\n")
    settings = Retraining(
        prompts=(PromptSource(path=str(tmp_path / "prompts.jsonl")),),
        store=str(tmp_path / "store"),
        runs=str(tmp_path / "runs"),
        min_new_sequences=5,
    )
    request = RetrainRequest(
        config=tiny_config,
        settings=settings,
        tracking_uri="sqlite:///nowhere",
        policy_request=lambda out: pytest.fail("nothing is trained"),
        only_if_drifted=True,
    )
    assert run(request) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "retrain: what was found" in lines
    is_over = verdict in (Verdict.steady, Verdict.unseen)
    assert lines[-1].startswith("retrain: nothing new: ")
    nothing = "0 fresh prompts and 0 recorded requests to learn from, and 5 are asked for"
    assert ("what was found" if is_over else nothing) in lines[-1]


def test_recorded_requests_are_reason_enough_to_train(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jobs.retraining.find_drift", lambda request: Drift(Verdict.drifted, "it has drifted"))
    (tmp_path / "prompts.jsonl").write_text("")

    def train(out: Path) -> PolicyRequest:
        raise GraftError("this is as far as it was to come")

    settings = Retraining(
        prompts=(PromptSource(path=str(tmp_path / "prompts.jsonl")),),
        store=place.request.store,
        runs=str(tmp_path / "runs"),
        min_new_sequences=5,
        min_rounds=100,
    )
    request = RetrainRequest(
        config=place.request.config,
        settings=settings,
        tracking_uri="sqlite:///nowhere",
        policy_request=train,
        only_if_drifted=True,
    )
    assert run(request) == 0  # what jobs have collected is no traffic
    assert "0 fresh prompts and 0 recorded requests to learn from" in capsys.readouterr().out.splitlines()[-1]
    place.write(place.request.store, "serve-1", source="traffic", num_prompts=10)
    picky = settings.model_copy(update={"min_new_sequences": 9})
    assert run(replace(request, settings=picky, run_id="2")) == 0
    assert "0 fresh prompts and 8 recorded requests" in capsys.readouterr().out.splitlines()[-1]  # two of them known
    many = settings.model_copy(update={"min_rounds": 100_000})
    assert run(replace(request, settings=many, run_id="3")) == 0  # training would refuse them
    assert "rounds to fit on, and --min-rounds asks for 100000" in capsys.readouterr().out
    assert run(replace(request, run_id="4")) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("failed at step train: this is as far as it was to come")
