"""Fresh prompts: what a retraining run asks that no run before it has asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import Prompt, is_held_out, prompt_hash
from jobs.prompt_reader import FileSystem, read_sources


def choose_fresh(
    sources: Sequence[PromptSource], asked: set[str], count: int, *, every_prompt: bool, hub: FileSystem | None = None
) -> list[Prompt]:
    """Return up to `count` prompts whose hash is not in `asked`, in the order of their hashes.

    The order is that of a shuffle which stays the same as sources grow. Prompts that a drafter of ours may be trained
    on are left out unless `every_prompt`: what it drafts for them says nothing about new text.

    Raises:
        PromptError: a source cannot be read.
    """
    found: dict[str, Prompt] = {}
    for prompt in read_sources(sources, hub):
        if isinstance(prompt, Prompt) and (every_prompt or is_held_out(prompt.turns)):
            found.setdefault(prompt_hash(prompt.turns), prompt)
    fresh = [found[key] for key in sorted(found) if key not in asked]
    return fresh[:count]


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write a prompt file, aside and then in one step."""
    lines = [json.dumps({"id": prompt.id, "task": prompt.task, "turns": list(prompt.turns)}) for prompt in prompts]
    aside = path.with_name(path.name + ".writing")
    aside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    aside.replace(path)


def asked_before(runs: Path) -> set[str]:
    """Hashes of the prompts that the finished collections of earlier runs asked, from their own prompt files."""
    asked = set()
    for record in runs.glob("*/2-collect.json"):
        for line in (record.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
            asked.add(prompt_hash(json.loads(line)["turns"]))
    return asked
