"""Pins: snapshots that a learning run still reads, so that `vacuum` leaves their files alone.

    <root>/_pins/<name>.json    {"sequences": version, "rounds": version}

A run pins its snapshot each time it is started and takes the pin away at its end. One that was given up holds its rows
for `PIN_DAYS` after its last start, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import json
import time

from pyarrow.fs import FileSelector

from graft_dist.errors import StoreError
from storage.place import Place

PIN_DAYS = 30


class Pins:
    """The pins of the store at `root`."""

    def __init__(self, root: Place) -> None:
        self._folder = root / "_pins"
        self._files = root.files

    def put(self, name: str, versions: dict[str, int]) -> None:
        """Pin these versions of the tables under a name, anew if that name has a pin already.

        Raises:
            StoreError: the store cannot be written.
        """
        aside = self._folder / f".{name}"
        try:
            self._files.create_dir(self._folder.path)
            with self._files.open_output_stream(aside.path) as file:
                file.write(json.dumps(versions).encode())
            self._files.move(aside.path, (self._folder / f"{name}.json").path)
        except OSError as error:
            raise StoreError(f"nothing can be pinned in {self._folder} ({error.strerror or error})") from error

    def take_away(self, name: str) -> None:
        """Remove a pin, if there is one."""
        with contextlib.suppress(OSError):  # it goes by its age
            (self._folder / f"{name}.json").remove()

    def versions(self, table: str) -> list[int]:
        """The versions of a table that are pinned; pins that are too old are removed."""
        oldest = time.time() - 86400 * PIN_DAYS
        found = set()
        for info in self._files.get_file_info(FileSelector(self._folder.path, allow_not_found=True)):
            if not info.base_name.endswith(".json"):
                continue
            with contextlib.suppress(FileNotFoundError):  # its run has just ended
                if info.mtime.timestamp() < oldest:
                    self._files.delete_file(info.path)
                else:
                    with self._files.open_input_stream(info.path) as file:
                        found.add(json.loads(file.read())[table])
        return sorted(version for version in found if version >= 0)
