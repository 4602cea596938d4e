"""The measurement of draft vocabularies: real rounds of the built-in target, and sums worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.draft_vocabulary import main, summary
from graft_dist.config import load_config
from graft_dist.decoder import load_target
from graft_dist.prompts import starter_prompts_path
from tests.jobs.learning_store import write_store


def test_sums_by_size() -> None:
    row = {"rounds": 2, "tokens": 6, "draft_ms": 20.0, "round_ms": 200.0}
    faster = row | {"tokens": 5, "draft_ms": 10.0, "round_ms": 100.0}
    rows = [{"size": size, **figures} for size, figures in ((0, row), (9, faster), (0, row), (9, faster))]
    assert summary(rows) == [
        {"size": 0, "mat": 3.0, "draft_ms": 10.0, "round_ms": 100.0, "tokens_per_s": 30.0, "ratio": 1.0},
        {"size": 9, "mat": 2.5, "draft_ms": 5.0, "round_ms": 50.0, "tokens_per_s": 50.0, "ratio": 1.6667},
    ]


@pytest.mark.slow
def test_every_size_decodes_every_prompt(tmp_path: Path) -> None:
    config = load_config("smollm2-135m")
    write_store(tmp_path / "store", config, load_target(config), "0123456789abcdef", num_prompts=6)
    out = tmp_path / "out"
    options = ["--sizes", "64,49152", "--limit", "2", "--max-new-tokens", "12", "--out", str(out)]
    main(["--store", str(tmp_path / "store"), "--prompts", str(starter_prompts_path()), *options])
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [row["size"] for row in rows] == [0, 64, 49152, 64, 49152, 0]  # in turns
    tokens = {(row["prompt_id"], row["size"]): row["tokens"] for row in rows}
    assert all(row["tokens"] == tokens[row["prompt_id"], 0] for row in rows)
    by_size = {row["size"]: row for row in map(json.loads, (out / "summary.jsonl").read_text().splitlines())}
    assert by_size[49152]["mat"] == by_size[0]["mat"] >= by_size[64]["mat"]
    assert "commit" in json.loads((out / "run.json").read_text())
