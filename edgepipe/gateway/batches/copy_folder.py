"""Copies of other nodes' batches on this node's disk. Its methods block; the store's thread calls them.

::

    FOLDER/copies/BATCH/copy.json              a ``Copy``: which bytes are durable
    FOLDER/copies/BATCH/input, output, errors  may be longer: bytes behind the durable ones are written again

Bytes are synced before ``copy.json`` says that they are here, so any stop leaves a copy that can go on.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgepipe.cluster.private_files import make_private_folder, read_private, write_private
from edgepipe.errors import ConfigInvalid, RemoteProtocolError
from edgepipe.gateway.batches.copies import Copy, Tally, read_record
from edgepipe.gateway.batches.lines import usage_of
from edgepipe.gateway.batches.records import TokenUsage
from edgepipe.wire.batches import BatchPart

logger = logging.getLogger(__name__)
FILES = ("input", "output", "errors")
_RECORD = "copy.json"
_MOST_RECORD_BYTES = 1 << 20
_BATCH_ID = re.compile(r"batch_[0-9A-Za-z_-]{1,64}")
_ENTRY = re.compile(rb'\{"id":"batch_req_[0-9A-Za-z_-]{1,64}_([0-9]{1,10})",')
_MOST_NUMBER = 1 << 26  # highest number of a line, empty lines included: 8 MiB of bits
_MAX_ENTRY_BYTES = 64 << 20  # an answer is bounded by its request: no whole entry is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A whole entry of a copy's output or error file."""

    number: int  # number of its line
    succeeded: bool


class CopyFolder:
    """All copies on this node."""

    def __init__(self, folder: Path) -> None:
        """Open or create the folder, and remove what cannot be used. Raises ConfigInvalid."""
        self._folder = folder
        make_private_folder(folder)
        self._copies: dict[str, Copy] = {}
        for path in folder.iterdir():
            try:
                copy = Copy.from_text(read_private(path / _RECORD, most_bytes=_MOST_RECORD_BYTES).decode())
                if copy.batch.batch_id != path.name:
                    raise ValueError("its folder has another name")
                if any(_size(path / name) < size for name, size in zip(FILES, copy.sizes, strict=True)):
                    raise ValueError("a file is shorter than it was")
                self._copies[path.name] = copy
            except (OSError, ValueError, KeyError, TypeError, ConfigInvalid) as exc:
                logger.warning("a copy of a batch cannot be used and is copied anew: batch=%s: %s", path.name, exc)
                _remove(path)

    def all(self) -> list[Copy]:
        """Return all copies."""
        return list(self._copies.values())

    def find(self, batch_id: str) -> Copy | None:
        """Return the copy of a batch."""
        return self._copies.get(batch_id)

    def drop(self, batch_id: str) -> int:
        """Delete a copy. Return its bytes."""
        copy = self._copies.pop(batch_id, None)
        _remove(self._folder / batch_id)
        return copy.num_bytes if copy is not None else 0

    def begin(self, record: bytes, *, batch_id: str, owner_node: str, owner_name: str, now_s: int) -> Copy:
        """Take the owner's newest record; a copy of another owner or term begins anew.

        Raises RemoteProtocolError for an unusable record, OSError.
        """
        try:
            batch, file = read_record(record)
        except (ValueError, KeyError, TypeError) as exc:
            raise RemoteProtocolError(f"machine {owner_name} sent no valid record of a batch") from exc
        if batch.batch_id != batch_id or not _BATCH_ID.fullmatch(batch_id):
            raise RemoteProtocolError(f"machine {owner_name} sent the record of another batch")
        held = self._copies.get(batch_id)
        copy = Copy(
            owner_node=owner_node, owner_name=owner_name, batch=batch, input=file, updated_s=now_s, record=record
        )
        if held is not None:
            if (held.owner_node, held.batch.term) == (owner_node, batch.term) and _fits(held, copy):
                return replace(copy, sizes=held.sizes)
            self.drop(batch_id)
        make_private_folder(self._folder / batch_id)
        return copy

    def append(self, copy: Copy, part: BatchPart) -> Copy:
        """Write bytes behind those of the copy. ``keep`` makes them durable. Raises RemoteProtocolError, OSError."""
        at, most = copy.sizes[part.file], copy.wanted[part.file]
        if part.offset != at or at + len(part.data) > most:
            raise RemoteProtocolError(
                f"machine {copy.owner_name} sent other bytes of a batch than were asked for",
                fact=f"bytes {part.offset} to {part.offset + len(part.data)}, wanted {at} to {most}",
            )
        path = self._folder / copy.batch.batch_id / FILES[part.file]
        with os.fdopen(_open(path), "wb", buffering=0) as file:
            file.truncate(at)
            file.seek(at)
            view = memoryview(part.data)
            while view:
                view = view[file.write(view) :]
        sizes = list(copy.sizes)
        sizes[part.file] += len(part.data)
        return replace(copy, sizes=(sizes[0], sizes[1], sizes[2]))

    def keep(self, copy: Copy) -> None:
        """Make a copy durable as it is now. Raises OSError."""
        folder = self._folder / copy.batch.batch_id
        for name in FILES:
            with suppress(FileNotFoundError):
                file = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        write_private(folder / _RECORD, copy.to_text().encode())
        self._copies[copy.batch.batch_id] = copy

    def path(self, copy: Copy, number: int) -> Path:
        """Return where the bytes of a file of ``FILES`` are."""
        return self._folder / copy.batch.batch_id / FILES[number]


