"""Pins: snapshots that a learning run still reads, so that `vacuum` leaves their files alone.

    <root>/_pins/<name>.json    {"sequences": version, "rounds": version}

A run pins its snapshot each time it is started and takes the pin away at its end. One that was given up holds its rows
for `PIN_DAYS` after its last start, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from graft_dist.errors import StoreError

PIN_DAYS = 30


class Pins:
    """The pins of the store at `root`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "_pins"

    def put(self, name: str, versions: dict[str, int]) -> None:
        """Pin these versions of the tables under a name, anew if that name has a pin already.

        Raises:
            StoreError: the store cannot be written.
        """
        aside = self._folder / f".{name}"
        try:
            self._folder.mkdir(exist_ok=True)
            aside.write_text(json.dumps(versions), encoding="utf-8")
            aside.replace(self._folder / f"{name}.json")
        except OSError as error:
            raise StoreError(f"nothing can be pinned in {self._folder} ({error.strerror})") from error

    def take_away(self, name: str) -> None:
        """Remove a pin, if there is one."""
        with contextlib.suppress(OSError):  # it goes by its age
            (self._folder / f"{name}.json").unlink()

    def versions(self, table: str) -> list[int]:
        """The versions of a table that are pinned; pins that are too old are removed."""
        oldest = time.time() - 86400 * PIN_DAYS
        found = set()
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # its run has just ended
                if path.stat().st_mtime < oldest:
                    path.unlink()
                else:
                    found.add(json.loads(path.read_text(encoding="utf-8"))[table])
        return sorted(version for version in found if version >= 0)
