"""Retention of retraining runs: what of an ended run takes room and is of no use any more.

A run's records, prompts and report stay: later runs read which prompts were asked and trained on. Its policy, plots and
report are in the registry too.
"""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

_BULKY = ("training", "champion")
"""Folders of a run: checkpoints with the policy, and the copy of the champion that it was compared with."""


def empty_old_runs(runs: Path, before: datetime) -> int:
    """Delete the bulky folders of the runs below `runs` that ended before that moment; returns how many runs had any.

    Runs that have not come to an end keep theirs, however old they are: they may be gone on with.
    """
    num_emptied = 0
    for end in runs.glob("*/end.json"):
        if end.stat().st_mtime >= before.timestamp():
            continue
        folders = [end.parent / name for name in _BULKY if (end.parent / name).is_dir()]
        for folder in folders:
            shutil.rmtree(folder)
        num_emptied += bool(folders)
    return num_emptied
