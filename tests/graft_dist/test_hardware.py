"""The key of cost curves."""

from __future__ import annotations

import pytest
import torch

from graft_dist.hardware import describe_hardware

CPU = torch.device("cpu")


def test_processors_of_one_name_differ_by_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for instructions in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda instructions=instructions: instructions)
        names.add(describe_hardware("float32", CPU))
        assert f" with {instructions}, {torch.get_num_threads()} thread" in describe_hardware("float32", CPU)
    assert len(names) == 2
    assert describe_hardware("bfloat16", CPU).endswith(", bfloat16")
