"""The configuration of one target model: `TargetConfig`, read from one YAML file.

Owns the keys, their defaults and the sentences that refuse what cannot work. It is data only: nothing here loads a
model, looks at the hardware or reads the environment. docs/configuration.md shows every key with an example.
"""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from graft_dist.errors import ConfigError
from graft_dist.prompt_source import PromptSource
from graft_dist.retraining import DriftRule, Retraining
from graft_dist.schedule import Schedule

BUILTIN_TARGETS = ("builtin:smollm2-135m",)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MODEL_SPEC = (
    f"one of {', '.join(BUILTIN_TARGETS)}, a Hugging Face id such as Qwen/Qwen3-8B, "
    "or a folder written with a leading /, ./ or ../"
)

# The description of each field is what an error message offers after "allowed is".
ModelSpec = Annotated[str, Field(description=_MODEL_SPEC)]
Revision = Annotated[
    str | None, Field(min_length=1, description="a branch, tag or commit of a Hugging Face repository")
]
Budget = Annotated[int, Field(strict=True, ge=0, le=4096)]


class Resources(BaseModel):
    """What Ray reserves for each collection actor, and how many of them run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_cpus: Annotated[float, Field(ge=0, le=1024, allow_inf_nan=False, description="a number from 0 to 1024")] = 1.0
    num_gpus: Annotated[float, Field(ge=0, le=64, allow_inf_nan=False, description="a number from 0 to 64")] = 0.0
    num_actors: Annotated[int, Field(ge=1, le=4096, description="a whole number from 1 to 4096")] = 1


class TargetConfig(BaseModel):
    """Everything that depends on the target model: which model and drafter, how they are loaded, how much they may use.

    Frozen; a changed copy is made with `model_copy(update=...)`. Raises `pydantic.ValidationError` when built directly;
    `load_config` turns that into a `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # The model that decides every token, and the drafter that proposes them.
    target: ModelSpec
    revision: Revision = None
    drafter: ModelSpec
    drafter_revision: Revision = None
    trust_remote_code: Annotated[bool, Field(description="true or false")] = False

    # How both are loaded.
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Field(description="auto, float32 or bfloat16")] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto, cpu or cuda")] = "auto"
    threads: Annotated[
        int | None, Field(ge=1, le=1024, description="a whole number of CPU threads from 1 to 1024, or null")
    ] = None

    # How a prompt becomes token ids.
    system_prompt: Annotated[str | None, Field(description="a text, or null for the chat template's own")] = None
    enable_thinking: Annotated[
        bool | None, Field(description="true, false, or null where the chat template has no such switch")
    ] = None

    # What one engine holds.
    max_length: Annotated[
        int, Field(ge=16, le=1_048_576, description="a whole number of tokens from 16 to 1048576 (prompt and output)")
    ] = 2048
    max_slots: Annotated[int, Field(ge=1, le=1024, description="a whole number from 1 to 1024")] = 8
    memory_limit_gb: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="a number of gigabytes above 0, or null"),
    ] = None

    # How draft trees are built where a command says nothing else.
    num_candidates: Annotated[int, Field(ge=1, le=256, description="a whole number from 1 to 256")] = 16
    budget: Annotated[int, Field(ge=0, le=4096, description="a whole number from 0 to 4096")] = 16
    budgets: Annotated[
        tuple[Budget, ...],
        Field(strict=False, min_length=1, description="a list of distinct whole numbers from 0 to 4096"),
    ] = (8, 16, 32, 64)

    resources: Annotated[Resources, Field(description="a mapping with the keys num_cpus, num_gpus and num_actors")] = (
        Resources()
    )
    # How its policy is trained again; null where nobody does so unattended.
    retrain: Annotated[
        Retraining | None, Field(description="a mapping with the key prompts and the others of a retraining, or null")
    ] = None
    # When the target is trained again; null where nobody does so on a schedule.
    schedule: Annotated[
        Schedule | None, Field(description="a mapping with the key cron and the others of a schedule, or null")
    ] = None

    @field_validator("target", "drafter")
    @classmethod
    def _check_spec(cls, spec: str) -> str:
        if spec.startswith("builtin:"):
            known = spec in BUILTIN_TARGETS
        else:
            known = is_folder_spec(spec) or _HUB_ID.fullmatch(spec) is not None
        if not known:
            raise ValueError(f"allowed is {_MODEL_SPEC}")
        return spec

    @field_validator("budgets", mode="after")
    @classmethod
    def _check_budgets(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(budgets)) != len(budgets):
            raise ValueError("allowed is a list of distinct whole numbers from 0 to 4096")
        return budgets

    @model_validator(mode="after")
    def _check_together(self) -> "TargetConfig":
        for key, spec in (("revision", self.target), ("drafter_revision", self.drafter)):
            if getattr(self, key) is not None and (spec.startswith("builtin:") or is_folder_spec(spec)):
                raise ValueError(f"{key} is {getattr(self, key)!r}, but {spec} has no revisions: only a hub id has")
        largest = max(self.budget, *self.budgets)
        if largest >= self.max_length:
            raise ValueError(f"a budget of {largest} does not fit max_length {self.max_length}: it has to be smaller")
        if self.device == "cuda" and self.resources.num_gpus == 0:
            raise ValueError(
                "device is cuda, but resources.num_gpus is 0: Ray hides the GPUs from an actor without one"
            )
        if self.device == "cpu" and self.resources.num_gpus > 0:
            raise ValueError(
                f"resources.num_gpus is {self.resources.num_gpus:g}, but device is cpu: nobody would use the GPUs"
            )
        return self

    @property
    def slug(self) -> str:
        """The target's name where only a plain word fits: partition values, registry names, file names.

        `builtin:smollm2-135m` gives `smollm2-135m`; `Qwen/Qwen3-8B` gives `Qwen--Qwen3-8B` (a hub id never holds `--`,
        so the id can be read back); the folder `./models/my model` gives `folder--my-model`.
        """
        if self.target.startswith("builtin:"):
            return self.target.removeprefix("builtin:")
        if is_folder_spec(self.target):
            name = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(self.target).resolve().name).strip("-.")
            return f"folder--{name or 'root'}"
        return self.target.replace("/", "--")


def is_folder_spec(spec: str) -> bool:
    """Whether a model specification means a local folder: it starts with `/`, `./` or `../`, or is `.` or `..`."""
    return spec.startswith(("/", "./", "../")) or spec in (".", "..")


def targets_folder() -> Path:
    """The folder with the configurations that ship with the project, beside the package."""
    return Path(__file__).resolve().parent.parent / "targets"


def load_config(path: str | Path) -> TargetConfig:
    """Read a target's YAML file; a bare name such as `smollm2-135m` means one of the shipped files.

    Raises `ConfigError` with one sentence that names the file, the key, the value and what is allowed.
    """
    file = _find_file(path)
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds {_shown(content)}, allowed is a mapping of keys to values")
    try:
        return TargetConfig.model_validate(content)
    except ValidationError as error:
        reasons = "; ".join(_sentence(detail) for detail in error.errors(include_url=False))
        raise ConfigError(f"{path}: {reasons}") from error


def _find_file(path: str | Path) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file
    shipped = sorted(targets_folder().glob("*.yaml"))
    for candidate in shipped:
        if str(path) == candidate.stem:
            return candidate
    names = ", ".join(candidate.stem for candidate in shipped)
    raise ConfigError(f"{path}: no such file, and not one of the shipped targets ({names})")


def _sentence(detail: ErrorDetails) -> str:
    """One of pydantic's error entries as "key: what is wrong, allowed is ..."."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggestion(location)}"
    if detail["type"] == "missing":
        return f"the key {key} is missing, allowed is {_allowed(location)}"
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{key} is {_shown(detail['input'])}, {message}" if key else message
    return f"{key} is {_shown(detail['input'])}, allowed is {_allowed(location)}"


_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    ("resources",): Resources,
    ("schedule",): Schedule,
    ("retrain",): Retraining,
    ("retrain", "prompts"): PromptSource,
    ("retrain", "drift"): DriftRule,
}


def _model_at(location: list[str]) -> tuple[type[BaseModel], str]:
    """The model and the field name that a pydantic error location points at; list indices belong to their field."""
    names = [part for part in location if not part.isdigit()]
    for length in range(len(names) - 1, 0, -1):
        if tuple(names[:length]) in _SECTIONS:
            return _SECTIONS[tuple(names[:length])], names[length]
    return TargetConfig, names[0]


def _allowed(location: list[str]) -> str:
    model, name = _model_at(location)
    return model.model_fields[name].description or ""


def _suggestion(location: list[str]) -> str:
    model, name = _model_at(location)
    close = difflib.get_close_matches(name, model.model_fields, n=1)
    if close:
        return f", did you mean {close[0]}?"
    return f", allowed are {', '.join(model.model_fields)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key that stands twice is an error instead of a silent override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                problem = f"the key {key_node.value} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep=deep)
