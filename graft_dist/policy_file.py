"""The two files of a saved policy: `policy.json` and, where the policy has a learned edge scorer, `scorer.safetensors`.

Owns the schema of the JSON and its refusals; what a policy means is in `policy.py`. Everything is plain JSON numbers
and safetensors: loading runs no code. Folders are written aside and renamed, so that one under its name is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from safetensors import safe_open
from safetensors.torch import save

from graft_dist.budget import (
    AcceptanceGain,
    Calibration,
    Form,
    GainModel,
    PiecewiseCalibration,
    PowerGain,
    RawProbabilities,
    StateCalibration,
)
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import Reading, TdesConfig, TdesNetwork
from graft_dist.errors import PolicyError, PolicyUnreadableError

SCHEMA_VERSION = 1
JSON_NAME = "policy.json"
TENSORS_NAME = "scorer.safetensors"

Weights = tuple[float, float, float, float]


class _Part(BaseModel):
    """JSON arrays become tuples; anything else must have its own type, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RawPart(_Part):
    """`RawProbabilities`."""

    kind: Literal["raw"] = "raw"

    def build(self) -> Calibration:
        return RawProbabilities()


class PiecewisePart(_Part):
    """`PiecewiseCalibration`."""

    kind: Literal["piecewise"] = "piecewise"
    scores: tuple[float, ...]
    chances: tuple[float, ...]

    def build(self) -> Calibration:
        return PiecewiseCalibration(self.scores, self.chances)


class StatePart(_Part):
    """`StateCalibration`."""

    kind: Literal["state"] = "state"
    weights: tuple[float, float, float]
    scores: tuple[float, ...]
    chances: tuple[float, ...]
    first_hist: float

    def build(self) -> Calibration:
        return StateCalibration(self.weights, self.scores, self.chances, self.first_hist)


class AcceptancePart(_Part):
    """`AcceptanceGain`."""

    kind: Literal["acceptance"] = "acceptance"
    calibration: Annotated[RawPart | PiecewisePart | StatePart, Field(discriminator="kind")]

    def build(self) -> GainModel:
        return AcceptanceGain(self.calibration.build())


class PowerPart(_Part):
    """`PowerGain`."""

    kind: Literal["power"] = "power"
    a_weights: Weights
    beta_weights: Weights
    first_hist: float

    def build(self) -> GainModel:
        return PowerGain(self.a_weights, self.beta_weights, self.first_hist)


class CostPart(_Part):
    """`CostCurve`."""

    budgets: tuple[int, ...]
    round_ms: tuple[float, ...]
    source: str
    token_ms: float = 0.0

    def build(self) -> CostCurve:
        return CostCurve(self.budgets, self.round_ms, self.source, self.token_ms)


class ScorerPart(_Part):
    """`TdesConfig` and how its f is read."""

    embedding_size: int
    draft_depth: int
    width: int
    projection_size: int
    depth_size: int
    gate_rank: int
    hidden_size: int
    embedding_rms: float
    hidden_rms: float
    reliance: bool
    reading: Reading
    sha256: str

    def build(self) -> TdesConfig:
        return TdesConfig(**self.model_dump(exclude={"reading", "sha256"}))


