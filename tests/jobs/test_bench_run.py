"""Whole benchmarks with tiny models, in this process: what they write follows from rows and can be gone on with."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graft_dist.bench import Arm, Measurement, SummaryRow
from graft_dist.config import TargetConfig
from graft_dist.drafter import fingerprint, read_config, read_tensors
from graft_dist.hardware import describe_hardware
from graft_dist.prompts import Prompt
from graft_dist.target import Target
from jobs.bench_plan import BenchPlan, Cell, Group
from jobs.bench_run import BenchRun, best_budgets, render_table
from jobs.bench_worker import BenchWorker
from tests.graft_dist.policies import CURVE, make_policy, random_network

ROOT = Path(__file__).resolve().parents[2]
PLAN = BenchPlan.model_validate(
    {
        "targets": ["tiny"],
        "prompts": [{"path": "unread.jsonl"}],
        "methods": ["plain", "hf", "ddtree"],
        "budgets": [2, 4],
        "temperatures": [0.0, 1.0],
        "batches": [1, 2],
        "max_new_tokens": 5,
    }
)


class CountingWorker(BenchWorker):
    """Remembers the groups that it was given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups: list[tuple[str, list[str]]] = []

    def measure(self, cell: Cell, arms: Sequence[Arm], turn: int, group: Group) -> list[Measurement] | str:
        self.groups.append((cell.name, [prompt.id for prompt in group]))
        return super().measure(cell, arms, turn, group)


def prompts(kind: str, count: int) -> list[Prompt]:
    return [Prompt(f"{kind}{index}", "ab"[index % 2], (f"add {kind} {index}",)) for index in range(count)]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_cell_is_tuned_frozen_measured_and_verified(tiny_config: TargetConfig, tmp_path: Path) -> None:
    worker = CountingWorker(tiny_config, PLAN, 1)
    run = BenchRun(
        plan=PLAN, config=tiny_config, worker=worker, measured=prompts("m", 3), tuning=prompts("t", 2), out=tmp_path,
        say=lambda line: None,
    )  # fmt: skip
    assert run.run() == 0
    differences = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    cells = {folder.name: folder for folder in (tmp_path / tiny_config.slug).iterdir()}
    assert sorted(cells) == ["t0-b1", "t0-b2", "t1-b1", "t1-b2"]
    for name, folder in cells.items():
        assert differences(folder) == [] and differences(folder / "tuning") == []
        frozen = json.loads((folder / "frozen.json").read_text())
        rows = read_lines(folder / "raw.jsonl")
        arms = {(row["method"], row["budget"]) for row in rows}
        assert arms == {("plain", 0), ("ddtree", frozen["ddtree"])} | ({("hf", 0)} if name == "t0-b1" else set())
        assert {(f"t{row['temperature']:g}-b{row['batch']}") for row in rows} == {name}
        assert {row["budget"] for row in read_lines(folder / "tuning" / "raw.jsonl")} == {0, 2, 4}
        hashes: dict[str, set[str]] = {}
        for row in read_lines(folder / "outputs.jsonl"):
            hashes.setdefault(row["prompt_id"], set()).add(row["output_sha256"])
        assert all(len(found) == 1 for found in hashes.values())  # float32 and one seed: every arm says the same
        seen = [ids[0][0] for cell, ids in worker.groups if cell == name]
        assert "".join(seen).startswith("t") and "mt" not in "".join(seen)  # tuning is over before measuring begins
    groups = {row["prompt_id"] for row in read_lines(cells["t0-b2"] / "raw.jsonl")}
    assert groups == {"m0,m2", "m1,m1"}  # by task; the last one is filled up
    table = render_table(tmp_path)
    assert table.count("## ") == 4 and "| hf | 0 |" in table

    (cells["t1-b1"] / "frozen.json").write_text('{"ddtree": 9}')
    assert any("frozen.json" in line for line in differences(cells["t1-b1"]))


