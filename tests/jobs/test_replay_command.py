"""`graft replay` on a small store whose answers are worked out by hand (the rounds: `commit_replayable`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from graft_dist.prompts import is_held_out, learning_split
from graft_dist.target import Target
from jobs import cli
from tests.graft_dist.policies import make_policy, random_network
from tests.storage.records import commit_replayable


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    commit_replayable(path)
    return path


def report(store: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert cli.run(["replay", "--store", str(store), "--budgets", "1,2,4", "--format", "json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_gain_curve_rates_and_regret(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(store, capsys)
    rows = {(row["kind"], row["task"], row["policy"]): row for row in found["rows"]}
    curve = ("plain", "fixed-1", "fixed-2", "fixed-4")
    # Tokens at budgets 0, 1, 2, 4: code 1 2 3 3 and 1 1 1 1; chat 1 1 2 2 (at its limit) and 1 1 1 2.
    assert [rows["decoded", "all", name]["mat"] for name in curve] == [1.0, 1.25, 1.75, 2.0]
    assert [rows["decoded", "chat", name]["mat"] for name in curve] == [1.0, 1.0, 1.5, 2.0]
    assert [rows["dense", "all", name]["mat"] for name in curve] == [1.0, 1.0, 1.0, 1.0]
    # The round at its limit has three nodes of depth 1.
    assert [rows["decoded", "all", name]["mean_budget"] for name in curve] == [0.0, 1.0, 2.0, 3.75]
    assert rows["decoded", "all", "fixed-4"]["lost"] == {
        "end": 1, "depth_cap": 1, "outside": 1, "wrong_parent": 0, "cut": 1,
    }  # fmt: skip
    # Recorded: 5 ms plain, 6 ms with two nodes, 10 ms with four; so 8 ms with three.
    assert (found["cost"]["budgets"], found["cost"]["round_ms"]) == ([0, 2, 4], [5.0, 6.0, 10.0])
    last = rows["decoded", "all", "fixed-4"]
    assert last["tokens_per_s"] == pytest.approx(8000 / 38)
    assert last["speedup"] == pytest.approx(8 / 38 * 5)
    # The oracle drafts for all but the second code round, with budgets 2, 2 and 3: 8 tokens in 25 ms.
    oracle = found["oracles"][0]
    assert (oracle["kind"], oracle["task"], oracle["mat"], oracle["mean_budget"]) == ("decoded", "all", 2.0, 1.75)
    assert oracle["tokens_per_s"] == pytest.approx(320)
    assert last["regret"] == pytest.approx(1 - 25 / 38)
    assert found["skipped"] == {"num_undrafted": 1, "num_cut_off": 1}


def test_caddtree_has_a_cap_of_its_own(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, more = (
        [row for row in report(store, capsys, "--budgets", budgets)["rows"] if row["policy"] == "caddtree"]
        for budgets in ("1", "1,2,4")
    )
    assert [row["mean_budget"] for row in few] == [row["mean_budget"] for row in more]
    assert few[0]["mean_budget"] > 1


def test_a_learned_policys_trees_and_budgets(
    store: Path,
    tiny_folder: Callable[[str], Path],
    tiny_llama: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fitting = {"drafter_fingerprint": "d-1", "target_fingerprint": tiny_llama.fingerprint}
    options = ["--method", "graft", "--policy", str(tmp_path / "policy")]
    marginal = report(store, capsys)["rows"]
    policy = make_policy(None, kind="fixed", gain=None, fixed_budget=2, **fitting)
    policy.save(tmp_path / "policy")
    found = report(store, capsys, *options)
    assert found["policy_fingerprint"] == policy.fingerprint and found["method"] == "graft"
    rows = {(row["kind"], row["task"], row["policy"]): row for row in found["rows"]}
    assert rows["decoded", "all", "graft"]["mat"] == rows["decoded", "all", "fixed-2"]["mat"] == 1.75
    # Without a scorer of its own its trees are the drafter's.
    of_all = [row for row in marginal if row["policy"] not in ("caddtree",)]
    assert [rows[row["kind"], row["task"], row["policy"]]["mat"] for row in of_all] == [row["mat"] for row in of_all]

    config = {"target": str(tiny_folder("llama")), "drafter": "builtin:smollm2-135m", "dtype": "float32"}
    (tmp_path / "tiny.yaml").write_text(json.dumps({**config, "device": "cpu"}))
    options += ["--config", str(tmp_path / "tiny.yaml")]
    make_policy(random_network(32, depth=2), **fitting).save(tmp_path / "policy")
    rows = {(row["kind"], row["task"], row["policy"]): row for row in report(store, capsys, *options)["rows"]}
    assert {policy for _, _, policy in rows} == {"plain", "fixed-1", "fixed-2", "fixed-4", "graft"}
    network = random_network(32, depth=2, gate_hidden=32)
    make_policy(network, **fitting).save(tmp_path / "policy")
    assert cli.run(["replay", "--store", str(store), *options]) == 2
    assert "these rounds were recorded without any" in capsys.readouterr().err


def test_a_cost_file_and_a_task(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cost.json").write_text('{"0": 10, "4": 20}')
    found = report(store, capsys, "--cost", str(tmp_path / "cost.json"), "--task", "chat", "--target", "tiny")
    assert {row["task"] for row in found["rows"]} == {"all", "chat"}
    rows = {(row["kind"], row["task"], row["policy"]): row for row in found["rows"]}
    assert rows["decoded", "chat", "fixed-4"]["tokens_per_s"] == pytest.approx(100)
    assert found["cost"]["source"] == f"the file {tmp_path}/cost.json"


def test_one_kind_of_rounds_alone_has_the_same_rows_and_costs(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of dense rounds, which have no timings of their own."""
    both = report(store, capsys)
    for kind in ("decoded", "dense"):
        alone = report(store, capsys, "--kind", kind)
        assert alone["rows"] and alone["rows"] == [row for row in both["rows"] if row["kind"] == kind]
        assert alone["cost"] == both["cost"]


