import errno
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from graft_dist import policy_maker
from graft_dist.budget import CostCurve
from graft_dist.cost_probe import measure_cost
from graft_dist.drafter import DFlashDrafter, DFlashModel, save_drafter
from graft_dist.engine import Engine
from graft_dist.generate import Answer, Request
from graft_dist.policy import GraftPolicy
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from jobs import audit_command, cli, generate_command
from jobs.out_file import write_aside
from storage import TrajectoryStore
from tests.conftest import tiny_drafter_config
from tests.graft_dist.policies import make_policy, random_network
from tests.storage.records import DATASET, write_unit

ROOT = Path(__file__).resolve().parents[2]

SAMPLING = "--max-new-tokens --temperature --top-p --top-k --min-p --seed"
PENALTIES = "--repetition-penalty --presence-penalty --frequency-penalty"
LOADING = "--threads --dtype --device --drafter"
SURFACE = {
    "generate": "--config --prompt --prompts --method --budget --policy --cost --stop --stop-token-id --ignore-eos "
    f"--out --limit --slots {SAMPLING} {PENALTIES} {LOADING}",
    "chat": "--config --method --budget --policy --system --stop --stop-token-id --ignore-eos "
    f"{SAMPLING} {PENALTIES} {LOADING}",
    "audit": "--config --prompts --methods --budgets --policy --cost --near-tie --out --limit --slots "
    f"{SAMPLING} {PENALTIES} {LOADING}",
    "bench": f"--config --prompts --methods --budgets --policy --cost --warmup --out --limit {SAMPLING} {LOADING}",
    "policies": "--config --tracking-uri --format",
    "promote": "--config --tracking-uri --address",
    "bench-serve": "--prompts --config --out --url --model --api-key-file --arms --concurrency --rates --blocks "
    "--block-requests --max-new-tokens --temperature --seed --slo-ttft --slo-token --timeout --limit --soak "
    "--leave-share --policies --swap-every --sample-every --tolerate-ties --dashboard --app --tracking-uri",
    "drift": "--config --store --since --source --tracking-uri --format",
    "query": "--store --format --memory",
    "replay": "--store --method --policy --config --budgets --target --task --prompts --split --kind --held-out --cost "
    "--format",
    "rollback": "--config --tracking-uri --address",
    "serve": "--config --host --port --replicas --policy --follow-champion --tracking-uri --methods --threads "
    "--address --api-keys-file",
    "schedule run": "--config --address --working-dir --state --interval",
    "schedule status": "--config --state --last --format",
    "schedule submit": "--config --address --working-dir --entrypoint --wait --interval",
    "store compact": "--store --orphan-age-hours",
    "store export": "--store --dest",
    "store forget": "--store --before --target --run",
    "store vacuum": "--store --retention-hours",
    "targets": "",
    "version": "",
}
STAGES = "draft_ms build_ms verify_ms commit_ms"
RAW_KEYS = (
    f"prompt_id task method budget num_output_tokens decode_s prefill_s num_rounds mat {STAGES} temperature batch "
    "num_mismatched end_to_end_s load_s"
)
SUMMARY_KEYS = "method budget task speedup speedup_low speedup_high mat tokens_per_s mean_budget num_prompts "
SUMMARY_KEYS += "mismatch_rate overhead_ms decode_s end_to_end_s"


def commands() -> dict[str, list[str]]:
    """Every command with its options, --help left out."""
    return {
        name: sorted(option for parameter in command.params for option in parameter.opts if option.startswith("--"))
        for name, command in leaves(typer.main.get_command(cli.app))
    }


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of every command that is no group, such as "store vacuum"."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_the_surface_is_frozen() -> None:
    assert commands() == {name: sorted(options.split()) for name, options in SURFACE.items()}


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, options in commands().items():
        section = re.search(rf"\n## `graft {name}`\n(.*?)(?=\n## |\Z)", page, re.DOTALL)
        assert section, f"docs/commands.md has no section on graft {name}"
        for option in options:
            assert re.search(rf"{option}(?![\w-])", section[1]), f"the section on graft {name} lacks {option}"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name.split()[0]} ", shown, re.MULTILINE) for name in SURFACE)