class DataPart(_Part):
    """What a policy was fitted on; enough to find it again."""

    store: str  # the snapshot's name: "sequences@12+rounds@12"
    run_ids: tuple[str, ...]
    num_shards: int
    num_sequences: int
    num_decoded_rounds: int
    num_dense_rounds: int
    num_held_out_rounds: int
    cost_run_ids: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_unknown_runs(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Older policies do not have these runs, and have to keep their text, whose hash names them."""
        content: dict[str, Any] = dump(self)
        if not self.cost_run_ids:
            del content["cost_run_ids"]
        return content


class PolicyPart(_Part):
    """The whole of `policy.json`."""

    schema_version: int
    slug: str
    target_fingerprint: str
    drafter_fingerprint: str
    software: str
    scorer: ScorerPart | None
    kind: Literal["fixed", "saba", "marginal"]
    fixed_budget: int | None
    gain: Annotated[AcceptancePart | PowerPart, Field(discriminator="kind")] | None
    form: Form
    num_candidates: int
    max_budget: int
    cost_curves: dict[str, CostPart]
    data: DataPart
    metrics: dict[str, float]


def gain_part(gain: GainModel) -> AcceptancePart | PowerPart:
    """Return a gain model as JSON has it. Raises PolicyError for one that no file can hold."""
    if isinstance(gain, PowerGain):
        return PowerPart(a_weights=gain.a_weights, beta_weights=gain.beta_weights, first_hist=gain.first_hist)
    if isinstance(gain, AcceptanceGain):
        return AcceptancePart(calibration=_calibration_part(gain.calibration))
    raise PolicyError(f"a policy cannot keep a gain of type {type(gain).__name__}")


def _calibration_part(calibration: Calibration) -> RawPart | PiecewisePart | StatePart:
    if isinstance(calibration, RawProbabilities):
        return RawPart()
    if isinstance(calibration, PiecewiseCalibration):
        return PiecewisePart(scores=calibration.scores, chances=calibration.chances)
    if isinstance(calibration, StateCalibration):
        return StatePart(
            weights=calibration.weights,
            scores=calibration.scores,
            chances=calibration.chances,
            first_hist=calibration.first_hist,
        )
    raise PolicyError(f"a policy cannot keep a calibration of type {type(calibration).__name__}")


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names, shapes and float32 values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def write_folder(folder: Path, part: PolicyPart, tensors: Mapping[str, torch.Tensor] | None) -> None:
    """Write both files to `folder`, aside first, then renamed over what was there."""
    aside = folder.with_name(folder.name + ".writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        if tensors is not None:
            kept = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in tensors.items()}
            # Not `save_file`, whose files only their owner may read.
            (aside / TENSORS_NAME).write_bytes(save(kept, metadata={"format": "pt"}))
        (aside / JSON_NAME).write_text(to_json(part), encoding="utf-8")
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)  # not deleted in place: a process that is killed now leaves both, whole
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise PolicyError(f"the policy cannot be written to {folder} ({' '.join(str(error).split())})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def to_json(part: PolicyPart) -> str:
    """Return `policy.json`: the same text for the same content."""
    return json.dumps(part.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_folder(folder: Path) -> tuple[PolicyPart, TdesNetwork | None]:
    """Read and check both files.

    Raises:
        PolicyError: one sentence, for anything missing, broken, unknown, misshapen or not finite.
    """
    part = _read_json(folder)
    tensors_file = folder / TENSORS_NAME
    if part.scorer is None:
        if tensors_file.exists():
            raise PolicyError(f"{folder} holds a {TENSORS_NAME}, but its {JSON_NAME} knows of no scorer")
        return part, None
    network = TdesNetwork(part.scorer.build())
    tensors = _read_tensors(tensors_file)
    _check_tensors(tensors, network, folder)
    if tensors_sha256(tensors) != part.scorer.sha256:
        raise PolicyError(f"the {TENSORS_NAME} in {folder} is not the one that its {JSON_NAME} was written with")
    network.load_state_dict(tensors)
    return part, network.requires_grad_(False)


def _read_json(folder: Path) -> PolicyPart:
    file = folder / JSON_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise PolicyUnreadableError(f"{folder} holds no {JSON_NAME}, so it is not a saved policy") from None
    except OSError as error:
        raise PolicyUnreadableError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:  # such as one that is still being copied
        raise PolicyUnreadableError(f"{file} cannot be read as JSON ({' '.join(str(error).split())})") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise PolicyError(f"{file} has schema version {version!r}; this program reads version {SCHEMA_VERSION} only")
    try:
        # From JSON again: lists are arrays there, and become tuples, while a number is never taken from a text.
        return PolicyPart.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "its content"
        raise PolicyError(f"{file}: {where} is wrong ({first['msg'].rstrip('.')})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise PolicyUnreadableError(f"{file} is missing") from None
    except Exception as error:  # safetensors has an exception type for each way of being broken
        raise PolicyUnreadableError(f"{file} cannot be read as safetensors ({' '.join(str(error).split())})") from error


def _check_tensors(tensors: Mapping[str, torch.Tensor], network: TdesNetwork, folder: Path) -> None:
    wanted: dict[str, Any] = network.state_dict()
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in wanted]
    shared = [name for name in wanted if name in tensors]
    problems += [
        f"{name} is {list(tensors[name].shape)} where the configuration gives {list(wanted[name].shape)}"
        for name in shared
        if tensors[name].shape != wanted[name].shape
    ]
    problems += [f"{name} holds values that are not finite" for name in shared if not tensors[name].isfinite().all()]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise PolicyError(
            f"the {TENSORS_NAME} in {folder} does not fit its {JSON_NAME}: {'; '.join(problems[:3])}{more}"
        )
