"""How a learning run stands in MLflow, however it ends and however often it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from graft_dist.errors import RegistryError
from graft_dist.learning.tdes import Evaluation
from jobs.tracked_run import TrackedRun
from storage.registry import Registry

SETTINGS = {"width": 16, "reading": "sum"}
LOOKS = [Evaluation(0, 0.0, 2.0), Evaluation(10, 1.5, 1.0), Evaluation(20, 1.25, 0.75)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return Registry(f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


def opened(registry: Registry, run_id: str | None = None, place: str = "here") -> Any:
    return TrackedRun.open(registry, "tiny", run_id, SETTINGS, place)


def ended_with(registry: Registry, error: BaseException, run_id: str | None = None) -> str:
    """Open a run that ends with an error; its id."""
    known: list[str] = []
    with pytest.raises(type(error)), opened(registry, run_id) as tracked:
        known.append(tracked.run_id)
        raise error
    return known[0]


def status(registry: Registry, run_id: str) -> str:
    return registry.client.get_run(run_id).info.status


def test_a_run_stands_there_as_what_came_of_it(registry: Registry) -> None:
    with opened(registry) as tracked:
        assert status(registry, tracked.run_id) == "RUNNING"
    run = registry.client.get_run(tracked.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"width": "16", "reading": "sum"})
    assert status(registry, ended_with(registry, ValueError("broken"))) == "FAILED"
    assert status(registry, ended_with(registry, KeyboardInterrupt())) == "KILLED"
    assert status(registry, ended_with(registry, SystemExit(143))) == "KILLED"  # how SIGTERM arrives in a retraining


def test_a_run_that_is_resumed_is_running_again_and_ends_anew(registry: Registry) -> None:
    run_id = ended_with(registry, ValueError("broken"))
    with opened(registry, run_id) as tracked:
        assert tracked.run_id == run_id and status(registry, run_id) == "RUNNING"
    assert status(registry, run_id) == "FINISHED"
    assert ended_with(registry, KeyboardInterrupt(), run_id) == run_id
    assert status(registry, run_id) == "KILLED"
    with opened(registry, "0" * 32) as tracked:  # of another MLflow
        assert tracked.run_id not in (run_id, "0" * 32)


def test_a_run_that_was_killed_before_its_id_was_written_down_is_taken_up(registry: Registry) -> None:
    begun = opened(registry, place="a folder")  # held: one that is thrown away would end
    killed = begun.__enter__()
    with opened(registry, place="another folder") as tracked:
        assert tracked.run_id != killed.run_id
    with opened(registry, place="a folder") as tracked:
        assert tracked.run_id == killed.run_id
    with opened(registry, place="a folder") as tracked:  # that one has ended
        assert tracked.run_id != killed.run_id


def test_a_run_whose_settings_cannot_be_written_has_failed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run_id: str, **_: Any) -> None:
        raise MlflowException("no")

    known = {run.info.run_id for run in registry.client.search_runs([registry.experiment("tiny")])}
    with monkeypatch.context() as patch, pytest.raises(RegistryError, match="cannot be written: no"):
        patch.setattr(registry.client, "log_batch", refuse)
        opened(registry).__enter__()
    runs = registry.client.search_runs([registry.experiment("tiny")])
    assert [run.info.status for run in runs if run.info.run_id not in known] == ["FAILED"]


def test_an_mlflow_that_is_gone_hides_no_error(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run_id: str, status: str) -> None:
        raise MlflowException("gone")

    monkeypatch.setattr(registry.client, "set_terminated", refuse)
    run_id = ended_with(registry, ValueError("broken"))
    said = capsys.readouterr().out
    assert f"run {run_id} is not marked as failed" in said and "cannot be written: gone" in said


def test_results_that_are_logged_again_are_there_once(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    files = [tmp_path / "report.json"]

    def points(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in registry.client.get_metric_history(tracked.run_id, name)]

    with opened(registry) as tracked:
        tracked.log_results({"mat": 2.5, "ratio": 1.1}, LOOKS[:2], files)  # as a run that is stopped right after
        tracked.log_results({"mat": 2.5, "ratio": 1.1}, LOOKS, files)
    with opened(registry, tracked.run_id) as tracked:
        tracked.log_results({"mat": 2.5, "ratio": 1.2}, LOOKS, files)
    assert points("fit_held_out_kl") == [(0, 2.0), (10, 1.0), (20, 0.75)]
    assert points("fit_loss") == [(10, 1.5), (20, 1.25)]
    assert points("mat") == [(0, 2.5)]
    assert sorted(points("ratio")) == [(0, 1.1), (0, 1.2)]  # a number that has changed is not left out
    assert registry.client.get_run(tracked.run_id).data.metrics["ratio"] == 1.2