def test_restricted_to_prompts(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {index}" for index in range(40)]
    inside = next(text for text in texts if is_held_out([text]))
    outside = next(text for text in texts if not is_held_out([text]))
    lines = [{"id": "prompt-code-1", "turns": [outside]}, {"id": "prompt-chat-1", "turns": [inside]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{\n")
    options = ["--prompts", str(tmp_path / "p.jsonl")]
    tasks = [{row["task"] for row in report(store, capsys, *options, *more)["rows"]} for more in ([], ["--held-out"])]
    assert tasks == [{"all", "code", "chat"}, {"all", "chat"}]
    command = ["replay", "--store", str(store), *options, "--split"]
    of_splits = {split: cli.run([*command, split]) for split in ("fit", "tune", "test")}
    wanted = {learning_split([text]) for text in (inside, outside)}
    assert of_splits == {split: 0 if split in wanted else 2 for split in of_splits}
    assert "no recorded round to replay" in capsys.readouterr().err


def test_the_table(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", "--store", str(store), "--budgets", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["kind", "task", "policy", "rounds", "MAT", "budget"]
    rows = [" ".join(line.split()) for line in lines]
    assert rows[2] == "decoded all fixed-4 4 2.00 3.8 0.0% 210.5 1.05 34.2% 25.0% 25.0% 25.0% 0.0% 25.0%"
    assert rows[3].startswith("decoded all caddtree 4 ")
    assert rows[4] == "decoded all oracle 4 2.00 1.8 320.0 1.60"
    assert lines[-2].startswith("cost: monotone fit of 5 recorded rounds at 2 budgets, plain rounds from 1 (cpu, 1 ")
    assert lines[-1].startswith("left out: 1 rounds were not drafted for, 1 are too close")
    # The chat rounds alone have one budget only.
    assert cli.run(["replay", "--store", str(store), "--task", "chat"]) == 0
    assert "cost: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--method", "tree"], "unknown method 'tree' of a replay: choose one of ddtree, graft"),
        (["--method", "graft"], "method 'graft' needs a learned policy, and no target is named"),
        (["--method", "graft", "--config", "smollm2-135m", "--policy", "{p}"], "{p} holds no policy.json"),
        (["--method", "graft", "--policy", "{p}/foreign"], "with drafter dddddddddddd, this drafter is d-1"),
        (["--method", "graft", "--policy", "{p}/scorer"], "reads the target's token embeddings: give --config"),
        (["--policy", "{p}/scorer"], "--policy is for --method graft"),
        (["--budgets", "0"], "--budgets is '0'"),
        (["--held-out"], "--held-out needs --prompts"),
        (["--prompts", "nowhere.jsonl"], "cannot be read"),
        (["--cost", "nowhere.json"], "the cost file nowhere.json"),
        (["--task", "poems"], "no recorded round to replay"),
        (["--target", "large"], "no recorded round to replay"),
        (["--format", "csv"], "--format"),
        (["--store", "{p}/no-store"], "no trajectory store"),
    ],
)
def test_mistakes_are_one_sentence(
    options: list[str], sentence: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_policy(None).save(tmp_path / "foreign")
    make_policy(random_network(32, depth=2), drafter_fingerprint="d-1").save(tmp_path / "scorer")
    assert cli.run(["replay", "--store", str(store), *(option.format(p=tmp_path) for option in options)]) == 2
    shown = capsys.readouterr()
    assert sentence.format(p=tmp_path) in shown.err
    assert shown.err.count("\n") == 1 and shown.out == ""
