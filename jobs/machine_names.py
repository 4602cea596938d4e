"""MachineNames: what a text gives away of the machine it was written on, and the words that stand for it.

For logs and pages that are published. Knows folders and addresses (IPv4, and the host's name where it cannot be taken
for an ordinary word); a user's name only as part of a folder, a process's number not at all.
"""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path
from urllib.parse import quote

_ADDRESS = re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?!\.?\w)")  # none of the loopback's
_PACKAGE = re.compile(r"(?<![^\s'\"(])[^\s'\"(]*_ray_pkg_[0-9a-f]+")  # a job's copy of its working directory
_TELLING = re.compile(r"[\d.-]")  # in a host's name: one without is too likely to be a word of the text


class MachineNames:
    """Words for folders; the home folder, the one of temporary files and the host itself have theirs from the start."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._host = socket.gethostname()
        self.add(Path(tempfile.gettempdir()), "TMP")
        self.add(Path.home(), "~")

    def add(self, folder: Path, word: str) -> None:
        """From now on, `word` stands for the folder, also where it lies in one that has a word already."""
        self._words |= {str(path): word for path in (folder.absolute(), folder.resolve()) if len(path.parts) > 1}

    def hide(self, text: str) -> str:
        """The text without any of it."""
        for folder in sorted(self._words, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(folder)}(?![\w-])", self._words[folder], text)
        text = _ADDRESS.sub("NODE", _PACKAGE.sub("PACKAGE", text))
        if _TELLING.search(self._host):
            text = re.sub(rf"(?<![\w.-]){re.escape(self._host)}(?![\w-])", "HOST", text)
        return text

    def left_in(self, text: str) -> list[str]:
        """What is still there of it, sorted: folders in whatever company or quoting, addresses."""
        forms = {form for folder in self._words for form in (f"{folder}/", quote(f"{folder}/", safe=""))}
        return sorted({form for form in forms if form in text} | set(_ADDRESS.findall(text)))
