"""The request of a retraining run, and that of its training, as options and configuration describe them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import ConfigError
from jobs.retrain import _parser, request_from
from jobs.retraining import _check_places, run

TARGETS = sorted((Path(__file__).resolve().parents[2] / "targets").glob("*.yaml"))
SCHEDULED = [path for path in TARGETS if load_config(path).schedule is not None]


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"metadata": {"job_submission_id": "raysubmit_1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(described))


def request(tmp_path: Path, tiny_config: TargetConfig, *arguments: str, **retrain: Any) -> Any:
    config = tiny_config.model_dump(mode="json", exclude_none=True)
    config["retrain"] = {"prompts": [{"path": "/data/prompts.jsonl"}], **retrain}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    return request_from(_parser().parse_args(["--config", str(tmp_path / "tiny.yaml"), *arguments]))


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("store", ["~/store", "file:///data/store", "/data/store"])
def test_a_submitted_job_trains_on_the_store_that_it_collects_into(
    tmp_path: Path, tiny_config: TargetConfig, store: str
) -> None:
    made = request(tmp_path, tiny_config, store=store)
    training = made.policy_request(tmp_path / "training")
    expected = {"~/store": str(Path("~/store").expanduser())}.get(store, "/data/store")
    assert training.store == expected


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize(("key", "place"), [("store", "store"), ("runs", "runs")])
def test_a_submitted_job_refuses_places_that_others_do_not_see(
    tmp_path: Path, tiny_config: TargetConfig, key: str, place: str
) -> None:
    made = request(tmp_path, tiny_config, **{"store": "/data/store", "runs": str(tmp_path), key: place})
    with pytest.raises(ConfigError, match=f"retrain.{key} {place} is relative, but a submitted job"):
        run(made)


@pytest.mark.parametrize("traffic", ["/data/store", "file:///data/store/", "/data/traffic"])
def test_that_drift_is_looked_for_elsewhere_is_said(
    tmp_path: Path, tiny_config: TargetConfig, traffic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"path": "/data/prompts.jsonl"}, {"traffic": traffic}]
    made = request(tmp_path, tiny_config, "--if-drifted", store="/data/store", runs="/data/runs", prompts=prompts)
    _check_places(made)
    said = capsys.readouterr().out
    assert ("in retrain.store, /data/store; what lies in /data/traffic is asked again" in said) == (
        "traffic" in traffic
    )


def test_runs_are_at_one_place_for_every_process(
    tmp_path: Path, tiny_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert request(tmp_path, tiny_config, runs="runs").runs == tmp_path / "runs" / tiny_config.slug


def test_impossible_options_are_said_in_a_sentence(tmp_path: Path, tiny_config: TargetConfig) -> None:
    with pytest.raises(ConfigError, match="--num-prompts: allowed is a whole number"):
        request(tmp_path, tiny_config, "--num-prompts", "20000000")
    with pytest.raises(ConfigError, match="--num-workers: allowed is"):
        request(tmp_path, tiny_config, "--num-workers", "-1")


def test_training_waits_for_nodes(tmp_path: Path, tiny_config: TargetConfig) -> None:
    made = request(tmp_path, tiny_config, store="/data/store", num_workers=2)
    assert made.policy_request(tmp_path / "training").placement.wait_for_nodes_s > 0


@pytest.mark.parametrize(("options", "expected"), [((), 2), (("--num-workers", "0"), 0), (("--num-workers", "3"), 3)])
def test_the_workers_are_the_options_before_the_configurations(
    tmp_path: Path, tiny_config: TargetConfig, options: tuple[str, ...], expected: int
) -> None:
    made = request(tmp_path, tiny_config, *options, store="/data/store", num_workers=2)
    assert made.settings.num_workers == expected
    assert made.policy_request(tmp_path / "training").placement.num_workers == expected


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("path", SCHEDULED, ids=lambda path: path.stem)
def test_every_shipped_schedule_starts_a_job_that_knows_what_to_do(path: Path, tmp_path: Path) -> None:
    schedule = load_config(path).schedule
    assert schedule is not None
    words = shlex.split(schedule.command(str(path)))
    assert words[:2] == ["python", "jobs/retrain.py"]
    made = request_from(_parser().parse_args(words[2:]))
    assert made.settings.prompts and made.policy_request(tmp_path / "training").config == made.config
    _check_places(made)


@pytest.mark.usefixtures("in_a_job")
def test_a_submitted_job_refuses_places_in_its_own_copy(tmp_path: Path, tiny_config: TargetConfig) -> None:
    made = request(tmp_path, tiny_config, store="/data/store", runs="/data/runs", prompts=[{"traffic": "traffic"}])
    with pytest.raises(ConfigError, match=r"retrain\.prompts traffic is relative"):
        _check_places(made)


def test_some_targets_have_schedules() -> None:
    assert {"smollm2-135m", "qwen3-8b"} <= {path.stem for path in SCHEDULED}
