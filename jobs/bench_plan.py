"""What a whole benchmark measures: targets, prompts, methods, temperatures and batches, read from one YAML file.

Owns the keys and their refusals, the prompts that a plan names, and the tables ("cells") that it asks for. Budgets are
chosen on the plan's `tuning` prompts, never on those that are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from graft_dist.bench import BASELINE, ORACLE, PEERS
from graft_dist.config import TargetConfig
from graft_dist.errors import ConfigError, PromptError
from graft_dist.policy import ALL_METHODS
from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import BadPrompt, Prompt, is_held_out, prompt_hash
from jobs.prompt_reader import FileSystem, read_sources

Group = tuple[Prompt, ...]
"""Prompts of one task that are decoded together: the work item of a benchmark."""

BUDGETED_METHODS = ("ddtree", "graft-fixed")
"""Methods whose budget is somebody's choice."""

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Cell:
    """What all arms of one table share."""

    temperature: float
    batch: int  # prompts decoded together

    @property
    def name(self) -> str:
        """The folder of its rows, such as t0-b16."""
        return f"t{self.temperature:g}-b{self.batch}"

    @property
    def is_alone_and_greedy(self) -> bool:
        """Whether transformers' own methods can take part."""
        return self.temperature == 0 and self.batch == 1


class BenchPlan(BaseModel):
    """The keys of a plan. A relative path of a source starts at the plan's own folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    targets: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]  # configurations: names or files
    prompts: Annotated[tuple[PromptSource, ...], Field(strict=False, min_length=1)]  # that are measured
    held_out: bool = False  # measure only the fifth that no drafter of ours is trained on, tune on the rest
    tuning: Annotated[tuple[PromptSource, ...], Field(strict=False)] = ()  # budgets are chosen on these
    methods: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    budgets: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    all_budgets: Annotated[tuple[str, ...], Field(strict=False)] = ()  # methods measured at every one, frozen or not
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)] = (0.0,)
    batches: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (1,)
    max_new_tokens: Count = 128
    seed: int = 0
    warmup: Annotated[int, Field(ge=0)] = 1  # groups that every arm decodes before measuring
    threads: Count | None = None  # instead of the targets' own
    policy: str | None = None  # as --policy of graft bench; {slug} stands for the target's

    @model_validator(mode="after")
    def _check_methods(self) -> BenchPlan:
        allowed = (*ALL_METHODS, ORACLE, *PEERS)
        unknown = [method for method in self.methods if method not in allowed]
        if unknown:
            raise ValueError(f"unknown method {unknown[0]!r}, allowed are {', '.join(allowed)}")
        if BASELINE not in self.methods:
            raise ValueError(f"speed is compared with plain decoding: add {BASELINE} to the methods")
        for method in self.all_budgets:
            if method not in BUDGETED_METHODS or method not in self.methods:
                raise ValueError(f"all_budgets has {method!r}, which is no method of this plan that takes a budget")
        return self

    def policy_of(self, config: TargetConfig) -> str | None:
        """The policy that a target's learned methods take; None: the one that ships for it."""
        return None if self.policy is None else self.policy.replace("{slug}", config.slug)

    @property
    def cells(self) -> list[Cell]:
        """The tables, the smallest batches first."""
        return [Cell(temperature, batch) for batch, temperature in product(self.batches, self.temperatures)]

    def methods_of(self, cell: Cell) -> list[str]:
        """The methods that can take part in a cell."""
        left_out = [] if cell.is_alone_and_greedy else [*PEERS]
        if cell.batch > 1:
            left_out.append(ORACLE)  # it reads one answer
        return [method for method in self.methods if method not in left_out]


def read_plan(path: Path) -> BenchPlan:
    """Read a plan. Raises `ConfigError` with one sentence."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        plan = BenchPlan.model_validate(content)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from error
    return plan.model_copy(
        update={key: tuple(_placed(source, path.parent) for source in getattr(plan, key)) for key in _SOURCES}
    )


_SOURCES = ("prompts", "tuning")


def _placed(source: PromptSource, folder: Path) -> PromptSource:
    if source.path is None or source.path.startswith("~"):
        return source
    return source.model_copy(update={"path": str(folder / source.path)})


def measured_prompts(plan: BenchPlan, hub: FileSystem | None = None) -> list[Prompt]:
    """The prompts that are measured; `hub` stands for the Hugging Face hub in tests."""
    return _read(plan.prompts, hub, lambda prompt: not plan.held_out or is_held_out(prompt.turns))


def tuning_prompts(plan: BenchPlan, measured: list[Prompt], hub: FileSystem | None = None) -> list[Prompt]:
    """The prompts that budgets are chosen on, without any that is measured."""
    taken = {prompt_hash(prompt.turns) for prompt in measured}

    def is_free(prompt: Prompt) -> bool:
        return prompt_hash(prompt.turns) not in taken and not (plan.held_out and is_held_out(prompt.turns))

    return _read(plan.tuning, hub, is_free) if plan.tuning else []


def _read(
    sources: tuple[PromptSource, ...], hub: FileSystem | None, is_wanted: Callable[[Prompt], bool]
) -> list[Prompt]:
    found = list(read_sources(sources, hub))
    bad = [prompt for prompt in found if isinstance(prompt, BadPrompt)]
    if bad:
        raise PromptError(f"{bad[0].id}: {bad[0].error}")
    wanted = [prompt for prompt in found if isinstance(prompt, Prompt) and is_wanted(prompt)]
    if not wanted:
        raise PromptError(f"no prompt is left of {', '.join(source.name for source in sources)}")
    return wanted


def first_of_each_task(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts of every task."""
    return [prompt for own in _by_task(prompts) for prompt in own[:limit]]


def grouped(prompts: list[Prompt], batch: int) -> list[Group]:
    """The work items; a task's last group is filled up with its first prompts, so that all are of one size."""
    groups: list[Group] = []
    for own in _by_task(prompts):
        num_groups = -(-len(own) // batch)
        endless = cycle(own)
        groups += [tuple(islice(endless, batch)) for _ in range(num_groups)]
    return groups


def _by_task(prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        yield [prompt for prompt in prompts if prompt.task == task]
