"""The folder of files and batches on disk. Its methods block; one thread calls them, except those of ``Upload``.

::

    FOLDER/lock                 held by the gateway that runs the batches
    FOLDER/batches.sqlite3      see database.py
    FOLDER/files/ID             a file of a client, or a batch's answers or errors, also while it is written
    FOLDER/files/ID.part        an upload that is not complete
    FOLDER/copies/              copies of other nodes' batches, see copy_folder.py

A line is durable in this order: its entry is written behind the durable part of the batch's file, the file is synced,
then one transaction records the line, the counts and the file's new size. What a crash leaves behind the recorded size
is cut off at the next start, and its lines run again.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgepipe.cluster.private_files import make_private_folder
from edgepipe.errors import DiskFull
from edgepipe.files.durable import sync_names
from edgepipe.gateway.batches.copies import Copy, record_of
from edgepipe.gateway.batches.copy_folder import CopyFolder
from edgepipe.gateway.batches.database import Database
from edgepipe.gateway.batches.disk import lock_file, open_private, write_all
from edgepipe.gateway.batches.lines import Outcome, Place, RawLine, read_lines
from edgepipe.gateway.batches.records import Batch, CheckedInput, StoredFile, TokenUsage
from edgepipe.gateway.batches.take_over import TakeOver
from edgepipe.units import format_bytes

_READ_LINES, _READ_BYTES = 256, 2 << 20  # lines that are read at once: some milliseconds
LEAST_FREE_BYTES = 256 << 20  # free space that batches leave on the disk
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSettings:
    """Where a gateway keeps files and batches, and how much of them."""

    folder: Path
    most_bytes: int = 20 << 30  # disk space for all files of all users
    kept_days: int = 30  # time until a file is deleted
    least_free_bytes: int = LEAST_FREE_BYTES

    @property
    def kept_s(self) -> int:
        """Seconds until a file is deleted."""
        return self.kept_days * 24 * 3600


class Upload:
    """A file that arrives. ``write`` and ``sync`` block; they run in threads, one call at a time."""

    def __init__(self, path: Path, *, least_free_bytes: int) -> None:
        """Create ``path`` (0600). Raises DiskFull, OSError."""
        self.num_bytes = 0
        self._path = path
        self._least_free_bytes = least_free_bytes
        _check_free(path.parent, least_free_bytes)
        self._file = os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append. Raises DiskFull, OSError."""
        _check_free(self._path.parent, self._least_free_bytes)
        try:
            write_all(self._file, data)
        except OSError as exc:
            raise _translated(exc, self._path.parent) from exc
        self.num_bytes += len(data)

    def complete(self, path: Path) -> None:
        """Make the bytes durable under the file's final name. Raises OSError."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._path, path)
        sync_names(path.parent)

    def abandon(self) -> None:
        """Remove what has arrived. No effect on a completed upload."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class Store:
    """The open folder."""

    def __init__(self, settings: FilesSettings) -> None:
        """Open or create the folder, and remove what a crash left.

        Raises CapacityError while another gateway holds the folder, ConfigInvalid, OSError, sqlite3.Error.
        """
        self._settings = settings
        self._files = settings.folder / "files"
        make_private_folder(settings.folder)
        make_private_folder(self._files)
        self._lock = lock_file(settings.folder / "lock")
        try:
            self._db = Database(settings.folder / "batches.sqlite3")
            self._tidy()
            self.copies = CopyFolder(settings.folder / "copies")
            self._drop_taken()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Close the database and give the folder free. May be called twice."""
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def path_of(self, file_id: str) -> Path:
        """Return where a file's bytes are."""
        return self._files / file_id

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of all files by user, those of unfinished batches included."""
        held: dict[str, int] = {}
        for file in self._db.all_files():
            held[file.owner] = held.get(file.owner, 0) + file.num_bytes
        for batch in self._db.unfinished():
            held[batch.owner] = held.get(batch.owner, 0) + batch.output_bytes + batch.error_bytes
        return held

    def new_upload(self, file_id: str) -> Upload:
        """Begin to write a file. Raises DiskFull, OSError."""
        return Upload(self._files / f"{file_id}.part", least_free_bytes=self._settings.least_free_bytes)

    def keep(self, upload: Upload, file: StoredFile) -> None:
        """Make an upload a file. Raises DiskFull, OSError."""
        upload.complete(self.path_of(file.file_id))
        with self._durable():
            self._db.add_file(file)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """See ``Database.file``."""
        return self._db.file(owner, file_id)

    def list_files(
        self, owner: str, *, purpose: str, after: str, newest_first: bool, count: int
    ) -> list[StoredFile] | None:
        """See ``Database.list_files``."""
        return self._db.list_files(owner, purpose=purpose, after=after, newest_first=newest_first, count=count)

    def delete_file(self, file: StoredFile) -> str:
        """Delete a file. Return the id of an unfinished batch that reads it, and so keeps it; else an empty text."""
        if batch_id := self._db.uses_file(file.file_id):
            return batch_id
        self._db.remove_file(file.file_id)
        self.path_of(file.file_id).unlink(missing_ok=True)
        return ""

    def expire(self, now_s: int) -> list[StoredFile]:
        """Delete files and batches whose time is over. Return the files."""
        gone = self._db.expired_files(now_s)
        for file in gone:
            self._db.remove_file(file.file_id)
            self.path_of(file.file_id).unlink(missing_ok=True)
        self._db.forget_batches(now_s)
        return gone

    def add_batch(self, batch: Batch) -> None:
        """Add a batch. Raises DiskFull."""
        with self._durable():
            self._db.add_batch(batch)

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """See ``Database.batch``."""
        return self._db.batch(owner, batch_id)

    def list_batches(self, owner: str, *, after: str, count: int) -> list[Batch] | None:
        """See ``Database.list_batches``."""
        return self._db.list_batches(owner, after=after, count=count)

    def unfinished(self) -> list[Batch]:
        """See ``Database.unfinished``."""
        return self._db.unfinished()

    def copied(self) -> list[Batch]:
        """See ``Database.copied``."""
        return self._db.copied()

    def find(self, batch_id: str) -> Batch | None:
        """See ``Database.find``."""
        return self._db.find(batch_id)

    def record_for_keeper(self, batch: Batch) -> tuple[bytes, int] | None:
        """Return a batch for its keeper, and its input's size; None once its input is deleted."""
        file = self._db.find_file(batch.input_file)
        return None if file is None else (record_of(batch, file), file.num_bytes)

    def take_over(self, copy: Copy, *, owner: str, now_s: int) -> tuple[Batch, int]:
        """Make a copy a batch of this node, in one transaction; a crash leaves the copy or the batch.

        Return the batch, and the bytes of files that are new here. Lines with an entry in the copy are finished. Raises
        RequestInvalid, DiskFull, OSError.
        """
        kept_s = min(copy.batch.kept_s, self._settings.kept_s)
        copy = replace(copy, batch=replace(copy.batch, owner=owner, kept_s=kept_s))
        self.check_free()
        step = TakeOver(copy, copies=self.copies, files=self._files, database=self._db)
        with self._durable():
            batch = step.perform(now_s=now_s)
            if batch.is_final:
                self._add_outputs(batch, now_s=now_s, until_s=now_s + kept_s)
        return batch, step.end(batch)

    def _drop_taken(self) -> None:
        """Drop copies that a crash left after they were taken over."""
        for copy in self.copies.all():
            batch = self._db.find(copy.batch.batch_id)
            if batch is not None and batch.term > copy.batch.term and not batch.handed_to:
                self.copies.drop(copy.batch.batch_id)

    def change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """Change a batch. Raises DiskFull, and what ``change`` raises."""
        with self._durable():
            return self._db.change(batch_id, change)

    def input_of(self, batch: Batch) -> tuple[Path, int]:
        """Return the file that a batch reads, and its size in bytes."""
        path = self.path_of(batch.input_file)
        return path, path.stat().st_size

    def next_lines(self, batch: Batch, place: Place) -> tuple[list[RawLine], Place]:
        """Read some lines from ``place`` on that have no result yet. The place is unchanged at the file's end."""
        lines: list[RawLine] = []
        last = Place(offset=place.offset + _READ_BYTES, number=place.number + _READ_LINES)
        with open(self.path_of(batch.input_file), "rb") as source:
            for line, after in read_lines(source, place):
                place = after
                if line is not None:
                    lines.append(line)
                if place.offset >= last.offset or place.number >= last.number:
                    break
        if not lines:
            return [], place
        done = self._db.finished_lines(batch.batch_id, first=lines[0].number, last=lines[-1].number)
        return [line for line in lines if line.number not in done], place

    def record(self, batch_id: str, outcomes: Sequence[Outcome]) -> Batch:
        """Make the results of lines durable, and count them. Raises DiskFull, OSError; then nothing has changed."""
        batch = self._db.current(batch_id)
        _check_free(self._files, self._settings.least_free_bytes)
        good = b"".join(outcome.entry for outcome in outcomes if outcome.succeeded)
        bad = b"".join(outcome.entry for outcome in outcomes if not outcome.succeeded)
        num_good = sum(outcome.succeeded for outcome in outcomes)
        usage = sum((outcome.usage for outcome in outcomes), TokenUsage())
        counted = batch.counted(
            completed=num_good,
            failed=len(outcomes) - num_good,
            usage=usage,
            output_bytes=batch.output_bytes + len(good),
            error_bytes=batch.error_bytes + len(bad),
        )
        self._append(batch.output_file, batch.output_bytes, good)
        self._append(batch.error_file, batch.error_bytes, bad)
        with self._durable():
            return self._db.change(batch_id, lambda _: counted, finished=(outcome.number for outcome in outcomes))

    def finish(self, batch: Batch, change: Callable[[Batch], Batch], *, now_s: int) -> Batch:
        """Give a batch its final status, and its client the files. Raises DiskFull."""
        until_s = now_s + batch.kept_s
        with self._durable():
            ended = self._db.change(batch.batch_id, change, kept_until_s=until_s)
            self._add_outputs(ended, now_s=now_s, until_s=until_s)
        return ended

    def _add_outputs(self, ended: Batch, *, now_s: int, until_s: int) -> None:
        """Add the files of a batch that has ended, inside a transaction."""
        for file_id, num_bytes, kind in (
            (ended.output_file, ended.output_bytes, "output"),
            (ended.error_file, ended.error_bytes, "error"),
        ):
            if num_bytes:
                self._db.add_file(
                    StoredFile(
                        file_id=file_id,
                        owner=ended.owner,
                        num_bytes=num_bytes,
                        created_s=now_s,
                        expires_s=until_s,
                        filename=f"{ended.batch_id}_{kind}.jsonl",
                        purpose="batch_output",
                    )
                )

    def checked(self, batch: Batch, result: CheckedInput, *, now_s: int) -> Batch:
        """Take the result of the check of a batch's input: it begins, or it has failed."""

        def change(now: Batch) -> Batch:
            return now.checked(result, now_s=now_s)

        return self.finish(batch, change, now_s=now_s) if result.errors else self.change(batch.batch_id, change)

    def check_free(self) -> None:
        """Raise DiskFull if the disk has less free space than batches leave."""
        _check_free(self._files, self._settings.least_free_bytes)

    def _append(self, file_id: str, at: int, data: bytes) -> None:
        """Write behind the durable part of a file, and sync it."""
        if not data:
            return
        path = self.path_of(file_id)
        is_new = not path.exists()
        try:
            with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
                file.truncate(at)
                file.seek(at)
                try:
                    write_all(file, data)
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        file.truncate(at)
                    raise
            if is_new:
                sync_names(self._files)
        except OSError as exc:
            raise _translated(exc, self._files) from exc

    @contextmanager
    def _durable(self) -> Generator[None]:
        """Commit what the block does, or nothing of it. Raises DiskFull."""
        try:
            with self._db.transaction():
                yield
        except sqlite3.OperationalError as exc:
            raise _translated_db(exc, self._files) from exc

    def _tidy(self) -> None:
        """Remove files without a record, and cut batches' files to what is recorded."""
        sizes = {file.file_id: file.num_bytes for file in self._db.all_files()}
        for batch in self._db.unfinished():
            sizes[batch.output_file] = batch.output_bytes
            sizes[batch.error_file] = batch.error_bytes
        for path in self._files.iterdir():
            if path.name not in sizes:
                path.unlink(missing_ok=True)
            elif path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])


def _check_free(folder: Path, least_free_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < least_free_bytes:
        raise _disk_full(folder, f"{format_bytes(free)} are free, batches leave {format_bytes(least_free_bytes)}")


def _disk_full(folder: Path, fact: str) -> DiskFull:
    return DiskFull("the disk is full", fact=f"{folder}: {fact}", next_step="make room on that disk")


def _translated(exc: OSError, folder: Path) -> Exception:
    return _disk_full(folder, "a write found no room") if exc.errno in _FULL else exc


def _translated_db(exc: sqlite3.OperationalError, folder: Path) -> Exception:
    if exc.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return _disk_full(folder, "the database found no room")
    return exc
