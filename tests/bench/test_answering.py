"""The benchmark of answering runs, and counts the same tokens in both arms; how long it takes is nobody's test."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from graft_dist.config import TargetConfig
from graft_dist.errors import PromptError

MAIN = runpy.run_path(str(Path(__file__).resolve().parents[2] / "bench" / "answering.py"))["main"]


@pytest.fixture(scope="module")
def config_file(tiny_config: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that ends its answers with any of fifty tokens, so that some end early."""
    folder = tmp_path_factory.mktemp("answering")
    target = shutil.copytree(tiny_config.target, folder / "target")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(settings | {"eos_token_id": list(range(100, 150))}))
    file = folder / "tiny.yaml"
    file.write_text(json.dumps(tiny_config.model_dump(mode="json") | {"target": str(target)}))  # JSON is YAML
    return file


def test_both_arms_give_the_same_answers_and_count_them_alike(config_file: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.json"
    turns = ["Say one.", "Say it twice and then thrice.", "too long " * 60, "a", "Count the rounds.", "b", "c"]
    lines = [json.dumps({"id": f"p{index}", "turns": [turn]}) for index, turn in enumerate(turns)]
    prompts.write_text("\n".join(lines))
    words = ["--prompts", str(prompts), "--config", str(config_file), "--slots", "3", "--max-new-tokens", "12"]
    MAIN([str(out), *words, "--limit", "5", "--threads", str(torch.get_num_threads())])
    kept = json.loads(out.read_text())
    assert [(row["arm"], row["turn"]) for row in kept["rows"]] == [
        ("engine", 0), ("transformers", 0), ("engine", 1), ("transformers", 1),
    ]  # fmt: skip
    assert kept["num_alike"] == 5  # in two batches, one of them padded
    counts = {(row["num_prompts"], row["num_output_tokens"]) for row in kept["rows"]}
    assert len(counts) == 1
    num_prompts, num_tokens = counts.pop()
    assert num_prompts == 5 and 5 <= num_tokens < 5 * 12, "no answer ended early"
    assert all(row["tokens_per_s"] == row["num_output_tokens"] / row["seconds"] for row in kept["rows"])
    assert kept["settings"]["dtype"] == "float32" and kept["machine"]["cpu"]


def test_a_file_without_a_prompt_that_fits_is_refused(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "p", "turns": ["too long " * 60]}))
    words = ["--prompts", str(tmp_path / "prompts.jsonl"), "--config", str(config_file)]
    with pytest.raises(PromptError, match="has no prompt of at most 128 tokens"):
        MAIN([str(tmp_path / "rows.json"), *words, "--threads", str(torch.get_num_threads())])
