"""The overhead benchmark runs and keeps its rows; how long it takes is nobody's test."""

import json
from pathlib import Path

import pytest
import torch

from bench import overhead


def test_every_variant_leaves_its_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "VOCAB_SIZE", 500)
    threads = torch.get_num_threads()
    out = tmp_path / "rows.json"
    overhead.main(["--depth", "3", "--candidates", "4", "--threads", str(threads), "--rounds", "2", "--out", str(out)])
    kept = json.loads(out.read_text())
    assert len(kept["rows"]) == len(capsys.readouterr().out.splitlines()) - 4 == 10
    for row in kept["rows"]:
        assert [len(spent) for spent in row["microseconds"]] == [6, 6]
        assert all(abs(sum(spent[:5]) - spent[5]) < 1 for spent in row["microseconds"])
    builder = [(row["depth"], row["candidates"], row["nodes"], len(row["microseconds"])) for row in kept["builder"]]
    assert builder == [(15, 32, 64, 2), (15, 32, 1024, 2)]  # whatever the options say
    assert kept["machine"]["cpu"]
