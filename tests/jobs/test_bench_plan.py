"""Plans: what they refuse, which prompts they name, and that the shipped ones can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from graft_dist.bench import PEERS
from graft_dist.config import load_config
from graft_dist.errors import ConfigError, PromptError
from graft_dist.prompts import Prompt, is_held_out
from jobs.bench_plan import Cell, first_of_each_task, grouped, measured_prompts, read_plan, tuning_prompts

ROOT = Path(__file__).resolve().parents[2]
PLAN = {"targets": ["tiny"], "prompts": [{"path": "p.jsonl"}], "methods": ["plain", "ddtree"], "budgets": [4]}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN | changes))
    return folder / "plan.yaml"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"methods": ["plain", "tree"]}, "unknown method 'tree'"),
        ({"methods": ["ddtree"]}, "add plain to the methods"),
        ({"budgets": [0]}, "budgets.0: Input should be greater than or equal to 1"),
        ({"batch": [1]}, "batch: Extra inputs"),
        ({"all_budgets": ["plain"]}, "all_budgets has 'plain', which is no method of this plan that takes a budget"),
        ({"all_budgets": ["graft-fixed"]}, "all_budgets has 'graft-fixed', which is no method of this plan"),
        ({"prompts": [{"path": "a", "hub": "b/c"}]}, "one of path, hub and traffic"),
    ],
)
def test_impossible_plans_are_refused_in_a_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_plan(written(tmp_path, **changes))
    assert sentence in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.yaml")


def test_measured_and_tuning_prompts_never_meet(tmp_path: Path) -> None:
    rows = [{"id": f"p{index}", "task": "a", "turns": [f"question {index}"]} for index in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = read_plan(written(tmp_path, held_out=True, tuning=[{"path": "p.jsonl"}]))
    measured = measured_prompts(plan)
    tuning = tuning_prompts(plan, measured)
    assert measured and all(is_held_out(prompt.turns) for prompt in measured)
    assert len(measured) + len(tuning) == 40 and not {p.id for p in measured} & {p.id for p in tuning}
    every = read_plan(written(tmp_path, prompts=[{"path": "p.jsonl", "limit": 30}], tuning=[{"path": "p.jsonl"}]))
    assert len(tuning_prompts(every, measured_prompts(every))) == 10
    with pytest.raises(PromptError, match="no prompt is left"):
        tuning_prompts(every, measured_prompts(plan) + tuning)


def test_groups_are_of_one_task_and_one_size() -> None:
    prompts = [Prompt(f"{task}{index}", task, (f"{task} {index}",)) for index in range(3) for task in "ab"]
    found = [[prompt.id for prompt in group] for group in grouped(prompts, 2)]
    assert found == [["a0", "a1"], ["a2", "a0"], ["b0", "b1"], ["b2", "b0"]]
    assert [prompt.id for prompt in first_of_each_task(prompts, 1)] == ["a0", "b0"]


ROWS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [{"question": "How many?", "answer": "4"}],
    "HuggingFaceH4/MATH-500": [{"problem": "Find {x} in $x^{2}$.", "unique_id": "test/algebra/1.json"}],
    "HuggingFaceH4/aime_2024": [{"id": 60, "problem": "Every morning"}],
    "MathArena/aime_2025": [{"problem_idx": 1, "problem": "Find the sum"}],
    "openai/openai_humaneval": [{"task_id": "HumanEval/0", "prompt": "def f(x: {}):\n"}],
    "google-research-datasets/mbpp": [{"task_id": 2, "prompt": "Write a function."}],
    "princeton-nlp/SWE-bench_Lite": [{"instance_id": "astropy__1", "problem_statement": "It is broken."}],
    "tatsu-lab/alpaca": [{"instruction": "Name", "input": ""}, {"instruction": "Sum up", "input": "A text."}],
    "HuggingFaceH4/mt_bench_prompts": [{"prompt_id": 81, "prompt": ["Write.", "Rewrite."]}],
    "livecodebench/code_generation_lite": [
        {"question_id": "1873_A", "question_content": "Three cards.", "starter_code": ""}
    ],
}
"""Rows of the form that each data set of the paper's plan has."""


class SmallHub:
    """The data sets of `ROWS`, in the files that a plan's patterns name."""

    def __init__(self, folder: Path, patterns: dict[str, str]) -> None:
        self.patterns = patterns
        self._paths: dict[str, Path] = {}
        for name, rows in ROWS.items():
            is_parquet = patterns[name].endswith(".parquet")
            path = folder / f"{name.replace('/', '--')}.{'parquet' if is_parquet else 'jsonl'}"
            if is_parquet:
                pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self._paths[name] = path

    def glob(self, path: str) -> list[str]:
        name = "/".join(path.split("/")[1:3]).split("@")[0]
        return [str(self._paths[name])]

    def open(self, path: str, mode: str) -> Any:
        return Path(path).open(mode)


def test_the_papers_plan_reads_files_of_its_data_sets_form(tmp_path: Path) -> None:
    plan = read_plan(ROOT / "bench" / "paper.yaml")
    assert [load_config(name).slug for name in plan.targets] == [
        "Qwen--Qwen3-4B", "Qwen--Qwen3-8B", "Qwen--Qwen3-Coder-30B-A3B-Instruct",
    ]  # fmt: skip
    assert {"caddtree", "ddtree", "graft", "oracle"} < set(plan.methods)
    assert plan.policy_of(load_config("qwen3-4b")) == "models:/graft-Qwen--Qwen3-4B@champion"
    assert {source.hub for source in plan.prompts} == ROWS.keys()
    hub = SmallHub(tmp_path, {source.hub or "": source.files or "" for source in plan.prompts})
    found = measured_prompts(plan, hub)
    assert len({prompt.task for prompt in found}) == 10 and len(found) == 11
    texts = {prompt.task: prompt.turns for prompt in found}
    assert texts["gsm8k"] == ("How many?\nPlease reason step by step, and put your final answer within \\boxed{}.",)
    assert texts["mt-bench"] == ("Write.", "Rewrite.")
    assert "Find {x} in $x^{2}$." in texts["math-500"][0]
    assert "```python\ndef f(x: {}):\n" in texts["humaneval"][0]


def test_the_built_in_plan_can_be_read() -> None:
    plan = read_plan(ROOT / "bench" / "smollm2-135m.yaml")
    measured = measured_prompts(plan)
    assert measured and all(is_held_out(prompt.turns) for prompt in measured)
    assert tuning_prompts(plan, measured)
    assert 4 in plan.budgets and plan.all_budgets == ("ddtree",)
    alone = plan.methods_of(Cell(temperature=0, batch=1))
    assert set(alone) == {"plain", *PEERS, "chain", "ddtree", "caddtree", "graft", "graft-fixed", "oracle"}
    assert set(plan.methods_of(Cell(temperature=1, batch=16))) == {*alone} - {*PEERS, "oracle"}