def test_a_learned_policy_takes_part_with_its_own_budgets_a_frozen_one_and_the_oracles(
    tiny_config: TargetConfig, tiny_llama: Target, tiny_drafter_folder: Path, tmp_path: Path
) -> None:
    policy = make_policy(
        random_network(tiny_llama.hidden_size, 4),
        target_fingerprint=tiny_llama.fingerprint,
        drafter_fingerprint=fingerprint(read_config(tiny_drafter_folder), read_tensors(tiny_drafter_folder)[0]),
        cost_curves={describe_hardware(tiny_llama.dtype_name, tiny_llama.device): CURVE},
    )
    methods = ("plain", "ddtree", "graft", "graft-fixed", "oracle")
    plan = PLAN.model_copy(
        update={"methods": methods, "warmup": 0, "policy": str(policy.save(tmp_path / "policy")), "max_new_tokens": 12}
    )
    run = BenchRun(
        plan=plan, config=tiny_config, worker=BenchWorker(tiny_config, plan, 1), measured=prompts("m", 2),
        tuning=prompts("t", 2), out=tmp_path / "out", say=lambda line: None,
    )  # fmt: skip
    assert run.run() == 0
    cells = {folder.name: folder for folder in (tmp_path / "out" / tiny_config.slug).iterdir()}
    assert sorted(cells) == ["t0-b1", "t0-b2", "t1-b1", "t1-b2"]
    for name, folder in cells.items():
        frozen = json.loads((folder / "frozen.json").read_text())
        assert frozen.keys() == {"ddtree", "graft-fixed"} and frozen["graft-fixed"] in plan.budgets
        own = {("graft", policy.max_budget), ("graft-fixed", frozen["graft-fixed"])}
        own |= {("oracle", policy.max_budget)} if name.endswith("b1") else set()  # it reads one answer
        rows = read_lines(folder / "raw.jsonl")
        assert {(row["method"], row["budget"]) for row in rows} == {("plain", 0), ("ddtree", frozen["ddtree"])} | own
        outputs = read_lines(folder / "outputs.jsonl")
        for prompt_id in {row["prompt_id"] for row in outputs}:
            assert len({row["output_sha256"] for row in outputs if row["prompt_id"] == prompt_id}) == 1
        assert any(row["num_drafted"] for row in outputs if row["method"] == "graft-fixed")
        compared = {(row["arm"], row["rival"]) for row in read_lines(folder / "comparisons.jsonl")}
        rival, fixed = f"ddtree-{frozen['ddtree']}", f"graft-fixed-{frozen['graft-fixed']}"
        assert compared == {("graft", rival), ("graft", fixed), (fixed, rival)}
        report = json.loads((folder / "run.json").read_text())
        assert report["settings"]["policy_fingerprint"] == policy.fingerprint
        if name.endswith("b1"):
            assert report["cost"] == json.loads(json.dumps(asdict(CURVE)))  # known to the policy
        else:
            assert report["cost"]["num_slots"] == 2 and "rounds of 2 sequences" in report["cost"]["source"]


def test_a_method_can_keep_all_its_budgets_beside_the_frozen_one(tiny_config: TargetConfig, tmp_path: Path) -> None:
    changes = {"temperatures": (0.0,), "warmup": 0, "methods": ("plain", "ddtree"), "all_budgets": ("ddtree",)}
    plan = PLAN.model_copy(update=changes)
    run = BenchRun(
        plan=plan, config=tiny_config, worker=BenchWorker(tiny_config, plan, 1),
        # Two: their interval is from one to the other whichever are drawn, so that it can be checked on a busy machine.
        measured=prompts("m", 2),
        tuning=prompts("t", 2), out=tmp_path, say=lambda line: None,
    )  # fmt: skip
    assert run.run() == 0
    differences = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    for name in ("t0-b1", "t0-b2"):
        folder = tmp_path / tiny_config.slug / name
        rows = read_lines(folder / "raw.jsonl")
        assert {(row["method"], row["budget"]) for row in rows} == {("plain", 0), ("ddtree", 2), ("ddtree", 4)}
        assert all(row["verify_ms"] > 0 and row["num_mismatched"] >= 0 for row in rows)
        assert all(row["end_to_end_s"] > row["prefill_s"] + row["decode_s"] and row["load_s"] > 0 for row in rows)
        loads = {row["method"]: row["load_s"] for row in rows}
        assert loads["ddtree"] > loads["plain"]  # with its drafter
        assert differences(folder) == []
    stars = [line.split(" | ")[1] for line in render_table(tmp_path).splitlines() if line.startswith("| ddtree |")]
    frozen = json.loads((tmp_path / tiny_config.slug / "t0-b1" / "frozen.json").read_text())["ddtree"]
    assert stars[:2] == [f"{budget}*" if budget == frozen else str(budget) for budget in (2, 4)]


