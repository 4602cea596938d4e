"""What users asked is asked again: read out of a store with traffic of this and other kinds."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from graft_dist.config import TargetConfig
from graft_dist.errors import PromptError
from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import is_held_out, prompt_hash
from graft_dist.target import Target
from jobs.fresh_prompts import choose_fresh
from jobs.prompt_reader import read_sources
from jobs.traffic_prompts import TrafficPrompts
from tests.jobs.learning_store import prompt_texts, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_config: TargetConfig, tiny_llama: Target) -> str:
    """Traffic of 12 prompts, two of them not held out, some asked twice, beside a job's sequences of 20 others."""
    root = tmp_path_factory.mktemp("traffic") / "store"
    write_store(root, tiny_config, tiny_llama, "drafter", 20, run_id="job")
    for run, count in (("served", 12), ("served-again", 6)):
        write_store(root, tiny_config, tiny_llama, "drafter", count, run_id=run, source="traffic")
    return str(root)


def test_every_prompt_of_the_traffic_once_and_the_newest_first(store: str, tiny_config: TargetConfig) -> None:
    found = list(TrafficPrompts(tiny_config).read(PromptSource(traffic=store, task="users")))
    expected = {(text,) for text in prompt_texts(12)} | {(text,) for text in prompt_texts(6)}
    assert {prompt.turns for prompt in found} == expected and len(found) == len(expected)
    assert {prompt.turns for prompt in found[:6]} == {(text,) for text in prompt_texts(6)}
    assert len({prompt.id for prompt in found}) == len(found) and {prompt.task for prompt in found} == {"users"}


def test_a_retraining_takes_the_held_out_ones_that_it_has_not_asked(store: str, tiny_config: TargetConfig) -> None:
    read, sources = TrafficPrompts(tiny_config).read, [PromptSource(traffic=store)]
    found = choose_fresh(sources, set(), 100, every_prompt=False, traffic=read)
    assert len(found) == 10 and all(is_held_out(prompt.turns) for prompt in found)
    asked = {prompt_hash(prompt.turns) for prompt in found[:4]}
    assert choose_fresh(sources, asked, 100, every_prompt=False, traffic=read) == found[4:]
    few = [PromptSource(traffic=store, limit=3)]
    assert len(choose_fresh(few, set(), 100, every_prompt=True, traffic=read)) == 3


def test_old_traffic_is_left_out(store: str, tiny_config: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TrafficPrompts(tiny_config).read
    assert len(list(read(PromptSource(traffic=store, days=2)))) >= 12
    monkeypatch.setattr("jobs.traffic_prompts.time", SimpleNamespace(time=lambda: time.time() + 3 * 86_400))
    assert list(read(PromptSource(traffic=store, days=2))) == []
    assert len(list(read(PromptSource(traffic=store)))) >= 12


def test_what_cannot_be_read_back_is_left_out(store: str, tiny_config: TargetConfig, tmp_path: Path) -> None:
    strict = tiny_config.model_copy(update={"system_prompt": "Be brief."})
    assert list(TrafficPrompts(strict).read(PromptSource(traffic=store))) == []
    other = tiny_config.model_copy(update={"target": "elsewhere/other"})
    assert list(TrafficPrompts(other).read(PromptSource(traffic=store))) == []
    assert list(TrafficPrompts(tiny_config).read(PromptSource(traffic=str(tmp_path / "nothing")))) == []


def test_other_jobs_refuse_it(store: str) -> None:
    with pytest.raises(PromptError, match="for retraining only"):
        list(read_sources([PromptSource(traffic=store)]))
