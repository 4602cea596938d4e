"""What old runs leave behind is deleted, and nothing that a later run asks for."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from jobs.run_retention import empty_old_runs

NOW = datetime(2026, 12, 1, tzinfo=UTC)


def make_run(folder: Path, ended: datetime | None) -> Path:
    for name in ("training/policy", "champion"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a").touch()
    for name in ("prompts.jsonl", "2-collect.json", "report.html"):
        (folder / name).touch()
    if ended is not None:
        (folder / "end.json").touch()
        os.utime(folder / "end.json", (ended.timestamp(),) * 2)
    return folder


def test_old_runs_keep_their_records_alone(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", NOW - timedelta(days=2))
    others = [make_run(tmp_path / "new", NOW + timedelta(days=1)), make_run(tmp_path / "unfinished", None)]
    (tmp_path / "lease.json").touch()
    assert empty_old_runs(tmp_path, NOW) == 1
    assert sorted(path.name for path in old.iterdir()) == ["2-collect.json", "end.json", "prompts.jsonl", "report.html"]
    for run in others:
        assert (run / "training" / "policy" / "a").exists() and (run / "champion" / "a").exists()
    assert empty_old_runs(tmp_path, NOW) == 0
    assert empty_old_runs(tmp_path / "none", NOW) == 0
