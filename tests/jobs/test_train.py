"""The learning job on a store whose right answer is known: what it learns, keeps and registers, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import mlflow.pyfunc
import pandas as pd
import pytest
import torch
import yaml
from mlflow.types import DataType
from safetensors.torch import load_file

from graft_dist.config import TargetConfig
from graft_dist.drafter import fingerprint, read_config, read_tensors
from graft_dist.errors import PolicyError, StoreError
from graft_dist.learning.drafter import worker
from graft_dist.learning.tdes import Evaluation, TdesTrainer
from graft_dist.policy import GraftPolicy
from graft_dist.target import Target
from jobs import ablation
from jobs.scorer_training import ScorerPlan
from jobs.train import main, parser, request_from
from storage import TrajectoryStore
from storage.registered_model import write_model
from storage.registry import CHALLENGER, Registry, model_name
from tests.conftest import save_tiny_model
from tests.jobs.learning_store import NUM_HIDDEN, write_store


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: TargetConfig, tiny_llama: Target, tiny_drafter_folder: Path
) -> Path:
    """A folder with target.yaml and store/."""
    path = tmp_path_factory.mktemp("learning")
    (path / "target.yaml").write_text(yaml.safe_dump(tiny_config.model_dump(mode="json", exclude_none=True)))
    drafter = fingerprint(read_config(tiny_drafter_folder), read_tensors(tiny_drafter_folder)[0])
    write_store(path / "store", tiny_config, tiny_llama, drafter)
    # The same prompts and sequence ids, decoded with the drafter before: nothing of it may be mixed in.
    write_store(path / "store", tiny_config, tiny_llama, "0123456789abcdef", run_id="run-0", num_prompts=10, slower=50)
    # Prompts that the drafter may know, alone: what their rounds cost is as good as any.
    write_store(path / "store", tiny_config, tiny_llama, drafter, run_id="run-2", num_prompts=2)
    return path


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "--config", str(folder / "target.yaml"), "--store", str(folder / "store"), "--out", str(out),
        "--tracking-uri", f"sqlite:///{folder / 'mlflow.db'}", "--min-rounds", "100", "--steps", "60",
        "--rounds-per-step", "64", "--evaluate-every", "10", "--patience", "100", "--weight-decay", "0.01",
        "--learning-rate", "0.01", "--width", "16", "--max-budget", "16", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def learned(folder: Path) -> tuple[Path, str]:
    """The folder of a run that has ended, and what it printed."""
    out, shown = folder / "run", StringIO()
    with redirect_stdout(shown):
        assert main(arguments(folder, out)) == 0
    return out, shown.getvalue()


@pytest.mark.slow
def test_it_learns_registers_and_does_nothing_twice(
    folder: Path,
    learned: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tiny_config: TargetConfig,
) -> None:
    out, printed = learned
    assert "left out: 4 sequences of prompts that the drafter may know, 0 whose" in printed
    assert "cannot be read back, 10 of other drafters" in printed
    assert "fit: 20 prompts" in printed and "chosen on the tune split: tdes, " in printed
    policy = GraftPolicy.load(out / "policy")
    assert policy.tdes is not None and policy.num_candidates == 4 and policy.slug == tiny_config.slug
    assert list(policy.cost_curves) == ["test CPU, 1 thread, float32"]
    assert max(policy.cost_curves["test CPU, 1 thread, float32"].round_ms) < 10
    assert policy.data.num_sequences == 40 and policy.data.run_ids == ("run-1",)
    assert policy.data.cost_run_ids == ("run-1", "run-2")
    metrics = policy.metrics
    assert metrics["tdes_mat_8"] > 1.2 * metrics["ddtree_mat_8"]
    assert metrics["tdes_mismatch_rate_8"] < metrics["ddtree_mismatch_rate_8"]
    assert metrics["over_ddtree_low"] > 1.0 and metrics["held_out_kl"] < metrics["held_out_kl_before"] / 2
    assert {file.name for file in (out / "plots").iterdir()} == {
        "loss.png", "gain.png", "mismatch.png", "utility.png", "reliability.png", "cost.png",
    }  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    assert {row["task"] for row in report["test"]} == {"all", "code", "chat"}
    assert report["is_resumed"] is False and report["cost"]["num_rounds"] > 100

    registry = Registry(f"sqlite:///{folder / 'mlflow.db'}", tmp_path / "cache")
    (version,) = registry.versions(tiny_config.slug)
    assert version.aliases == (CHALLENGER,) and version.metrics == metrics
    assert version.tags["graft.policy_fingerprint"] == policy.fingerprint
    assert (version.tags["graft.data_runs"], version.tags["graft.cost_runs"]) == ("run-1", "run-1,run-2")
    assert GraftPolicy.load(registry.fetch(tiny_config.slug, version.version)).fingerprint == policy.fingerprint
    run = registry.client.get_run(version.run_id)
    assert run.info.status == "FINISHED" and run.data.params["weight_decay"] == "0.01"
    (given,) = (each.dataset for each in run.inputs.dataset_inputs)
    source = json.loads(given.source)
    assert (source["snapshot"], source["runs"]) == (policy.data.store, ["run-1"])
    assert source["cost_runs"] == ["run-1", "run-2"]
    history = registry.client.get_metric_history(version.run_id, "fit_held_out_kl")
    assert [point.step for point in history][:2] == [0, 10]
    assert {file.path for file in registry.client.list_artifacts(version.run_id)} == {"plots", "report.json"}

    assert main(arguments(folder, out)) == 0
    assert json.loads((out / "report.json").read_text()) == report, "it has ended when it ended first"
    again = capsys.readouterr().out
    assert "the edge scorer is fitted already" in again
    assert f"{version.name} version 1 is the challenger" in again
    assert len(registry.versions(tiny_config.slug)) == 1
    run_again = registry.client.get_run(version.run_id)
    assert run_again.info.status == "FINISHED" and run_again.data.metrics == run.data.metrics
    assert registry.client.get_metric_history(version.run_id, "fit_held_out_kl") == history, "logged twice"
    assert len(registry.client.get_metric_history(version.run_id, "held_out_kl")) == 1
    assert len(run_again.inputs.dataset_inputs) == 1
    assert main(arguments(folder, out, "--width", "8")) == 2
    assert "holds a run with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "status"), [(StoreError("no rows"), 2, "FAILED"), (KeyboardInterrupt(), 130, "KILLED")]
)
def test_a_run_that_breaks_off_does_not_stand_there_as_running(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, status: str
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("jobs.policy_training.fit_scorer", broken)
    assert main(arguments(folder, tmp_path / "run")) == code
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    registry = Registry(f"sqlite:///{folder / 'mlflow.db'}", tmp_path / "cache")
    assert registry.client.get_run(run_id).info.status == status


@pytest.mark.slow
def test_a_gated_scorer_decodes_without_the_projection(folder: Path, tmp_path: Path, tiny_llama: Target) -> None:
    more = ["--gate-rank", "4", "--reliance", "--steps", "40", "--no-register"]
    assert main(arguments(folder, tmp_path / "run", *more)) == 0
    policy = GraftPolicy.load(tmp_path / "run" / "policy")
    assert policy.tdes is not None and policy.tdes.config.reliance
    assert (policy.tdes.config.gate_rank, policy.tdes.config.hidden_size) == (4, tiny_llama.hidden_size)
    recorded = policy.replay_scorer(tiny_llama.embedding_weight, NUM_HIDDEN)
    assert recorded.needs_hidden


@pytest.mark.slow
def test_mlflow_itself_can_score_edges(
    learned: tuple[Path, str], tmp_path: Path, tiny_config: TargetConfig, tiny_llama: Target
) -> None:
    out, _ = learned
    model = mlflow.pyfunc.load_model(str(write_model(out / "policy", tmp_path, tiny_config.target)))
    assert model.metadata.signature.inputs.input_names() == ["parent", "child", "depth"]
    network = GraftPolicy.load(out / "policy").tdes
    assert network is not None
    with torch.no_grad():
        tables = network.token_tables(tiny_llama.embedding_weight[torch.tensor([10, 11, 12])])
        expected = network(tables, torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0, 1]))
    scores = model.predict(pd.DataFrame({"parent": [10, 10], "child": [11, 12], "depth": [1, 2]}))
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(set(scores)) == 2
    for column, value, allowed in (("depth", 0, "1 to 4"), ("depth", 5, "1 to 4"), ("child", 1 << 20, "0 to ")):
        edge = {"parent": [10], "child": [11], "depth": [1], column: [value]}
        with pytest.raises(PolicyError, match=f"{column} is {value}, allowed is {allowed}"):
            model.predict(pd.DataFrame(edge))


@pytest.mark.slow
def test_mlflow_itself_loads_the_registered_challenger_with_its_signature_and_example(
    folder: Path, learned: tuple[Path, str], tiny_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, f"sqlite:///{folder / 'mlflow.db'}")
    model = mlflow.pyfunc.load_model(f"models:/{model_name(tiny_config.slug)}@{CHALLENGER}")
    signature = model.metadata.signature
    assert signature.inputs.input_types() == [DataType.long] * 3
    assert (signature.outputs.input_names(), signature.outputs.input_types()) == (["score"], [DataType.double])
    example = model.input_example
    assert list(example) == signature.inputs.input_names() == ["parent", "child", "depth"]
    scores = model.predict(example)
    assert len(scores) == len(example) == 2 and len(set(scores)) == 2


def killed_once(folder: Path) -> Callable[[ScorerPlan, torch.Tensor], None]:
    """What workers run instead of `train_on_worker`: the second of them kills itself after its second look, once.

    Each worker notes the steps of its looks in `folder`: what workers print may come late, or never.
    """

    def train(plan: ScorerPlan, embeddings: torch.Tensor) -> None:
        from jobs.scorer_training import train_on_worker

        rank, _ = worker()
        notes, advance = folder / f"looks-{rank}", TdesTrainer.advance

        def noted(trainer: TdesTrainer) -> Evaluation:
            look = advance(trainer)
            with notes.open("a") as file:
                file.write(f"{look.step}\n")
            if rank == 1 and notes.read_text().split() == ["10", "20"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return look

        TdesTrainer.advance = noted  # type: ignore[method-assign]
        train_on_worker(plan, embeddings)

    return train


@pytest.mark.slow
def test_an_ablation_judges_every_variant_on_the_same_rounds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("depth", "pair", "pair-sum", "gated")
    monkeypatch.setattr(ablation, "VARIANTS", tuple(one for one in ablation.VARIANTS if one.name in wanted))
    out = tmp_path / "out"
    arguments = [
        "--config", str(folder / "target.yaml"), "--store", str(folder / "store"), "--out", str(out), "--steps", "60",
        "--learning-rate", "0.01", "--weight-decay", "0.01", "--gate-rank", "4", "--max-budget", "8",
        "--min-rounds", "100",
    ]  # fmt: skip
    assert ablation.main(arguments) == 0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    fixed = {row["variant"]: row for row in rows if (row["budget"], row["task"]) == ("fixed 8", "all")}
    assert list(fixed) == ["marginal", *wanted]
    assert len({row["num_rounds"] for row in fixed.values()}) == 1
    assert fixed["pair"]["mat"] > 1.1 * fixed["marginal"]["mat"] and fixed["marginal"]["held_out_kl"] is None
    # Numbers that only know the depth cannot learn which token follows which; another reading changes no weights.
    assert fixed["pair"]["held_out_kl"] < 0.7 * fixed["depth"]["held_out_kl"]
    assert fixed["pair"]["held_out_kl"] == fixed["pair-sum"]["held_out_kl"]
    assert {row["kind"] for row in rows} == {"fixed", "saba", "marginal"}
    table = (out / "summary.md").read_text()
    assert f"| {fixed['gated']['mat']:.3f} / {100 * fixed['gated']['mismatch_rate']:.1f} % |" in table
    summed = {row["decoder"]: row for row in map(json.loads, (out / "summary.jsonl").read_text().splitlines())}
    assert (summed["pair"]["mat_8"], summed["pair"]["task"]) == (fixed["pair"]["mat"], "all")
    saba = next(row for row in rows if (row["variant"], row["budget"], row["task"]) == ("pair", "saba, price", "all"))
    assert summed["pair"]["saba_price"] == saba["tokens_per_s"]
    (out / "depth" / "rows.jsonl").unlink()
    capsys.readouterr()
    assert ablation.main(arguments) == 0
    assert "1 of 1, about 0 min left" in capsys.readouterr().out
    assert [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()] == rows
    assert ablation.main([*arguments, "--seed", "1"]) == 2
    assert "holds a run with other settings" in capsys.readouterr().err
    monkeypatch.setattr(ablation, "VARIANTS", ablation.VARIANTS[:1])
    assert ablation.main(arguments) == 2, "rows of other variants would stand beside these"
    assert "holds a run with other settings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ray
def test_two_workers_one_of_them_killed_learn_what_one_process_learns(
    folder: Path, learned: tuple[Path, str], joinable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.scorer_training.train_on_worker", killed_once(tmp_path))
    two_workers = ["--no-register", "--workers", "2", "--address", joinable]
    assert main(arguments(folder, tmp_path / "two", *two_workers)) == 0
    looks = [int(step) for step in (tmp_path / "looks-1").read_text().split()]
    assert looks[:2] == [10, 20] and looks[2] in (20, 30), "it did not go on from the last checkpoint"
    assert looks[2:] == list(range(looks[2], 61, 10))
    scorers = [out / "scorer" for out in (learned[0], tmp_path / "two")]
    one, two = (load_file(next(scorer.glob("state-*.safetensors"))) for scorer in scorers)
    for name, tensor in one.items():
        if name.startswith("network."):
            torch.testing.assert_close(tensor, two[name], rtol=0.02, atol=0.02, msg=name)
    evaluations = [json.loads((scorer / "state.json").read_text())["evaluations"] for scorer in scorers]
    assert [look[0] for look in evaluations[0]] == [look[0] for look in evaluations[1]]
    assert all(abs(ours[2] - theirs[2]) < 5e-3 for ours, theirs in zip(*evaluations, strict=True))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--store", "{p}/nowhere"], "there is no trajectory store at"),
        (["--store", "{p}/empty"], "holds no drafted rounds"),
        (["--config", "smollm2-135m"], "to learn from: it holds rounds of"),
        (["--config", "{p}/other.yaml"], "the configuration's drafter is"),
        (["--config", "{p}/retrained.yaml"], "the configuration's target is"),
        (["--config", "{p}/system.yaml"], "none of the 44 sequences can be learned from"),
        (["--min-rounds", "100000"], "--min-rounds asks for 100000"),
        (["--workers", "-1"], "workers is -1"),
        (["--max-budget", "5000"], "max-budget is 5000"),
        (["--learning-rate", "0"], "learning_rate must be above 0"),
        (["--gate-rank", "-1"], "gate-rank is -1"),
        (["--out", "/dev/null/run"], "the folder of the run /dev/null/run cannot be made (Not a directory)"),
        (["--tracking-uri", "http://127.0.0.1:9"], "the registry http://127.0.0.1:9 cannot be reached"),
        (["--config", "/no/such/target.yaml"], "/no/such/target.yaml"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    folder: Path,
    tmp_path: Path,
    tiny_config: TargetConfig,
    more: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    TrajectoryStore(folder / "empty").prepare()
    retrained = folder / "retrained" / Path(tiny_config.target).name  # another model under the same name
    if not retrained.exists():
        save_tiny_model(retrained, "llama", seed=1)
    for name, changes in (
        ("other", {"drafter": "builtin:smollm2-135m"}),
        ("retrained", {"target": str(retrained)}),
        ("system", {"system_prompt": "Be brief."}),
    ):
        changed = tiny_config.model_dump(mode="json", exclude_none=True) | changes
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(changed))
    options = [option.format(p=folder) for option in more]
    capsys.readouterr()  # saving a model shows a progress bar, unless another test has turned it off
    assert main(arguments(folder, tmp_path / "run", *options)) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_a_job_waits_for_nodes_only_if_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", "smollm2-135m", "--store", str(tmp_path / "store"), "--out", str(tmp_path / "run")]
    for more, seconds in (([], 0.0), (["--wait-for-nodes", "1200"], 1200.0)):
        assert request_from(parser().parse_args([*given, *more])).placement.wait_for_nodes_s == seconds
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args([*given, "--wait-for-nodes", "-1"])
    assert "-1 is not a number from 0 on" in capsys.readouterr().err


def test_the_configuration_says_where_rounds_and_runs_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    request = request_from(parser().parse_args(["--config", "smollm2-135m"]))
    assert request.store == str(tmp_path / "graft-dist/trajectories")
    assert request.out.parent == tmp_path / "graft-dist/runs/_train/smollm2-135m"  # no run of a retraining
    assert f"--out {request.out} goes on with it" in capsys.readouterr().out
    assert request.placement.num_workers == 0
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "x"}}))
    assert request_from(parser().parse_args(["--config", "smollm2-135m"])).placement.num_workers == 1


@pytest.mark.parametrize(("given", "missing"), [((), "--store"), (("--store", "/store"), "--out")])
def test_a_configuration_without_places_needs_the_options(
    folder: Path, given: tuple[str, ...], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(folder / "target.yaml"), *given]) == 2
    assert f"{missing} is missing, and the configuration has no retrain." in capsys.readouterr().err


def test_a_submitted_job_needs_absolute_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "x"}}))
    assert main(arguments(folder, Path("run"))) == 2
    assert "is relative, but a submitted job" in capsys.readouterr().err
