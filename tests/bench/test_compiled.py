"""Every way of running the target computes the same logits; how fast one is, is nobody's test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import freezing
from transformers import AutoModelForCausalLM

from bench import compiled
from graft_dist.target import Target


@pytest.mark.slow
def test_all_ways_agree_and_are_timed(
    tiny_target: Callable[[str], Target], tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "CONTEXT", 20)
    monkeypatch.setattr(compiled, "MAX_LENGTH", 40)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32).eval()
    rows = compiled.measure(tiny_target("llama"), model, [3], num_rounds=2)
    assert [(row["rows"], row["way"]) for row in rows] == [(3, way) for way in compiled.WAYS]
    assert all(row["max_difference"] < 1e-4 and len(row["ms"]) == 2 for row in rows)


@pytest.mark.slow
def test_frozen_weights_are_constants(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32).eval()
    monkeypatch.setattr(compiled, "CONTEXT", 20)
    monkeypatch.setattr(compiled, "MAX_LENGTH", 40)
    given: list[int] = []
    freeze = freezing.replace_params_with_constants

    def watched(graph: Any, weights: Any, metadata: Any) -> list[int]:
        given.append(len(weights))
        return freeze(graph, weights, metadata)

    monkeypatch.setattr(freezing, "replace_params_with_constants", watched)
    with torch.no_grad():
        for forward in (torch.compile(model.forward, dynamic=False), compiled.frozen_forward(model)):
            compiled.their_pass(model, forward, list(range(23)))()
    (number,) = given
    assert number >= len(list(model.parameters()))


def test_medians_by_way_and_rows() -> None:
    rows = [
        {"way": way, "rows": size, "first_s": 2.0, "max_difference": 0.0, "ms": [size, 3.0 * size, 2.0 * size]}
        for size in (1, 9)
        for way in compiled.WAYS
    ]
    shown = compiled.summary(rows)
    assert shown[3] == {"way": "frozen", "rows_1": 2.0, "rows_9": 18.0, "first_s": 4.0}
    assert json.loads(json.dumps(shown)) == shown
