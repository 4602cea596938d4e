"""`graft store`: the upkeep of a trajectory store, each command a method of `TrajectoryStore` and a line about it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from graft_dist.errors import StoreError
from storage.trajectories import TrajectoryStore


def run_compact(root: str, orphan_age_hours: float) -> None:
    """Merge small files, and drop rounds whose sequences never came."""
    done = _open(root).compact(orphan_age_hours)
    print(
        f"{done.num_files_before} files are now {done.num_files_after}; "
        f"the rounds of {done.num_purged_attempts} attempts without sequences were dropped"
    )


def run_forget(root: str, before: date | None, target: str | None, run_id: str | None) -> None:
    """Delete the rows of days or of a run."""
    if (before is None) == (run_id is None) or (target is not None and before is None):
        raise StoreError("give either --before (and, if need be, --target) or --run")
    num_files = _open(root).forget(before=before, target=target, run_id=run_id)
    print(f"rows of {num_files} files were deleted; graft store vacuum frees their room")


def run_vacuum(root: str, retention_hours: int) -> None:
    """Delete files that nothing refers to any more, and list them."""
    deleted = _open(root).vacuum(retention_hours)
    for path in deleted:
        print(path)
    print(f"{len(deleted)} files were deleted")


def run_export(root: str, dest: Path) -> None:
    """Write a plain copy of the rows."""
    print(f"exported to {_open(root).export(dest)}")


def _open(root: str) -> TrajectoryStore:
    store = TrajectoryStore(root)
    if not store.exists:
        raise StoreError(f"there is no trajectory store at {store.root}")
    return store
