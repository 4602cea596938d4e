"""Where prompts come from: files, globs, Parquet, a data set of the Hugging Face hub, or recorded traffic, described by
plain data.

Only the description and the way from a row to a prompt; reading is `jobs/prompt_reader.py`'s.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from graft_dist.errors import PromptError
from graft_dist.prompts import Prompt


class PromptSource(BaseModel):
    """One source. Exactly one of `path`, `hub` and `traffic` is given.

    A template is filled with a row's fields as `str.format` does: "{question}", "{prompt[0]}" for a list's first entry.
    Without `turns`, rows have the form of our own prompt files: `id`, `task`, `turns`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[
        str | None, Field(min_length=1, description="a .jsonl or .parquet file, or a pattern such as data/*.jsonl")
    ] = None
    hub: Annotated[
        str | None,
        Field(pattern=r"^[\w.-]+/[\w.-]+$", description="the id of a Hugging Face data set, such as openai/gsm8k"),
    ] = None
    revision: Annotated[str, Field(min_length=1, description="a branch, tag or commit of the data set")] = "main"
    files: Annotated[
        str | None,
        Field(
            min_length=1,
            description="a pattern of the data set's files, such as main/test-*.parquet, or null for all",
        ),
    ] = None
    traffic: Annotated[
        str | None,
        Field(min_length=1, description="the root of a trajectory store with what users have asked of this target"),
    ] = None
    days: Annotated[int | None, Field(ge=1, description="a whole number of days from 1 on, or null for all")] = None
    turns: Annotated[
        tuple[str, ...] | None,
        Field(strict=False, min_length=1, description='a list of templates, such as ["{question}"]'),
    ] = None
    id: Annotated[str, Field(min_length=1, description="a template; {index} is the row's number, from 0")] = "{index}"
    task: Annotated[str, Field(min_length=1, description="a text: what the prompts are counted under")] = "other"
    limit: Annotated[int | None, Field(ge=1, description="a whole number from 1 on, or null")] = None

    @field_validator("turns", "id")
    @classmethod
    def _check_templates(cls, value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for template in (value,) if isinstance(value, str) else value or ():
            list(string.Formatter().parse(template))  # raises ValueError for braces that do not match
            for field in _fields(template):
                if "." in field:
                    raise ValueError(f"the template {template!r} reads an attribute; allowed are {{name}}, {{name[0]}}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> PromptSource:
        if sum(place is not None for place in (self.path, self.hub, self.traffic)) != 1:
            raise ValueError("a prompt source needs one of path, hub and traffic, and only one")
        if self.files is not None and self.hub is None:
            raise ValueError("files goes with hub: a pattern of the data set's files")
        if self.days is not None and self.traffic is None:
            raise ValueError("days goes with traffic: how old it may be")
        if self.turns is not None and self.traffic is not None:
            raise ValueError("turns does not go with traffic, which holds the users' messages themselves")
        return self

    @property
    def name(self) -> str:
        """What messages call it."""
        hub = self.hub if self.files is None else f"{self.hub}:{self.files}"
        return self.path or self.traffic or str(hub)

    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        """Return the prompt of a row with foreign fields, by the templates.

        Raises:
            PromptError: a field is missing, or a text is empty.
        """
        assert self.turns is not None
        turns = tuple(self._filled(template, row, index) for template in self.turns)
        if not all(turn.strip() for turn in turns):
            raise PromptError(f"row {index} of {self.name} gives an empty turn")
        return Prompt(self._filled(self.id, {**row, "index": index}, index), self.task, turns)

    def _filled(self, template: str, row: Mapping[str, Any], index: int) -> str:
        try:
            return template.format_map(row)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            fields = ", ".join(sorted(map(str, row)))
            raise PromptError(
                f"row {index} of {self.name} does not fill the template {template!r} ({error!r}); it has {fields}"
            ) from error


def _fields(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
