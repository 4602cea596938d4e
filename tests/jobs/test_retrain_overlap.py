"""Two starts of the retraining command at once, with what its steps call replaced."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from jobs.retrain import _parser, main, request_from
from jobs.retraining import run
from tests.jobs.fake_loop import Loop

DEADLINE_S = 60.0  # no test comes near it, unless it fails


@dataclass
class Gate:
    """Where the collection of one target waits, once it has said that it is there."""

    slug: str
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: Any) -> None:
        if request.spec.config.slug == self.slug and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)


@dataclass
class Place:
    """A folder with configurations, and the loop that all runs there share."""

    folder: Path
    config: TargetConfig
    loop: Loop

    def arguments(self, *more: str, target: str | None = None) -> list[str]:
        """Of the command for a target, the tiny one or another, with store and runs in the folder."""
        config = self.config.model_dump(mode="json") | ({} if target is None else {"target": target})
        config["retrain"] = {
            "prompts": [{"path": str(self.folder / "prompts.jsonl")}],
            "store": str(self.folder / "store"),
            "runs": str(self.folder / "runs"),
            "tracking_uri": f"sqlite:///{self.folder / 'mlflow.db'}",
            "every_prompt": True,
        }
        path = self.folder / f"{target or 'tiny'}.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        return ["--config", str(path), *more]

    @contextmanager
    def at_work(self, *more: str) -> Iterator[tuple[Gate, Future[int]]]:
        """A first run of the tiny target that is in the middle of its collection; it ends when the gate is opened."""
        gate = Gate(self.config.slug)
        self.loop.during["collect"] = gate
        # In a thread: signals, which the command sets its handlers for, are of the main thread alone.
        request = request_from(_parser().parse_args(self.arguments("--run-id", "first", *more)))
        with ThreadPoolExecutor(1) as executor:
            ending = executor.submit(run, request)
            try:
                assert gate.reached.wait(DEADLINE_S)
                yield gate, ending
            finally:
                gate.opened.set()
            assert ending.result(DEADLINE_S) == 0

    def runs_of(self, slug: str, runs: str = "runs") -> list[str]:
        return sorted(path.parent.name for path in (self.folder / runs / slug).glob("*/end.json"))


@pytest.fixture
def place(tmp_path: Path, tiny_config: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello?"]}) + "\n")
    loop = Loop()
    loop.install(monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    yield Place(tmp_path, tiny_config, loop)
    signal.signal(signal.SIGTERM, handler)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_a_second_run_of_a_target_leaves(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with place.at_work():
        assert main(place.arguments("--run-id", "second")) == 75
        assert last_line(capsys).startswith("retrain: run first is at work (process ")
        assert place.loop.calls["collect"] == 1
    assert last_line(capsys).startswith("retrain: promoted v1")
    assert place.runs_of(place.config.slug) == ["first"]


def test_a_second_run_of_a_target_waits_and_then_runs(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with place.at_work() as (gate, first):
        threading.Timer(0.2, gate.opened.set).start()
        (place.folder / "prompts.jsonl").write_text(json.dumps({"id": "b", "task": "chat", "turns": ["Well?"]}) + "\n")
        assert main(place.arguments("--run-id", "second", "--wait", str(DEADLINE_S))) == 0
        assert first.done() or first.result(DEADLINE_S) == 0
        second = place.folder / "runs" / place.config.slug / "second"
        assert (second / "1-choose.json").stat().st_mtime >= (second.parent / "first" / "end.json").stat().st_mtime
    assert place.runs_of(place.config.slug) == ["first", "second"]


def test_runs_of_one_store_are_kept_apart_wherever_they_leave_their_records(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = ["--run-id", "second", "--runs", str(place.folder / "elsewhere")]
    with place.at_work():
        assert main(place.arguments(*elsewhere)) == 75
        assert last_line(capsys).startswith("retrain: run first is at work")
        assert main(place.arguments(*elsewhere, "--store", (place.folder / "store").as_uri())) == 75
    assert main(place.arguments(*elsewhere)) == 0
    assert place.runs_of(place.config.slug, "elsewhere") == ["second"]
    assert not list((place.folder / "store" / "_leases").glob("*.json"))


def test_runs_that_leave_their_records_in_one_folder_are_kept_apart_whatever_their_store(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with place.at_work():
        assert main(place.arguments("--store", str(place.folder / "another"))) == 75
        assert last_line(capsys).startswith("retrain: run first is at work")


def test_two_targets_with_one_store_and_registry_run_side_by_side(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with place.at_work() as (_, first):
        assert main(place.arguments("--run-id", "other", target="other-model")) == 0
        assert last_line(capsys).startswith("retrain: promoted v1") and not first.done()
        assert place.runs_of("other-model") == ["other"] and place.runs_of(place.config.slug) == []
    assert place.runs_of(place.config.slug) == ["first"]


@pytest.mark.parametrize(
    ("store", "has_store_lease"), [("s3://bucket/store", False), ("/data/store", True), ("file:///data/store", True)]
)
def test_where_leases_are(store: str, has_store_lease: bool, place: Place) -> None:
    request = request_from(_parser().parse_args(place.arguments("--store", store)))
    slug = place.config.slug
    expected = [place.folder / "runs" / slug / "lease.json", Path("/data/store/_leases") / f"{slug}.json"]
    assert request.leases == expected[: 1 + has_store_lease]
