"""Which prompts a retraining run asks: unseen, held out, in an order that stays put."""

import json
from pathlib import Path

from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import Prompt, is_held_out, prompt_hash, read_prompts
from jobs.fresh_prompts import asked_before, choose_fresh, count_unlearned, last_training, write_prompts


def sources(folder: Path, count: int) -> list[PromptSource]:
    rows = [{"id": f"p{number}", "task": "t", "turns": [f"Count to {number}."]} for number in range(count)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return [PromptSource(path=str(path))]


def test_held_out_prompts_only_in_the_order_of_their_hashes(tmp_path: Path) -> None:
    found = choose_fresh(sources(tmp_path, 100), set(), 1000, every_prompt=False)
    assert 5 < len(found) < 40 and all(is_held_out(prompt.turns) for prompt in found)
    assert [prompt_hash(prompt.turns) for prompt in found] == sorted(prompt_hash(prompt.turns) for prompt in found)
    assert len(choose_fresh(sources(tmp_path, 100), set(), 1000, every_prompt=True)) == 100


def test_what_was_asked_is_not_asked_again_and_more_sources_do_not_reshuffle(tmp_path: Path) -> None:
    first = choose_fresh(sources(tmp_path, 100), set(), 5, every_prompt=True)
    asked = {prompt_hash(prompt.turns) for prompt in first}
    second = choose_fresh(sources(tmp_path, 200), asked, 195, every_prompt=True)
    assert len(second) == 195 and not asked & {prompt_hash(prompt.turns) for prompt in second}
    everything = asked | {prompt_hash(prompt.turns) for prompt in second}
    assert choose_fresh(sources(tmp_path, 200), everything, 5, every_prompt=True) == []


def test_only_finished_collections_count_as_asked(tmp_path: Path) -> None:
    prompts = [Prompt("a", "t", ("One.",)), Prompt("b", "t", ("Two é.",))]
    for run, prompt in zip(("done", "cut"), prompts, strict=True):
        (tmp_path / run).mkdir()
        write_prompts(tmp_path / run / "prompts.jsonl", [prompt])
    assert read_prompts(tmp_path / "cut" / "prompts.jsonl") == [prompts[1]]
    (tmp_path / "done" / "2-collect.json").write_text("{}")
    assert asked_before(tmp_path) == {prompt_hash(("One.",))}


def test_what_a_failed_run_has_collected_is_still_new(tmp_path: Path) -> None:
    prompts = [Prompt("a", "t", ("One.",)), Prompt("b", "t", ("Two.",))]
    first = {"2-collect": (1, 2), "3-compact": (2, 3), "4-train": (3, 4), "5-evaluate": (4, 4), "6-decide": (4, 4)}
    steps = {"1": first, "2": {"2-collect": (5, 6)}, "3": {"2-collect": (7, 8)}}
    for run, records in steps.items():
        (tmp_path / run).mkdir()
        write_prompts(tmp_path / run / "prompts.jsonl", prompts)
        for name, (started, finished) in records.items():
            record = {"started_at": started, "finished_at": finished}
            (tmp_path / run / f"{name}.json").write_text(json.dumps(record))
    assert count_unlearned(tmp_path) == 4
    (tmp_path / "3" / "3-compact.json").write_text(json.dumps({"started_at": 8, "finished_at": 9}))
    (tmp_path / "3" / "4-train.json").write_text(json.dumps({"started_at": 12, "finished_at": 13}))  # a second start
    (tmp_path / "3" / "5-evaluate.json").write_text(json.dumps({"result": {}}))
    assert count_unlearned(tmp_path) == 4 and last_training(tmp_path) == 3  # trained, but never judged
    (tmp_path / "3" / "5-evaluate.json").write_text(json.dumps({"ends": {"outcome": "kept v1"}}))
    assert count_unlearned(tmp_path) == 0 and last_training(tmp_path) == 9
    (tmp_path / "3" / "5-evaluate.json").unlink()
    (tmp_path / "3" / "6-decide.json").write_text(json.dumps({"result": {}}))
    assert count_unlearned(tmp_path) == 0
    (tmp_path / "3" / "prompts.jsonl").unlink()
    assert asked_before(tmp_path) == {prompt_hash(prompt.turns) for prompt in prompts}