@dataclass(slots=True)
class Reading:
    """Reads the whole entries of a copy, and counts them. Its values are complete once ``entries`` has ended."""

    folder: CopyFolder
    copy: Copy
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    sizes: list[int] = field(default_factory=lambda: [0, 0])

    def entries(self) -> Iterator[Entry]:
        """Yield each line's entry once. A file ends before its first entry that is cut off, no entry, or a second one.

        Tokens are counted from the answers only where the record counts other entries than the copy has: to read all
        answers takes long. Raises OSError.
        """
        copy, seen = self.copy, bytearray()
        exact = copy.is_complete and copy.sizes[1:] == copy.wanted[1:]
        for number, succeeded in ((1, True), (2, False)):
            for data in self._whole_lines(number):
                match = _ENTRY.match(data)
                if match is None or not _mark(seen, int(match[1])):
                    break
                if not exact and succeeded:
                    self.usage += usage_of(data)
                self.completed += succeeded
                self.failed += not succeeded
                self.sizes[number - 1] += len(data)
                yield Entry(number=int(match[1]), succeeded=succeeded)
        if exact:
            self.usage = copy.batch.usage

    @property
    def tally(self) -> Tally:
        """The counts."""
        return Tally(
            completed=self.completed,
            failed=self.failed,
            usage=self.usage,
            output_bytes=self.sizes[0],
            error_bytes=self.sizes[1],
        )

    def _whole_lines(self, number: int) -> Iterator[bytes]:
        left = self.copy.sizes[number]
        if not left:
            return
        with self.folder.path(self.copy, number).open("rb") as source:
            while left > 0:
                data = source.readline(min(left, _MAX_ENTRY_BYTES))
                if not data.endswith(b"\n"):
                    return
                left -= len(data)
                yield data


def _mark(seen: bytearray, number: int) -> bool:
    """Mark a line as seen. Return False if it was, or if no batch has that line. A bit a line."""
    place, bit = divmod(number, 8)
    if not 0 < number <= _MOST_NUMBER:
        return False
    if place >= len(seen):
        seen.extend(bytes(place + 1 - len(seen) + len(seen) // 2))
    is_new = not seen[place] & 1 << bit
    seen[place] |= 1 << bit
    return is_new


def _fits(held: Copy, newest: Copy) -> bool:
    """Return whether the owner's files still begin with the copy's bytes: they only grow."""
    return held.input == newest.input and all(
        have <= want for have, want in zip(held.sizes, newest.wanted, strict=True)
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
