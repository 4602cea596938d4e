"""What the folder of a learning run says of earlier starts, so that each start learns the same from the same rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft_dist.config import TargetConfig
from graft_dist.errors import ConfigError, StoreError
from jobs.out_file import to_json, write_aside
from jobs.provenance import provenance
from storage import TrajectoryStore
from storage.trajectories import Snapshot

_FILE = "run.json"


def config_settings(config: TargetConfig) -> dict[str, Any]:
    """What of a configuration decides what a run learns from a store: which models, and how prompts are read back."""
    names = ("target", "revision", "drafter", "drafter_revision", "system_prompt", "enable_thinking")
    return {name: getattr(config, name) for name in names}


class PinnedRun:
    """`run.json` in a run's folder: settings, snapshot, drafter, MLflow run, and where and how the run was begun."""

    def __init__(
        self,
        out: Path,
        store: TrajectoryStore,
        identity: str,
        settings: Mapping[str, Any],
        known: dict[str, Any] | None,
    ) -> None:
        self._out, self._store, self.identity, self._settings = out, store, identity, dict(settings)
        self.is_new = known is None
        self.versions = None if known is None else (known["sequences_version"], known["rounds_version"])
        self.run_id: str | None = None if known is None else known["run_id"]
        self._drafter: str | None = None if known is None else known.get("drafter_fingerprint")
        self._provenance = provenance() if known is None else known["provenance"]

    @classmethod
    def open(cls, out: Path, settings: Mapping[str, Any], root: str) -> PinnedRun:
        """Read the folder, which is made if it is not there. Refuses one of a run with other settings."""
        # The snapshot's versions say nothing without the store that they count in.
        store = TrajectoryStore(root)
        known_by = {**settings, "store": str(store.root)}
        identity = hashlib.sha256(json.dumps(known_by, sort_keys=True).encode()).hexdigest()[:16]
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder of the run {out} cannot be made ({error.strerror})") from error
        path = out / _FILE
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if known is not None and known["identity"] != identity:
            raise ConfigError(f"{out} holds a run with other settings; choose another --out folder")
        return cls(out, store, identity, settings, known)

    def check(self, drafter_fingerprint: str) -> None:
        """Refuse another drafter than the run was begun with, which had the same name. Raises ConfigError."""
        if self._drafter not in (None, drafter_fingerprint):
            raise ConfigError(
                f"{self._out} holds a run with drafter {self._drafter}, and the configuration's is now "
                f"{drafter_fingerprint}; choose another --out folder"
            )

    def keep(self, snapshot: Snapshot, drafter_fingerprint: str, run_id: str | None = None) -> None:
        """Write down what the next start goes on with, and keep its rows in the store until `release`.

        Raises:
            ConfigError: as `check`.
        """
        self.check(drafter_fingerprint)
        self.run_id = run_id
        known = {
            "identity": self.identity,
            "run_id": run_id,
            "drafter_fingerprint": drafter_fingerprint,
            "sequences_version": snapshot.sequences_version,
            "rounds_version": snapshot.rounds_version,
            "settings": self._settings,
            "provenance": self._provenance,
        }
        write_aside(self._out / _FILE, to_json(known))
        try:
            self._store.pin(self._pin, snapshot)
        except StoreError as error:  # such as a store that is mounted to be read: nobody can vacuum it from here either
            print(f"{error}: a vacuum from elsewhere may delete rows that were merged more than 24 h ago", flush=True)

    def release(self) -> None:
        """The run has ended: its rows need not be kept for it."""
        self._store.unpin(self._pin)

    @property
    def place(self) -> str:
        """A name that no other run has, be it one with the same settings in another folder."""
        folder = hashlib.sha256(str(self._out.resolve()).encode()).hexdigest()[:8]
        return f"{self.identity}-{folder}"

    @property
    def _pin(self) -> str:
        return self.run_id or self.place
