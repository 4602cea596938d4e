"""The drafter job: answers into the store, training on one and two workers, resuming, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml
from ray.train import WorkerGroupError
from safetensors.torch import load_file

from graft_dist.config import TargetConfig, load_config
from graft_dist.drafter import read_config
from graft_dist.errors import DrafterError
from graft_dist.learning.drafter import Answer
from graft_dist.prompts import is_held_out, prompt_hash, read_prompts
from jobs.cluster import Cluster
from jobs.collection import CollectRequest
from jobs.drafter_training import DrafterRequest, read_answers, render_all, run, train
from jobs.drafter_training import _prompts_by_id as prompts_by_id
from jobs.train_drafter import _parser, main, request_from
from storage import TrajectoryStore, UnitKey
from tests.storage.records import DATASET, PROVENANCE, make_sequence


@pytest.fixture
def config_file(tiny_config: TargetConfig, tmp_path: Path) -> Path:
    path = tmp_path / "target.yaml"
    path.write_text(yaml.safe_dump(tiny_config.model_dump(mode="json", exclude_none=True)))
    return path


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "task": "chat", "turns": [f"say {i} and {i * i}"]} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(config: Path, prompts: Path, folder: Path, *more: str) -> list[str]:
    return [
        "--config", str(config), "--prompts", str(prompts), "--store", str(folder / "store"),
        "--out", str(folder / "run"), "--taps", "1,4", "--mask-token", "0", "--block-size", "5", "--steps", "4",
        "--sequences-per-step", "8", "--anchors", "8", "--evaluate-every", "2", "--checkpoint-every", "2",
        "--max-new-tokens", "12", "--slots", "8", "--address", "local", *more,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.ray
def test_the_job_answers_trains_and_goes_on_where_it_ended(
    config_file: Path,
    prompts_file: Path,
    joinable: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = arguments(config_file, prompts_file, tmp_path, "--temperatures", "0,0.8")
    assert main([*command, "--address", joinable]) == 0
    assert not ray.is_initialized()
    by_id = prompts_by_id([str(prompts_file)])
    config = request_from(_parser().parse_args(command)).config
    training, held_out = read_answers(str(tmp_path / "store"), config.slug, by_id, render_all(config, by_id))
    num_held_out = sum(is_held_out(prompt.turns) for prompt in by_id.values())
    assert (len(training), len(held_out)) == (2 * (40 - num_held_out), num_held_out)
    assert read_config(tmp_path / "run" / "drafter").block_size == 5
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == [2, 4]
    capsys.readouterr()
    longer = [argument if argument != "4" else "6" for argument in command]
    monkeypatch.setenv("RAY_worker_niceness", "0")  # the lowest priority by default: loading would take minutes
    assert main([*longer, "--temperatures", "0"]) == 0  # with a Ray of its own
    assert not ray.is_initialized()
    printed = capsys.readouterr().out
    assert "resumed at step 4 of 6" in printed
    assert "40 sequences are there already" in printed


@pytest.mark.slow
@pytest.mark.ray
def test_two_workers_train_what_one_trains(
    config_file: Path, prompts_file: Path, joinable: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    answers = [Answer((1, 5, 9, i % 50 + 3), tuple(rng.integers(3, 300, 14).tolist())) for i in range(24)]
    request = request_from(_parser().parse_args(arguments(config_file, prompts_file, tmp_path, "--address", joinable)))
    results = []
    for num_workers in (1, 2):
        chosen: DrafterRequest = replace(request, num_workers=num_workers, out=tmp_path / f"run-{num_workers}")
        score = train(chosen, answers[4:], answers[:4])
        assert score is not None
        results.append((score, load_file(chosen.out / "drafter" / "model.safetensors")))
    (one_score, one), (two_score, two) = results
    assert one_score.depth_accuracy == pytest.approx(two_score.depth_accuracy, abs=0.05)
    for name, tensor in one.items():
        assert float((tensor.float() - two[name].float()).abs().max()) < 0.02, name
    with pytest.raises(DrafterError, match="another recipe or other answers"):
        train(replace(chosen, num_workers=1), answers[5:], answers[:4])


def test_the_job_can_be_run_as_a_file(tmp_path: Path) -> None:
    job = Path(__file__).resolve().parents[2] / "jobs" / "train_drafter.py"
    assert subprocess.run([sys.executable, job, "--help"], cwd=tmp_path, check=False).returncode == 0


def test_a_refusal_of_a_worker_comes_out_as_it_is(
    config_file: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, *args: object, **options: object) -> None:
            pass

        def fit(self) -> None:
            failures = {0: RuntimeError("connection closed by peer"), 1: DrafterError("another recipe")}
            raise WorkerGroupError("a traceback", failures)

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Failing)
    monkeypatch.setattr("jobs.cluster.connect", lambda *_: Cluster(False, "joined", {}))
    request = request_from(_parser().parse_args(arguments(config_file, prompts_file, tmp_path, "--workers", "2")))
    with pytest.raises(DrafterError, match=r"^another recipe$"):
        train(request, [], [])


def test_held_out_prompts_are_answered_greedily_and_no_more_than_the_score_needs(
    config_file: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, list[str]]] = []

    def collect(request: CollectRequest) -> int:
        ids = [prompt.id for prompt in read_prompts(request.prompts)]
        asked.append((request.spec.sampling.temperature, ids))
        return 0

    monkeypatch.setattr("jobs.drafter_training.collect", collect)
    request = request_from(_parser().parse_args(arguments(config_file, prompts_file, tmp_path)))
    by_id = prompts_by_id([str(prompts_file)])
    trained = [prompt.id for prompt in by_id.values() if not is_held_out(prompt.turns)]
    held_out = sorted(by_id.keys() - trained, key=lambda name: prompt_hash(by_id[name].turns))
    assert len(held_out) > 3
    for temperatures in ((0.0, 0.7), (0.7,), (0.0, 0.7)):
        with pytest.raises(DrafterError, match="no answer to a training prompt"):
            run(replace(request, temperatures=temperatures, num_held_out=3))
    greedy, sampled, *others, greedy_again, sampled_again = asked
    assert greedy == greedy_again == (0.0, trained + held_out[:3])
    assert sampled == sampled_again == (0.7, trained)
    assert others == [(0.7, trained), (0.0, held_out[:3])]


def test_an_id_with_another_text_is_not_trained_on(
    config_file: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(config_file)
    by_id = prompts_by_id([str(prompts_file)])
    rendered = render_all(config, by_id)
    trained = [prompt.id for prompt in by_id.values() if not is_held_out(prompt.turns)]
    store = TrajectoryStore(tmp_path / "store")
    turn = store.begin("run", "tiny", DATASET)
    asked = {trained[0]: rendered[trained[0]], trained[1]: rendered[trained[2]], "unknown": rendered[trained[3]]}
    sequences = [make_sequence(name, 0, prompt_id=name, prompt_token_ids=list(ids)) for name, ids in asked.items()]
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, sequences, []), "run", turn)
    training, held_out = read_answers(str(store.path), "tiny", by_id, rendered)
    assert [answer.prompt_token_ids for answer in training] == [rendered[trained[0]]]
    assert held_out == []
    assert "had another text or system prompt: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "0"], "steps is 0"),
        (["--soft-weight", "2"], "soft_weight is 2.0"),
        (["--layers", "0"], "layers is 0"),
        (["--taps", "1,7"], "tapped layers [7] are not allowed"),
        (["--mask-token", "320"], "has token ids from 0 to 319"),
        (["--block-size", "1"], "block-size is 1"),
        (["--taps", "4,1"], "taps are [4, 1]"),
        (["--workers", "3"], "workers is 3"),
        (["--sequences-per-step", "12"], "sequences-per-step is 12"),
        (["--slots", "0"], "slots is 0"),
        (["--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--out", "/dev/null/run"], "the folder of the run /dev/null/run cannot be made (Not a directory)"),
        (["--config", "/no/such/target.yaml"], "/no/such/target.yaml"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    config_file: Path,
    prompts_file: Path,
    tmp_path: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(config_file, prompts_file, tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperatures", "0,-1"], "-1 is not a number from 0 on"),
        (["--temperatures", "0,x"], "'x' is not a number"),
        (["--learning-rate", "nan"], "nan is not a number from 0 on"),
        (["--gamma", "0"], "0 is not above 0"),
        (["--feature-cache-gb", "inf"], "inf is not a number from 0 on"),
    ],
)
def test_impossible_numbers_are_refused_with_their_option(
    config_file: Path,
    prompts_file: Path,
    tmp_path: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments(config_file, prompts_file, tmp_path, *more))
    assert f"argument {more[0]}: {message}" in capsys.readouterr().err


def test_a_submitted_job_needs_absolute_folders(
    config_file: Path,
    prompts_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    described = {"metadata": {"job_submission_id": "x"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(described))
    assert main(arguments(config_file, prompts_file, tmp_path, "--out", "run")) == 2
    assert "is relative, but a submitted job" in capsys.readouterr().err
