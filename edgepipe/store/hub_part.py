"""The bytes of a hub's file that have arrived: ``NAME.part``, beside it ``NAME.part.json`` with the file's identity.

The part has no hash on disk, since hash functions do not tell their state. Opening reads the part to compute it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from edgepipe.errors import ModelInvalid
from edgepipe.files.progress import PlannedFile
from edgepipe.files.strict_json import parse_json_object
from edgepipe.store.install import file_chunks

PART_SUFFIX = ".part"
RECORD_SUFFIX = ".part.json"
_MAX_RECORD_BYTES = 4096


class _Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class PartFile:
    """Part of one file, open for appending. It continues an earlier process's part of the same file."""

    def __init__(self, folder: Path, name: str, file: PlannedFile, *, commit: str) -> None:
        """Open ``NAME.part``. A part of another file or commit is emptied. Raises OSError."""
        self._file, self._identity = file, _identity_of(file, commit)
        self._path, self._record = folder / f"{name}{PART_SUFFIX}", folder / f"{name}{RECORD_SUFFIX}"
        self.num_bytes = part_bytes(folder, name, file, commit=commit)  # arrived
        self.etag = _recorded_etag(self._record, self._identity)  # None without a record of this file
        if not self.num_bytes:
            self._path.unlink(missing_ok=True)
        self._digest = _digest_of(file)
        self._stream: BinaryIO = self._path.open("ab", buffering=0)  # a killed process loses nothing that it counted

    def compute_hash(self, on_bytes: Callable[[int], None]) -> None:
        """Hash the bytes of an earlier process. Call it once, before ``add``."""
        for chunk in file_chunks(self._path):
            self._digest.update(chunk)
            on_bytes(len(chunk))

    def begin(self, etag: str) -> None:
        """Drop all bytes, and note the entity tag of those that follow; empty if the hub gives none."""
        self._stream.truncate(0)
        self.num_bytes, self.etag, self._digest = 0, etag, _digest_of(self._file)
        self._record.write_text(json.dumps({"file": self._identity, "etag": etag}), encoding="utf-8")

    def add(self, data: bytes) -> None:
        """Append bytes. Raises OSError."""
        rest = memoryview(data)
        while rest:
            written = self._stream.write(rest)
            self._digest.update(rest[:written])
            self.num_bytes += written
            rest = rest[written:]

    def is_right(self) -> bool:
        """Return whether all bytes have arrived and their hash is the announced one."""
        expected = self._file.sha256 or self._file.git_sha1
        return self.num_bytes == self._file.num_bytes and (not expected or self._digest.hexdigest() == expected)

    def finish(self, target: Path) -> None:
        """Give the whole file its name. Raises OSError."""
        self.close()
        self._path.replace(target)
        self._record.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. The part stays."""
        self._stream.close()


def part_bytes(folder: Path, name: str, file: PlannedFile, *, commit: str) -> int:
    """Return how many bytes of a file an earlier process left in ``NAME.part``; 0 for another file's."""
    path = folder / f"{name}{PART_SUFFIX}"
    if _recorded_etag(folder / f"{name}{RECORD_SUFFIX}", _identity_of(file, commit)) is None or path.is_symlink():
        return 0
    num_bytes = path.stat().st_size if path.is_file() else 0
    return num_bytes if num_bytes <= file.num_bytes else 0


def _identity_of(file: PlannedFile, commit: str) -> str:
    return file.sha256 or file.git_sha1 or f"{commit}:{file.num_bytes}"


def _recorded_etag(path: Path, identity: str) -> str | None:
    """Return the recorded entity tag of a part; None without a record of this file."""
    with suppress(OSError, ModelInvalid), path.open("rb") as stream:
        record: dict[str, Any] = parse_json_object(stream.read(_MAX_RECORD_BYTES), what="the part's record")
        if record.get("file") == identity:
            return str(record.get("etag", ""))
    return None


def hash_fits(file: PlannedFile, path: Path) -> bool:
    """Return whether a whole file has the announced hash; True without one."""
    digest = _digest_of(file)
    for chunk in file_chunks(path):
        digest.update(chunk)
    return digest.hexdigest() == (file.sha256 or file.git_sha1 or digest.hexdigest())


def _digest_of(file: PlannedFile) -> _Digest:
    """Return the hash function by which the hub announces the file's content."""
    if file.git_sha1 and not file.sha256:
        return hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)  # git's blob id
    return hashlib.sha256()
