"""How a target's policy is trained anew, as its configuration says: prompts, places, what a challenger must show."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from graft_dist.prompt_source import PromptSource

_Path = Annotated[str, Field(min_length=1, description="a folder, or ~/folder")]
_Count = Annotated[int, Field(ge=1, le=10_000_000, description="a whole number from 1 to 10000000")]


class DriftRule(BaseModel):
    """When recent rounds are said to have drifted from those that the champion was trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    drop: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False, description="a share above 0 and below 1")] = 0.05
    min_rounds: _Count = 1000


class Retraining(BaseModel):
    """One retraining run: collect, compact, train, evaluate, promote or not, clean up."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompts: Annotated[
        tuple[PromptSource, ...],
        Field(strict=False, min_length=1, description="a list of sources, each with path, hub or traffic"),
    ]
    store: Annotated[str, Field(min_length=1, description="the root of the trajectory store")] = (
        "~/graft-dist/trajectories"
    )
    runs: _Path = "~/graft-dist/runs"
    tracking_uri: Annotated[
        str | None,
        Field(min_length=1, description="an MLflow tracking URI, or null for the environment's or local one"),
    ] = None

    # What is collected.
    num_prompts: _Count = 400
    max_new_tokens: _Count = 192
    explore: Annotated[
        tuple[Annotated[int, Field(ge=0, le=4096)], ...],
        Field(strict=False, min_length=2, description="a list of budgets from 0 to 4096, drawn from per round"),
    ] = (0, 4, 8, 16, 32, 64)
    dense: Annotated[bool, Field(description="true or false")] = True
    hidden: Annotated[int, Field(ge=0, le=4096, description="a whole number from 0, none, to 4096")] = 0
    drift: Annotated[DriftRule, Field(description="a mapping with the keys drop and min_rounds")] = DriftRule()
    min_new_sequences: Annotated[int, Field(ge=0, description="a whole number from 0 on")] = 1

    # How the challenger is trained, see jobs/train.py.
    every_prompt: Annotated[bool, Field(description="true or false")] = False
    num_workers: Annotated[int, Field(ge=0, le=1024, description="a whole number from 0, this process, to 1024")] = 0
    gate_rank: Annotated[int, Field(ge=0, le=1024, description="a whole number from 0, no gate, to 1024")] = 0
    steps: _Count = 600
    min_rounds: _Count = 1000

    # What the challenger has to show.
    margin: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="a share from 0 to 1")] = 0.01
    num_live_prompts: Annotated[int, Field(ge=0, le=10_000, description="a whole number from 0 to 10000")] = 12
    num_audit_prompts: Annotated[int, Field(ge=0, le=10_000, description="a whole number from 0 to 10000")] = 4

    # What is kept.
    keep_days: Annotated[int | None, Field(ge=1, description="a whole number of days from 1 on, or null")] = None

    @model_validator(mode="after")
    def _check_gate(self) -> Retraining:
        if self.gate_rank > 0 and self.hidden == 0:
            raise ValueError("gate_rank needs hidden: how many numbers are recorded of each hidden state")
        return self

    @field_validator("runs", mode="after")
    @classmethod
    def _check_runs(cls, place: str) -> str:
        if "://" in place:
            raise ValueError("allowed is a folder, or ~/folder, that all nodes see: not a URI")
        return place

    @field_validator("explore", mode="after")
    @classmethod
    def _check_explore(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(budgets)) != len(budgets) or sum(budget > 0 for budget in budgets) < 2:
            raise ValueError("allowed is a list of distinct budgets, two of them at least above 0")
        return budgets
