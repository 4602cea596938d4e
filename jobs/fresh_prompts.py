"""Fresh prompts: what a retraining run asks that no run before it has asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import Prompt, is_held_out, prompt_hash
from jobs.out_file import write_aside
from jobs.prompt_reader import FileSystem, TrafficReader, read_sources


def choose_fresh(
    sources: Sequence[PromptSource],
    asked: set[str],
    count: int,
    *,
    every_prompt: bool,
    hub: FileSystem | None = None,
    traffic: TrafficReader | None = None,
) -> list[Prompt]:
    """Return up to `count` prompts whose hash is not in `asked`, in the order of their hashes.

    The order is that of a shuffle which stays the same as sources grow. Prompts that a drafter of ours may be trained
    on are left out unless `every_prompt`: what it drafts for them says nothing about new text.

    Raises:
        PromptError: a source cannot be read.
    """
    found: dict[str, Prompt] = {}
    for prompt in read_sources(sources, hub, traffic):
        if isinstance(prompt, Prompt) and (every_prompt or is_held_out(prompt.turns)):
            found.setdefault(prompt_hash(prompt.turns), prompt)
    fresh = [found[key] for key in sorted(found) if key not in asked]
    return fresh[:count]


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write a prompt file, aside and then in one step."""
    lines = [json.dumps({"id": prompt.id, "task": prompt.task, "turns": list(prompt.turns)}) for prompt in prompts]
    write_aside(path, "".join(line + "\n" for line in lines))


def count_unlearned(runs: Path) -> int:
    """How many prompts earlier runs have asked since the last training began whose policy was judged.

    A run that failed between its collection and the gate leaves rounds that nobody has gained by, and prompts that are
    not asked again.
    """
    last = last_training(runs)
    collected = [record for record in runs.glob("*/2-collect.json") if _moment(record, "finished_at") > last]
    return sum(len(_turns(record.parent / "prompts.jsonl")) for record in collected)


def last_training(runs: Path) -> float:
    """Since when there may be rounds that no policy was trained on and judged, in seconds since 1970; 0.0: since ever.

    A training takes what is there when it first begins, which is when the step before it has ended; the start that its
    own record names may be a later one.
    """
    before = [record for record in runs.glob("*/3-compact.json") if _is_judged(record.parent)]
    return max((_moment(record, "finished_at") for record in before), default=0.0)


def asked_before(runs: Path) -> set[str]:
    """Hashes of the prompts that the finished collections of earlier runs asked, from their own prompt files."""
    asked = set()
    for record in runs.glob("*/2-collect.json"):
        asked |= {prompt_hash(turns) for turns in _turns(record.parent / "prompts.jsonl")}
    return asked


def _is_judged(run: Path) -> bool:
    """Whether the gate has decided on what the run has trained, or found that there was nothing to decide."""
    evaluated = run / "5-evaluate.json"
    return (run / "6-decide.json").exists() or (evaluated.exists() and "ends" in _read(evaluated))


def _moment(record: Path, name: str) -> float:
    moment: float = _read(record).get(name, 0.0)
    return moment


def _read(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found


def _turns(prompts: Path) -> list[list[str]]:
    """The turns of each prompt of a file as `write_prompts` writes it; none where somebody has deleted it."""
    if not prompts.exists():
        return []
    return [json.loads(line)["turns"] for line in prompts.read_text(encoding="utf-8").splitlines()]
