"""Unit: some tens of prompts that are decoded, written and committed together; and the plan, which cuts a run into
units.

The plan is a function of the run's identity and its prompts alone, so a run that was killed finds its own units again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from graft_dist.prompts import BadPrompt, Prompt, prompt_hash
from jobs.decode_spec import DecodeSpec, digest


@dataclass(frozen=True)
class WorkItem:
    """One sequence to decode: a prompt, and which of its samples. An item with an `error` is recorded, not decoded."""

    sequence_id: str
    prompt_id: str
    task: str
    turns: tuple[str, ...]
    sample_index: int
    seed: int | None  # None for greedy decoding
    error: str | None = None


@dataclass(frozen=True)
class Unit:
    """A deterministic piece of a run; `unit_id` hashes the run's identity and the items' contents."""

    unit_id: str
    items: tuple[WorkItem, ...]

    def __len__(self) -> int:
        return len(self.items)


def plan(
    prompts: Sequence[Prompt | BadPrompt],
    spec: DecodeSpec,
    identity: str,
    unit_size: int,
    done: Collection[str] = frozenset(),
) -> list[Unit]:
    """Cut `prompts` x `spec.num_samples` into units of `unit_size` sequences, in file order.

    Sequences whose ids are in `done` are left out before cutting. Since units are committed whole, what a killed run
    has left is cut as it was before; and with prompts added to a file, or another unit size, nothing is decoded twice.

    """
    if unit_size < 1:
        raise ValueError(f"unit_size is {unit_size}; it must be at least 1")
    items = [item for item in _items(prompts, spec, identity) if item.sequence_id not in done]
    groups = [tuple(items[start : start + unit_size]) for start in range(0, len(items), unit_size)]
    return [Unit(digest([identity, *(item.sequence_id for item in group)]), group) for group in groups]


def _items(prompts: Sequence[Prompt | BadPrompt], spec: DecodeSpec, identity: str) -> Iterator[WorkItem]:
    for prompt in prompts:
        if isinstance(prompt, BadPrompt):
            sequence_id = digest([identity, prompt.id, "line", prompt.line_number, prompt.error])
            yield WorkItem(sequence_id, prompt.id, "", (), 0, None, prompt.error)
            continue
        content = prompt_hash(prompt.turns)
        for sample in range(spec.num_samples):
            sequence_id = digest([identity, prompt.id, content, sample])
            seed = None if spec.sampling.is_greedy else sampling_seed(spec.seed, content, sample)
            yield WorkItem(sequence_id, prompt.id, prompt.task, prompt.turns, sample, seed)


def sampling_seed(seed: int, prompt_digest: str, sample_index: int) -> int:
    """The seed of one sampled answer, below 2**31; the same for every method, so that texts can be compared."""
    hashed = hashlib.sha256(f"{seed}:{prompt_digest}:{sample_index}".encode()).digest()
    return int.from_bytes(hashed[:4], "big") >> 1
