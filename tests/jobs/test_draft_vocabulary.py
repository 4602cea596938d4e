"""A drafter's vocabulary from stored answers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from graft_dist.config import TargetConfig
from graft_dist.draft_head import FILE_NAME
from graft_dist.drafter import load_drafter
from graft_dist.target import Target
from jobs.draft_vocabulary import choose_tokens, main
from storage import connect
from tests.jobs.learning_store import write_store


def test_the_most_frequent_come_first_and_the_lowest_ids_fill_up() -> None:
    counts = [(7, 5), (2, 3), (9, 2)]
    assert choose_tokens(counts, 2, 10).token_ids == [2, 7]
    assert choose_tokens(counts, 2, 10).coverage == 0.8
    assert choose_tokens(counts, 5, 10).token_ids == [0, 1, 2, 7, 9]
    assert choose_tokens(counts, 5, 10).coverage == 1.0


@pytest.fixture
def parts(
    tiny_config: TargetConfig, tiny_drafter_folder: Path, tiny_llama: Target, tmp_path: Path
) -> tuple[list[str], Path, Path]:
    """The options of a command, its store, and the checkpoint folder of its own."""
    store, folder = tmp_path / "store", tmp_path / "drafter"
    shutil.copytree(tiny_drafter_folder, folder)
    write_store(store, tiny_config, tiny_llama, "0123456789abcdef", num_prompts=6)
    config = tmp_path / "target.yaml"
    config.write_text(yaml.safe_dump(tiny_config.model_dump(mode="json", exclude_none=True)))
    return ["--config", str(config), "--store", str(store), "--to", str(folder)], store, folder


def test_the_tokens_of_a_store_become_the_drafters(
    parts: tuple[list[str], Path, Path], tiny_llama: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    options, store, folder = parts
    before = load_drafter(folder, tiny_llama).fingerprint
    assert main([*options, "--size", "12"]) == 0
    rows = connect(store).execute("SELECT prompt_token_ids, output_token_ids FROM sequences").fetchall()
    times = Counter(token for row in rows for ids in row for token in ids)
    found = json.loads((folder / FILE_NAME).read_text())
    assert found == sorted(sorted(times, key=lambda token: (-times[token], token))[:12])
    share = 100 * sum(times[token] for token in found) / times.total()
    assert f"12 of 320 tokens are in {folder / FILE_NAME}: {share:.2f} %" in capsys.readouterr().out
    assert load_drafter(folder, tiny_llama).fingerprint != before


def test_mistakes_are_said_in_one_sentence(
    parts: tuple[list[str], Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, _, folder = parts
    for changed, message in (
        ([*options, "--size", "321"], "--size is 321, the drafter's vocabulary is 320"),
        ([*options, "--size", "9", "--store", str(tmp_path / "none")], "there is no trajectory store at"),
        ([*options, "--size", "9", "--to", str(tmp_path)], "holds no config.json"),
    ):
        assert main(changed) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (folder / FILE_NAME).exists()
