"""What a retraining's steps call, replaced: no Ray, no model, no files but the run's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft_dist.drift import Drift, Verdict
from graft_dist.trial import Interval
from jobs import retraining
from jobs.gate import compare
from storage.registry import CHAMPION
from storage.trajectories import Compaction

STEPS = ("choose", "collect", "compact", "train", "evaluate", "decide", "report", "clean")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the jobs may catch it."""


@dataclass
class Loop:
    """Store, registry, training and evaluation in one; the challenger is version 1 and a quarter faster than DDTree.

    `trouble` maps the name of a call to what is raised inside it, after whatever it does in part; a test mends it.
    """

    collects: int = 0  # exit code
    trouble: dict[str, BaseException] = field(default_factory=dict)
    during: dict[str, Callable[[Any], None]] = field(default_factory=dict)  # what a call does first, with its request
    calls: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, ...]] = field(default_factory=list)  # prompt files that were collected
    champion: int | None = None
    rolled_back: bool = False  # whether somebody went back from the challenger
    tags: dict[str, str] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)  # pages that the registry was given

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TrajectoryStore", "Registry", "Evaluator"):
            monkeypatch.setattr(retraining, name, lambda *_: self)
        monkeypatch.setattr(retraining, "collect", self.collect)
        monkeypatch.setattr(retraining, "train", self.train)
        monkeypatch.setattr(retraining, "find_drift", lambda request: Drift(Verdict.unknown, "nothing is known"))

    def _call(self, name: str, request: Any = None) -> None:
        self.calls[name] += 1
        self.during.get(name, lambda _: None)(request)
        if name in self.trouble:
            raise self.trouble[name]

    def collect(self, request: Any) -> int:
        self.asked.append(request.prompts)
        self._call("collect", request)
        return self.collects

    def train(self, request: Any) -> int:
        self._call("train", request)
        return 0

    def compact(self) -> Compaction:
        self._call("compact")
        return Compaction(4, 2, 0)

    def forget(self, **_: Any) -> int:
        self._call("forget")
        return 3

    def vacuum(self) -> list[str]:
        self._call("vacuum")
        return ["a file"]

    def version_of(self, slug: str, policy: Path) -> int:
        return 1

    def resolve(self, slug: str, alias: str) -> int | None:
        assert alias == CHAMPION
        return None

    def promote(self, slug: str, version: int, *, expected_champion: int | None) -> None:
        assert self.champion in (expected_champion, version)
        self.champion = version
        self._call("promote")

    def is_rolled_back(self, slug: str, version: int) -> bool:
        return self.rolled_back

    def tag(self, slug: str, version: int, tags: Mapping[str, str]) -> None:
        self._call("tag")
        self.tags |= tags

    def log_report(self, slug: str, version: int, report: Path) -> None:
        self._call("log_report")
        with suppress(ValueError):
            self.reports.remove(report.name)  # the same file is replaced
        self.reports.append(report.name)

    def compare(self, theirs: object, ours: object) -> dict[str, Any]:
        self._call("evaluate")
        slow = np.stack([np.linspace(900, 1100, 20), np.full(20, 100.0)], axis=1)
        fast = slow * (0.8, 1.0)
        replayed = asdict(compare("replay", ("ddtree 6", slow, 2.0, 0.1), ("challenger v1", fast, 2.5, 0.05)))
        replayed |= {"mat": asdict(Interval(1.25, 1.2, 1.3)), "mismatch": asdict(Interval(-0.05, -0.06, -0.04))}
        live = asdict(compare("live", ("ddtree 6", slow[:4], 2.1, None), ("challenger v1", fast[:4], 2.4, None)))
        return {"replay": replayed, "live": live, "num_audited": 4, "num_bugs": 0, "differences": [], "note": ""}
