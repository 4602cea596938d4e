"""The roofline measures every pass and keeps its rows; how fast anything is, is nobody's test."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import roofline


def test_layers_come_in_order_with_one_head() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 50))
    head = nn.Linear(4, 50)
    assert roofline.linears_of(model, head) == [model[0], model[2], head]


def test_bounds_are_bytes_and_multiplications_over_the_best_rates() -> None:
    row = {"pass": "verify 8", "rows": 9, "weight_bytes": 4_000_000, "flops": 3_000_000}
    row |= {"products_ms": [5.0, 7.0, 6.0], "pass_ms": [9.0, 8.0, 10.0]}
    (shown,) = roofline.summary({"read_gb_s": [1.0, 2.0, 3.0], "gflop_s": [1.0]}, [row])
    assert (shown["read"], shown["multiply"], shown["products"], shown["whole"]) == (2.0, 3.0, 6.0, 9.0)


@pytest.mark.slow
def test_the_built_in_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "LARGE", 64)
    threads = torch.get_num_threads()
    roofline.main(["--threads", str(threads), "--rounds", "1", "--out", str(tmp_path)])
    shown = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert [row["pass"] for row in shown] == ["verify 0", "verify 8", "verify 16", "verify 32", "verify 64", "draft"]
    assert all(row[key] > 0 for row in shown for key in ("read", "multiply", "products", "whole"))
    machine, *raw = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert set(machine) == {"read_gb_s", "gflop_s"}
    # 134.5 million weights, each used once a row.
    assert raw[0]["flops"] == pytest.approx(2 * 134.5e6, rel=0.01)
