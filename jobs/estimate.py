"""What a run will leave at most, and whether there is room for it: said before the work begins."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft_dist.errors import StoreError
from jobs.decode_spec import DecodeSpec
from jobs.units import Unit

_BYTES_PER_CANDIDATE = 6.0  # an id and a log-probability, compressed
_BYTES_PER_LOGIT = 4.0  # float32 hardly compresses
_BYTES_PER_HIDDEN = 3.0  # float16's precision in float32, compressed
_BYTES_PER_NODE = 6.0  # token, parent, depth, target token; compressed
_BYTES_PER_ROUND = 60.0  # scalars of a round
_BYTES_PER_TOKEN = 3.0
_BYTES_PER_UNIT = 18_000  # footers and page headers of a pair of Parquet files
_SPARE = 1.2  # an actor's attempts that come to nothing, the log


@dataclass(frozen=True)
class Estimate:
    """Upper bounds: every answer at full length, one token per round."""

    num_sequences: int
    num_tokens: int
    num_rows: int
    num_bytes: int

    def line(self) -> str:
        """One line for people."""
        return (
            f"to decode: {self.num_sequences:,} sequences, at most {self.num_tokens:,} tokens, "
            f"{self.num_rows:,} rows and {self.num_bytes / 1e6:,.1f} MB"
        )


def estimate(units: Sequence[Unit], spec: DecodeSpec, draft_depth: int) -> Estimate:
    """The most that `units` can leave when recorded."""
    num_sequences = sum(len(unit) for unit in units)
    num_good = sum(item.error is None for unit in units for item in unit.items)
    num_tokens = num_good * spec.sampling.max_new_tokens
    depth = 0 if spec.method == "plain" else draft_depth
    nodes = max(spec.budgets, default=spec.budget or 0) if spec.method == "ddtree" else depth
    decoded = _BYTES_PER_ROUND + _BYTES_PER_NODE * (nodes + 1) + 2 * _BYTES_PER_LOGIT * spec.num_candidates
    decoded += _BYTES_PER_CANDIDATE * depth * spec.num_candidates
    kept_hidden = _BYTES_PER_HIDDEN * spec.num_hidden * draft_depth
    decoded += kept_hidden
    dense = 0.0
    if spec.dense:
        candidates = draft_depth * spec.config.num_candidates
        dense = _BYTES_PER_ROUND + (_BYTES_PER_CANDIDATE + _BYTES_PER_LOGIT) * candidates + kept_hidden
    num_bytes = num_tokens * (decoded + dense + _BYTES_PER_TOKEN) + _BYTES_PER_UNIT * len(units)
    num_rows = num_sequences + num_tokens * (2 if spec.dense else 1)
    return Estimate(num_sequences, num_tokens, num_rows, int(num_bytes))


def check_room(folder: Path, expected: Estimate) -> int:
    """The free bytes where `folder` is or will be. Raises `StoreError` when `expected` does not fit."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < _SPARE * expected.num_bytes:
        raise StoreError(
            f"{folder} has {free / 1e6:,.0f} MB free, but up to {_SPARE * expected.num_bytes / 1e6:,.0f} MB may be "
            "written; make room, or limit the run (--limit, --max-new-tokens)"
        )
    return free