def test_a_run_that_was_stopped_measures_only_what_is_missing(tiny_config: TargetConfig, tmp_path: Path) -> None:
    plan = PLAN.model_copy(
        update={"temperatures": (0.0,), "batches": (1,), "warmup": 0, "methods": ("plain", "ddtree")}
    )
    worker = CountingWorker(tiny_config, plan, 1)
    run = BenchRun(
        plan=plan, config=tiny_config, worker=worker, measured=prompts("m", 2), tuning=prompts("t", 1), out=tmp_path,
        say=lambda line: None,
    )  # fmt: skip
    assert run.run() == 0
    raw = tmp_path / tiny_config.slug / "t0-b1" / "raw.jsonl"
    raw.write_text("".join(raw.read_text().splitlines(keepends=True)[:-1]))
    worker.groups.clear()
    assert run.run() == 0
    assert [ids for _, ids in worker.groups] == [["m1"]]


def test_a_group_that_cannot_be_decoded_is_counted_and_the_rest_goes_on(
    tiny_config: TargetConfig, tmp_path: Path
) -> None:
    plan = PLAN.model_copy(update={"temperatures": (0.0,), "methods": ("plain",)})
    long = Prompt("long", "a", ("x" * 400,))
    said: list[str] = []
    run = BenchRun(
        plan=plan, config=tiny_config, worker=BenchWorker(tiny_config, plan, 1), measured=[long, *prompts("m", 2)],
        tuning=[], out=tmp_path, say=said.append,
    )  # fmt: skip
    assert run.run() == 2  # alone, and in its group
    assert any("long was left out: plain: the prompt has" in line for line in said)
    assert {row["prompt_id"] for row in read_lines(tmp_path / tiny_config.slug / "t0-b1" / "raw.jsonl")} == {"m0", "m1"}


def test_a_few_work_items_have_no_interval(tmp_path: Path) -> None:
    def row(task: str, num_items: int) -> SummaryRow:
        return SummaryRow("ddtree", 8, task, 1.5, 1.25, 1.75, 2.0, 10.0, 8.0, num_items, 0.0625, 1.5, 20.0, None)

    for cell, num_items in (("t0-b1", 5), ("t0-b16", 4)):
        (tmp_path / "tiny" / cell).mkdir(parents=True)
        rows = [asdict(row("all", num_items)), asdict(row("math", 4))]
        (tmp_path / "tiny" / cell / "summary.json").write_text(json.dumps(rows))
    lines = [line for line in render_table(tmp_path).splitlines() if line.startswith("| ddtree |")]
    assert lines == [
        "| ddtree | 8 | 2.00 | 10.0 | 0.062 | 1.50 | 20.0 |  | 1.50 (1.25 to 1.75) | 1.50 |",
        "| ddtree | 8 | 2.00 | 10.0 | 0.062 | 1.50 | 20.0 |  | 1.50 | 1.50 |",
    ]


def test_the_best_budget_is_the_fastest_over_all_prompts() -> None:
    def row(budget: int, task: str, speedup: float) -> SummaryRow:
        return SummaryRow("ddtree", budget, task, speedup, 1.0, 2.0, 1.5, 10.0, budget, 3, None, None, 1.0, None)

    rows = [row(4, "all", 1.2), row(8, "all", 1.4), row(16, "all", 1.3), row(16, "math", 9.0)]
    assert best_budgets(rows) == {"ddtree": 8}