def test_targets_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["targets"]) == 0
    assert "builtin:smollm2-135m" in capsys.readouterr().out
    assert cli.run(["version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path], tiny_llama: Target) -> Path:
    """A folder with tiny.yaml (a random target and a random drafter), prompts.jsonl and bad.jsonl."""
    folder = tmp_path_factory.mktemp("project")
    torch.manual_seed(1)
    drafter = tiny_drafter_config(tiny_llama, num_layers=1)
    save_drafter(DFlashModel(drafter), folder / "drafter", tokenizer_sha256=tiny_llama.tokenizer_sha256)
    config = {"target": str(tiny_folder("llama")), "drafter": str(folder / "drafter"), "dtype": "float32"}
    config |= {"device": "cpu", "max_length": 256, "max_slots": 2, "threads": 1, "budgets": [4, 8]}
    (folder / "tiny.yaml").write_text(json.dumps(config))
    loaded = DFlashDrafter.load(str(folder / "drafter"), tiny_llama)
    fitting = {"target_fingerprint": tiny_llama.fingerprint, "drafter_fingerprint": loaded.fingerprint}
    make_policy(random_network(32, depth=4, gate_hidden=32), **fitting).save(folder / "policy")
    make_policy(None).save(folder / "foreign")
    (folder / "cost.json").write_text('{"0": 10, "1": 11, "64": 12}')
    prompts = [{"id": f"p{index}", "task": "ab"[index % 2], "turns": [f"add {index}"]} for index in range(4)]
    lines = [json.dumps(prompt) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "bad.jsonl").write_text("\n".join([lines[0], "{broken", lines[1]]) + "\n")
    (folder / "long.jsonl").write_text(json.dumps({"id": "long", "turns": ["x" * 400]}) + "\n" + lines[0] + "\n")
    (folder / "empty.jsonl").write_text("\n")
    return folder


ERRORS = [
    (["nonsense"], "No such command 'nonsense'"),
    (["bench"], "Missing option '--config'"),
    (["generate", "--config", "nowhere.yaml", "--prompt", "x"], "nowhere.yaml: no such file"),
    (["generate", "--config", "{p}/unknown.yaml", "--prompt", "x"], "unknown key bugdet, did you mean budget"),
    (["generate", "--config", "{p}/tiny.yaml"], "either --prompt TEXT or --prompts FILE"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", " "], "--prompt is empty"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompts", "{p}/nowhere.jsonl"], "cannot be read"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompts", "{p}/empty.jsonl"], "holds no prompts"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--method", "tree"], "unknown method 'tree'"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--method", "graft"],
     "needs a learned policy, and none ships"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--method", "graft", "--policy", "{p}"],
     "{p} holds no policy.json"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--method", "graft", "--policy", "{p}/foreign"],
     "the policy was fitted with target tttttttttttt, this target is"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--method", "caddtree", "--cost", "{p}/no.json"],
     "the cost file {p}/no.json"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--budget", "-1"], "--budget"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--budget", "5000"], "up to 4096"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--top-p", "3"], "top_p must be above 0"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--out", "/no/where/x.jsonl"], "no folder /no/where"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--out", "{p}"], "is a folder: name a file"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--drafter", "./nope"], "./nope"),
    (["chat", "--config", "{p}/tiny.yaml", "--method", "tree"], "unknown method 'tree'"),
    (["chat", "--config", "{p}/tiny.yaml", "--top-p", "3"], "top_p must be above 0"),
    (["bench", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/tiny.yaml"], "is a file"),
    (["audit", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--methods", "plain,x"], "method 'x'"),
    (["audit", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--budgets", "8,y"], "is '8,y'"),
    (["bench", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/b", "--methods", "ddtree"],
     "add plain"),
    (["bench", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/b", "--methods", "plain,hf",
      "--temperature", "1"], "greedy generate"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}"], "which is not empty"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--arms", "plain,x"], "unknown arm 'x'"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--rates", "2,-1"], "--rates is '2,-1'"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--concurrency", ""], "there is no load"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--api-key-file", "{p}/no"], "cannot be read"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--url", "http://127.0.0.1:9"], "no server"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--soak", "1", "--policies", "none"], "two"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--soak", "1", "--policies", "v1,v2"],
     "--tracking-uri"),
    (["bench-serve", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/l", "--soak", "1", "--dashboard",
      "http://127.0.0.1:9"], "no Ray dashboard"),
    (["bench", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--out", "{p}/tiny.yaml/b"], "be made"),
    (["bench", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--out", "/proc/b"], "cannot be made"),
    (["audit", "--config", "{p}/tiny.yaml", "--prompts", "{p}/prompts.jsonl", "--out", "/proc/x"], "nothing can be"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--out", "/proc/x.jsonl"], "nothing can be written"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--out", "/dev/null"], "is a device"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompt", "x", "--threads", "100000"], "--threads"),
    (["generate", "--config", "{p}/tiny.yaml", "--prompts", "{p}"], "cannot be read"),
    (["query", "--store", "{p}/no-store", "runs"], "no trajectory store"),
    (["query", "--store", "{p}/no-store", "runs", "--format", "xml"], "--format"),
    (["query", "--store", "{p}/no-store", "runs", "--memory", "much"], "no trajectory store"),
    (["policies", "--tracking-uri", "http://127.0.0.1:9"], "the registry http://127.0.0.1:9 cannot be reached"),
    (["promote", "--config", "nowhere.yaml", "1"], "nowhere.yaml: no such file"),
    (["rollback", "--config", "{p}/tiny.yaml", "--tracking-uri", "{p}"], "is a folder; give a server"),
    (["store"], "Missing command"),
    (["store", "compact", "--store", "{p}/no-store"], "no trajectory store"),
    (["store", "vacuum", "--store", "{p}/no-store"], "no trajectory store"),
    (["store", "forget", "--store", "{p}/no-store", "--run", "r"], "no trajectory store"),
    (["store", "forget", "--store", "{p}/no-store"], "either --before"),
    (["store", "forget", "--store", "{p}/no-store", "--before", "yesterday"], "'yesterday' does not match"),
    (["store", "export", "--store", "{p}/no-store", "--dest", "{p}/copy"], "no trajectory store"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "sentence"), ERRORS)
def test_mistakes_are_one_sentence_and_exit_code_two(
    arguments: list[str], sentence: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_aside(project / "unknown.yaml", (project / "tiny.yaml").read_text().replace('"budgets"', '"bugdet"'))
    assert cli.run([argument.format(p=project) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert sentence.format(p=project) in shown.err
    assert shown.err.count("\n") == 1 and shown.err.startswith("graft: ")
    assert shown.out == ""


def test_generate_prints_the_same_text_with_every_method(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    learned = ["--policy", f"{project}/policy", "--cost", f"{project}/cost.json"]
    for method in ("plain", "chain", "ddtree", "caddtree", "graft", "graft-fixed"):
        arguments = ["--prompt", "add", "--method", method, "--max-new-tokens", "9", *learned]
        assert cli.run(["generate", "--config", f"{project}/tiny.yaml", *arguments]) == 0
        shown = capsys.readouterr()
        texts.append(shown.out)
        assert re.search(r"\[9 tokens, .* rounds, MAT \d", shown.err)
    assert len(set(texts)) == 1


def test_chat_says_the_same_with_every_method(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for method in ("plain", "chain", "ddtree", "graft-fixed"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("add\nadd 2\n"))
        arguments = ["--method", method, "--policy", f"{project}/policy", "--max-new-tokens", "9", "--threads", "1"]
        assert cli.run(["chat", "--config", f"{project}/tiny.yaml", *arguments]) == 0
        shown = capsys.readouterr()
        texts.append(shown.out)
        assert len(re.findall(r"\[9 tokens, .* tokens/s\), .* rounds, MAT \d", shown.err)) == 2
    assert texts[0] and len(set(texts)) == 1


def test_budgets_of_the_command_line_fit_under_a_memory_limit(project: Path, tmp_path: Path) -> None:
    config = json.loads((project / "tiny.yaml").read_text()) | {"memory_limit_gb": 0.01, "budget": 2}
    (tmp_path / "limited.yaml").write_text(json.dumps(config))
    fixed = ["--config", f"{tmp_path}/limited.yaml", "--max-new-tokens", "4"]
    assert cli.run(["generate", *fixed, "--prompt", "add", "--method", "ddtree", "--budget", "30"]) == 0
    listed = ["--prompts", f"{project}/prompts.jsonl", "--limit", "1", "--budgets", "30"]
    assert cli.run(["audit", *fixed, *listed]) == 0
    assert cli.run(["bench", *fixed, *listed, "--out", f"{tmp_path}/bench"]) == 0


def test_generate_writes_rows_in_prompt_order_and_reports_what_failed(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--max-new-tokens", "6", "--slots", "2", "--out", str(out)]
    assert cli.run(["generate", "--config", f"{project}/tiny.yaml", "--prompts", f"{project}/bad.jsonl", *options]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["p0", "bad.jsonl:2", "p1"]
    assert [row["finish_reason"] == "error" for row in rows] == [False, True, False]
    assert "not valid JSON" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]  # nothing is left aside
    assert (
        cli.run(["generate", "--config", f"{project}/tiny.yaml", "--prompts", f"{project}/long.jsonl", *options]) == 1
    )
    assert "leaves no room" in capsys.readouterr().err


def test_a_disk_that_fills_up_in_the_middle_is_one_sentence(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(generate_command, "write_aside", fail)
    fixed = ["generate", "--config", f"{project}/tiny.yaml", "--prompts", f"{project}/prompts.jsonl"]
    assert cli.run([*fixed, "--max-new-tokens", "2", "--limit", "1", "--out", f"{tmp_path}/x.jsonl"]) == 1
    assert "graft: [Errno 28] No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_audit_passes_in_float32_and_writes_its_report(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    options = ["--max-new-tokens", "8", "--slots", "2", "--budgets", "3,6", "--out", str(out)]
    prompts = ["--prompts", f"{project}/prompts.jsonl"]
    assert cli.run(["audit", "--config", f"{project}/tiny.yaml", *prompts, *options]) == 0
    shown = capsys.readouterr().out
    for arm in ("plain", "chain-4", "ddtree-3", "ddtree-6"):
        assert re.search(rf"^{arm}: ok: 4 of 4 prompts identical \(\d+ tokens", shown, re.MULTILINE)
    report = json.loads(out.read_text())
    assert [arm["name"] for arm in report["reports"]] == ["plain", "chain-4", "ddtree-3", "ddtree-6"]
    assert report["reports"][3]["num_drafted"] > 0
    sha256 = hashlib.sha256((project / "prompts.jsonl").read_bytes()).hexdigest()
    assert report["settings"]["prompt_file"] == {"name": "prompts.jsonl", "sha256": sha256}
    assert all(report["settings"][f"{model}_fingerprint"] for model in ("target", "drafter"))
    sampled = ["--temperature", "0.9", "--top-p", "0.9", "--seed", "5", "--max-new-tokens", "8"]
    assert cli.run(["audit", "--config", f"{project}/tiny.yaml", *prompts, *sampled]) == 0


def test_audit_of_an_engine_that_errs_fails(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = audit_command.answer_all

    def shifted(engine: Engine, requests: list[Request], params: SamplingParams) -> Iterator[Answer]:
        for answer in honest(engine, requests, params):
            tokens = answer.token_ids
            yield replace(answer, token_ids=[*tokens[:2], (tokens[2] + 1) % 320, *tokens[3:]])

    monkeypatch.setattr(audit_command, "answer_all", shifted)
    arguments = ["--prompts", f"{project}/prompts.jsonl", "--methods", "plain", "--max-new-tokens", "6", "--limit", "1"]
    assert cli.run(["audit", "--config", f"{project}/tiny.yaml", *arguments]) == 1
    shown = capsys.readouterr().out
    assert "plain: FAILED: 0 of 1 prompts identical" in shown
    assert "BUG: p0 at output token 2" in shown


def test_learned_methods_are_audited_and_measured(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --cost: no policy knows this hardware, so rounds are timed first."""

    def measured(*models: Any, **options: Any) -> CostCurve:
        """Rounds are timed, but their times do not decide: on a busy machine no tree of a random drafter may pay."""
        curve = measure_cost(*models, **options)
        return replace(curve, round_ms=tuple(1.0 + 1e-6 * budget for budget in curve.budgets))

    monkeypatch.setattr(policy_maker, "measure_cost", measured)
    methods = "plain,caddtree,graft,graft-fixed"
    fixed = ["--config", f"{project}/tiny.yaml", "--prompts", f"{project}/prompts.jsonl", "--methods", methods]
    fixed += ["--policy", f"{project}/policy", "--max-new-tokens", "6", "--budgets", "3"]
    assert cli.run(["audit", *fixed, "--slots", "2", "--temperature", "0.8"]) == 0
    shown = capsys.readouterr()
    assert "graft: measuring what rounds cost on this machine" in shown.err
    for arm in ("plain", "caddtree", "graft", "graft-fixed-3"):
        assert re.search(rf"^{arm}: ok: 4 of 4 prompts identical", shown.out, re.MULTILINE), arm
    assert cli.run(["bench", *fixed, "--out", str(tmp_path)]) == 0
    arms = {("plain", 0), ("caddtree", 256), ("graft", 20), ("graft-fixed", 3)}
    assert {(row["method"], row["budget"]) for row in read_lines(tmp_path / "raw.jsonl")} == arms
    texts = {(row["prompt_id"], row["output_sha256"]) for row in read_lines(tmp_path / "outputs.jsonl")}
    assert len(texts) == 4
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["cost"]["source"].startswith("measured before decoding")
    assert run["settings"]["policy_fingerprint"] == GraftPolicy.load(project / "policy").fingerprint


METHODS = "plain,hf,hf-lookup,hf-dflash,chain,ddtree"


def run_bench(project: Path, out: Path, *more: str) -> int:
    fixed = ["--prompts", f"{project}/prompts.jsonl", "--methods", METHODS, "--max-new-tokens", "6"]
    return cli.run(["bench", "--config", f"{project}/tiny.yaml", "--out", str(out), *fixed, *more])


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_bench_writes_rows_summary_tables_and_provenance(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(project, tmp_path) == 0
    raw = read_lines(tmp_path / "raw.jsonl")
    assert all(list(row) == RAW_KEYS.split() for row in raw)
    arms = {("plain", 0), ("hf", 0), ("hf-lookup", 10), ("hf-dflash", 4), ("chain", 4), ("ddtree", 4), ("ddtree", 8)}
    assert {(row["method"], row["budget"]) for row in raw} == arms
    assert len(raw) == 4 * len(arms)
    assert len({row["method"] for row in raw[:: len(arms)]}) > 1  # the order rotates
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(list(row) == SUMMARY_KEYS.split() for row in summary)
    assert {row["task"] for row in summary} == {"a", "b", "all"}
    assert len(summary) == 3 * len(arms)
    assert [row["speedup"] for row in summary if row["method"] == "plain"] == [1.0] * 3
    outputs = read_lines(tmp_path / "outputs.jsonl")
    by_prompt: dict[str, set[str]] = {}
    for row in outputs:
        by_prompt.setdefault(row["prompt_id"], set()).add(row["output_sha256"])
    assert all(len(texts) == 1 for texts in by_prompt.values())  # float32: all arms said the same
    assert "| ddtree | 8 | all |" in (tmp_path / "summary.md").read_text()
    run = json.loads((tmp_path / "run.json").read_text())
    assert {"settings", "machine", "versions", "commit", "command"} <= run.keys()
    sha256 = hashlib.sha256((project / "prompts.jsonl").read_bytes()).hexdigest()
    assert run["settings"]["prompt_file"] == {"name": "prompts.jsonl", "sha256": sha256}
    assert str(project) not in json.dumps(run)
    printed = capsys.readouterr().out
    assert re.search(r"^ddtree +8 ", printed, re.MULTILINE)
    assert re.search(r" mismatch +overhead +decoding +end to end$", printed, re.MULTILINE)


def test_a_stopped_bench_goes_on_and_another_one_is_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(project, tmp_path, "--warmup", "0") == 0
    whole = (tmp_path / "raw.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    # As a stopped process leaves it: two prompts whole, one without its last arms, half a line.
    (tmp_path / "raw.jsonl").write_text("".join(lines[:17]) + lines[17][:20])
    assert run_bench(project, tmp_path, "--warmup", "0") == 0
    again = (tmp_path / "raw.jsonl").read_text().splitlines(keepends=True)
    assert again[:14] == lines[:14]
    assert again[14:] != lines[14:] and len(again) == len(lines)
    assert len(read_lines(tmp_path / "outputs.jsonl")) == len(lines)
    assert len(json.loads((tmp_path / "run.json").read_text())["resumed"]) == 1
    capsys.readouterr()
    assert run_bench(project, tmp_path, "--budgets", "5") == 2
    assert "holds a benchmark with arms" in capsys.readouterr().err


def test_bench_reports_prompts_that_could_not_be_measured(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompts", f"{project}/long.jsonl", "--methods", "plain,hf,ddtree", "--max-new-tokens", "4"]
    assert cli.run(["bench", "--config", f"{project}/tiny.yaml", "--out", str(tmp_path), *prompts]) == 1
    assert "long was left out: plain: the prompt has" in capsys.readouterr().err
    assert {row["prompt_id"] for row in read_lines(tmp_path / "raw.jsonl")} == {"p0"}


def test_query_answers_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = TrajectoryStore(tmp_path)
    turn = store.begin("run", "tiny", DATASET)
    store.commit(write_unit(store, "u1", "a1", num_sequences=3), "run", turn)
    sql = "SELECT count(*) AS num_sequences FROM sequences"
    for form, expected in (("table", "num_sequences\n-------------\n            3"), ("csv", "num_sequences\n3")):
        assert cli.run(["query", "--store", str(tmp_path), sql, "--format", form]) == 0
        assert capsys.readouterr().out.rstrip() == expected
    assert cli.run(["query", "--store", str(tmp_path), "runs", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_sequences"] == 3
    assert cli.run(["query", "--store", str(tmp_path), "SELECT nope FROM sequences"]) == 2
    assert "nope" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_config", interrupt)
    assert cli.run(["generate", "--config", "x", "--prompt", "y"]) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "graft: interrupted"


def test_a_reader_that_went_away_ends_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        command = [sys.executable, "-m", "jobs.cli", "targets"]
        done = subprocess.run(command, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 1


def test_files_are_written_aside(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_aside(file, "one")
    write_aside(file, "two")
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]


def test_a_stores_upkeep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = TrajectoryStore(tmp_path / "store")
    turn = store.begin("run", "tiny", DATASET)
    for number in range(3):
        store.commit(write_unit(store, f"u{number}", f"a{number}", num_sequences=2), "run", turn + number)
    chosen = ["--store", str(tmp_path / "store")]
    assert cli.run(["store", "compact", *chosen]) == 0
    assert "6 files are now 2; the rounds of 0 attempts" in capsys.readouterr().out
    assert cli.run(["store", "vacuum", *chosen, "--retention-hours", "0"]) == 0
    assert capsys.readouterr().out.endswith("\n6 files were deleted\n")
    assert cli.run(["store", "export", *chosen, "--dest", str(tmp_path / "copy")]) == 0
    assert list((tmp_path / "copy" / "sequences").rglob("*.parquet"))
    assert cli.run(["query", *chosen, "SELECT count(*) AS n FROM sequences", "--format", "csv"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("n\n6")
