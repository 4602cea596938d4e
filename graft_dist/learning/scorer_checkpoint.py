"""Checkpoints of a TDES fit: a JSON file and the tensors it names, written aside and renamed, nothing pickled.

The JSON comes last, so that one that can be read belongs to tensors that are whole. A checkpoint carries the identity
of its run and is refused by another.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from graft_dist.errors import PolicyError
from graft_dist.learning.tdes import Evaluation, TdesTrainer

_INDEX = "state.json"


class ScorerCheckpoint:
    """The newest state of one run in `folder`; `identity` is what may not differ when it is resumed."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder, self._identity = folder, identity

    def save(self, trainer: TdesTrainer) -> None:
        """Write the trainer's state over the last one. Only one process may do so."""
        self._folder.mkdir(parents=True, exist_ok=True)
        state = trainer.state()
        name = f"state-{state['step']}.safetensors"
        _save(_flat(state), self._folder / name)
        known = {key: state[key] for key in ("step", "evaluations")}
        _write(self._folder / _INDEX, {**known, "file": name, "identity": self._identity, "is_done": trainer.is_done})
        for old in self._folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    def load(self, trainer: TdesTrainer) -> bool:
        """Put the last state into the trainer; False where there is none.

        Raises:
            PolicyError: the state belongs to another run, or cannot be read.
        """
        index = self._index()
        if index is None:
            return False
        tensors = self._tensors(index["file"])
        optimizer = trainer.state()["optimizer"]
        optimizer["state"] = _optimizer_state(tensors)
        trainer.load_state(
            {
                "step": index["step"],
                "evaluations": index["evaluations"],
                "network": _under("network", tensors),
                "best": _under("best", tensors),
                "optimizer": optimizer,
            }
        )
        return True

    def result(self) -> tuple[dict[str, torch.Tensor], tuple[Evaluation, ...]] | None:
        """The best weights and all looks of a run that is done; None of one that is not."""
        index = self._index()
        if index is None or not index["is_done"]:
            return None
        tensors = self._tensors(index["file"])
        return _under("best", tensors), tuple(Evaluation(*look) for look in index["evaluations"])

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return load_file(self._folder / name)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"the checkpoint {self._folder / name} cannot be read ({error})") from error

    def _index(self) -> dict[str, Any] | None:
        try:
            index: dict[str, Any] = json.loads((self._folder / _INDEX).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise PolicyError(f"the checkpoint in {self._folder} cannot be read ({error})") from error
        if index["identity"] != self._identity:
            raise PolicyError(
                f"{self._folder} holds a fit with other settings or other data; choose another --out folder"
            )
        return index


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {f"{part}.{name}": value for part in ("network", "best") for name, value in state[part].items()}
    for key, entries in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.{key}.{name}": torch.as_tensor(value) for name, value in entries.items()}
    # `best` may share memory with `network`, which safetensors refuses.
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def _under(part: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}


def _optimizer_state(tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _under("optimizer", tensors).items():
        key, entry = name.split(".", 1)
        states.setdefault(int(key), {})[entry] = value
    return states


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    aside = path.with_name(f".{path.name}.writing")
    save_file(tensors, aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())  # before the index names it
    aside.replace(path)


def _write(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
