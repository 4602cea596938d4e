"""Where files are: in a folder of a local or network file system, or under a prefix of an S3 bucket.

    Place.parse("data/store")             a folder; also file:///data/store
    Place.parse("s3://bucket/store")      a prefix of a bucket

Keys, region and endpoint of object stores come from the process's usual AWS_* variables, which the libraries read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import FileInfo, FileSystem, FileType, LocalFileSystem

from graft_dist.errors import StoreError

_BUCKET_AND_PREFIX = re.compile(r"[a-z0-9][a-z0-9.-]+(/[A-Za-z0-9._=-]+)*")


@dataclass(frozen=True)
class Place:
    """A file or folder, an object or prefix; `str()` is its name for DuckDB, for the log's library and for people."""

    files: FileSystem
    path: str  # within `files`: "/folder/file", "bucket/prefix/object"

    @classmethod
    def parse(cls, root: str | os.PathLike[str]) -> Place:
        """Read a path, a file:// URI or an s3:// URI; makes nothing.

        Raises:
            StoreError: for any other scheme, a name that readers would take for a pattern, or a bucket out of reach.
        """
        text = os.fspath(root)
        scheme = text.partition("://")[0] if "://" in text else ""
        if scheme == "s3":
            path = text.removeprefix("s3://").rstrip("/")
            if not _BUCKET_AND_PREFIX.fullmatch(path):
                raise StoreError(
                    f"the store {text!r} is not s3://BUCKET/PREFIX, of letters, digits, '.', '_', '=', '-' and '/'."
                )
            try:
                return cls(FileSystem.from_uri(f"s3://{path}")[0], path)
            except OSError as error:  # Amazon is asked for the region of its bucket
                raise StoreError(f"the store {text!r} cannot be reached: {error}") from error
        if scheme not in ("", "file"):
            raise StoreError(f"the store {text!r} uses {scheme}://, not a local path, file:// or s3://.")
        folder = Path(url2pathname(urlsplit(text).path) if scheme else text).expanduser().absolute()
        if re.search(r"[*?\[\]]", str(folder)):
            raise StoreError(f"the path {str(folder)!r} has one of * ? [ ], which readers would take for a pattern.")
        return cls(LocalFileSystem(), str(folder))

    def __truediv__(self, below: str) -> Place:
        return Place(self.files, f"{self.path}/{below}")

    def __str__(self) -> str:
        return self.path if self.is_local else f"s3://{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether it is on a file system of this machine (perhaps shared with others), and not in an object store."""
        return isinstance(self.files, LocalFileSystem)

    @property
    def local(self) -> Path:
        """The path of a local place.

        Raises:
            StoreError: it is in an object store.
        """
        if not self.is_local:
            raise StoreError(f"{self} is in an object store; this needs a folder.")
        return Path(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def log_options(self) -> dict[str, str] | None:
        """What the log's library has to be told beside the environment: an endpoint that says http:// means it."""
        return None if self.is_local else {"allow_http": "true"}

    def info(self) -> FileInfo | None:
        """Size and time of a file or object; None if there is none."""
        found = self.files.get_file_info(self.path)
        return found if found.type == FileType.File else None

    def remove(self) -> None:
        """Delete a file or object that may be there."""
        if self.info() is not None:
            self.files.delete_file(self.path)


class ObjectReader(ArrowFSWrapper):
    """Lets a DuckDB connection read s3:// without an extension of its own, which it would have to download."""

    protocol = "s3"
    cachable = False  # each connection has its own
