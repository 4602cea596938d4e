"""The folder that a measurement in `bench/` leaves: what was run and where, every row, and the summary made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.provenance import provenance

Row = Mapping[str, Any]


def keep_measurement(out: Path, settings: Row, raw: Sequence[Row], summary: Sequence[Row]) -> None:
    """Write run.json (settings, command, commit, machine, versions), raw.jsonl and summary.jsonl into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "run.json", [{"settings": settings, **provenance()}])
    _write(out / "raw.jsonl", raw)
    _write(out / "summary.jsonl", summary)


def _write(file: Path, rows: Sequence[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
