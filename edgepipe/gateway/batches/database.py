"""The tables of files, batches and finished lines: SQLite in one file. Its methods block; one thread calls them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from edgepipe.errors import ConfigInvalid
from edgepipe.gateway.batches.records import Batch, StoredFile

_VERSION = 1  # version of the tables
_TABLES = """
CREATE TABLE files (
  place INTEGER PRIMARY KEY AUTOINCREMENT,  -- in order of creation
  file_id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  num_bytes INTEGER NOT NULL,
  created_s INTEGER NOT NULL,
  expires_s INTEGER NOT NULL,
  filename TEXT NOT NULL,
  purpose TEXT NOT NULL
);
CREATE INDEX files_of_owner ON files (owner, place);
CREATE TABLE batches (
  place INTEGER PRIMARY KEY AUTOINCREMENT,
  batch_id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  input_file TEXT NOT NULL,
  ended INTEGER NOT NULL,
  expires_s INTEGER NOT NULL,  -- time when an ended batch is forgotten
  record TEXT NOT NULL  -- JSON, see Batch.to_text
);
CREATE INDEX batches_of_owner ON batches (owner, place);
CREATE INDEX running_batches ON batches (ended, place);
CREATE TABLE finished (  -- lines of unfinished batches that have their result
  batch INTEGER NOT NULL,
  line INTEGER NOT NULL,
  PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
_FILE_FIELDS = "file_id, owner, num_bytes, created_s, expires_s, filename, purpose"


class Database:
    """The open database. Every method that changes something is one durable transaction."""

    def __init__(self, path: Path) -> None:
        """Open or create (0600). Raises OSError, sqlite3.Error, and ConfigInvalid for tables of a newer version."""
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            self._db.close()
            raise ConfigInvalid(
                f"{path} is of a newer version of edgepipe",
                fact=f"its version is {version}, this program knows {_VERSION}",
                next_step="install that version again, or move the file away",
            )
        if version < _VERSION:
            with self.transaction():
                for statement in _TABLES.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Commit what the block does, or nothing of it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                self._db.execute("ROLLBACK")
            raise

    def add_file(self, file: StoredFile) -> None:
        """Add a complete file, inside or outside a transaction."""
        marks = ", ".join("?" * len(asdict(file)))
        self._db.execute(f"INSERT INTO files ({_FILE_FIELDS}) VALUES ({marks})", tuple(asdict(file).values()))

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """Return a user's file."""
        found = self._db.execute(
            f"SELECT {_FILE_FIELDS} FROM files WHERE file_id = ? AND owner = ?", (file_id, owner)
        ).fetchone()
        return None if found is None else _file(found)

    def all_files(self) -> list[StoredFile]:
        """Return the files of all users, the oldest first."""
        return [_file(row) for row in self._db.execute(f"SELECT {_FILE_FIELDS} FROM files ORDER BY place")]

    def list_files(
        self, owner: str, *, purpose: str, after: str, newest_first: bool, count: int
    ) -> list[StoredFile] | None:
        """Return up to ``count`` files behind the file ``after``; None if there is no such file. Empty texts: any."""
        where, values = "owner = ?", [owner]
        if purpose:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        place = self._place("files", "file_id", owner, after)
        if place is None:
            return None
        rows = self._page("files", _FILE_FIELDS, where, values, place, newest_first=newest_first, count=count)
        return [_file(row) for row in rows]

    def remove_file(self, file_id: str) -> None:
        """Forget a file."""
        self._db.execute("DELETE FROM files WHERE file_id = ?", (file_id,))

    def add_batch(self, batch: Batch) -> None:
        """Add a batch."""
        self._db.execute(
            "INSERT INTO batches (batch_id, owner, input_file, ended, expires_s, record) VALUES (?, ?, ?, ?, ?, ?)",
            (batch.batch_id, batch.owner, batch.input_file, batch.is_final, 0, batch.to_text()),
        )

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """Return a user's batch."""
        found = self._db.execute(
            "SELECT record FROM batches WHERE batch_id = ? AND owner = ?", (batch_id, owner)
        ).fetchone()
        return None if found is None else Batch.from_text(found[0])

    def copied(self) -> list[Batch]:
        """Return the batches of all users that want a copy on another node."""
        rows = self._db.execute("SELECT record FROM batches WHERE record LIKE '%\"copies\": 2%'").fetchall()
        return [batch for batch in (Batch.from_text(row[0]) for row in rows) if batch.wants_copy]

    def find(self, batch_id: str) -> Batch | None:
        """Return a batch of any user."""
        found = self._db.execute("SELECT record FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
        return None if found is None else Batch.from_text(found[0])

    def find_file(self, file_id: str) -> StoredFile | None:
        """Return a file of any user."""
        found = self._db.execute(f"SELECT {_FILE_FIELDS} FROM files WHERE file_id = ?", (file_id,)).fetchone()
        return None if found is None else _file(found)

    def forget_batch(self, batch_id: str) -> None:
        """Forget one batch that has ended, and which lines of it have results."""
        place = "(SELECT place FROM batches WHERE batch_id = ?)"
        self._db.execute(f"DELETE FROM finished WHERE batch = {place}", (batch_id,))
        self._db.execute("DELETE FROM batches WHERE batch_id = ?", (batch_id,))

    def add_finished(self, batch_id: str, lines: Iterable[int]) -> None:
        """Record finished lines of a batch that does not change, inside a transaction."""
        (key,) = self._db.execute("SELECT place FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
        self._db.executemany("INSERT INTO finished VALUES (?, ?)", ((key, line) for line in lines))

    def current(self, batch_id: str) -> Batch:
        """Return a known batch of any user."""
        return Batch.from_text(
            self._db.execute("SELECT record FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()[0]
        )

    def list_batches(self, owner: str, *, after: str, count: int) -> list[Batch] | None:
        """Return up to ``count`` batches older than ``after`` (empty: all), newest first; None if it is unknown."""
        place = self._place("batches", "batch_id", owner, after)
        if place is None:
            return None
        rows = self._page("batches", "record", "owner = ?", [owner], place, newest_first=True, count=count)
        return [Batch.from_text(row[0]) for row in rows]

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all users, the oldest first."""
        rows = self._db.execute("SELECT record FROM batches WHERE ended = 0 ORDER BY place")
        return [Batch.from_text(row[0]) for row in rows]

    def change(
        self, batch_id: str, change: Callable[[Batch], Batch], *, finished: Iterable[int] = (), kept_until_s: int = 0
    ) -> Batch:
        """Replace a batch by what ``change`` makes of it, and record finished lines, inside a transaction.

        ``kept_until_s``: time when the batch is forgotten, once it has ended.
        """
        key, text = self._db.execute("SELECT place, record FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
        batch = change(Batch.from_text(text))
        self._db.executemany("INSERT INTO finished VALUES (?, ?)", ((key, line) for line in finished))
        self._db.execute(
            "UPDATE batches SET ended = ?, expires_s = ?, record = ? WHERE place = ?",
            (batch.is_final, kept_until_s, batch.to_text(), key),
        )
        if batch.is_final:
            self._db.execute("DELETE FROM finished WHERE batch = ?", (key,))
        return batch

    def finished_lines(self, batch_id: str, *, first: int, last: int) -> set[int]:
        """Return the finished ones of the lines from ``first`` to ``last``."""
        rows = self._db.execute(
            "SELECT line FROM finished WHERE batch = (SELECT place FROM batches WHERE batch_id = ?) "
            "AND line BETWEEN ? AND ?",
            (batch_id, first, last),
        )
        return {row[0] for row in rows}

    def uses_file(self, file_id: str) -> str:
        """Return the id of an unfinished batch that reads the file; empty if none does."""
        found = self._db.execute(
            "SELECT batch_id FROM batches WHERE input_file = ? AND ended = 0", (file_id,)
        ).fetchone()
        return "" if found is None else found[0]

    def expired_files(self, now_s: int) -> list[StoredFile]:
        """Return files whose time is over and that no unfinished batch reads."""
        rows = self._db.execute(f"SELECT {_FILE_FIELDS} FROM files WHERE expires_s <= ?", (now_s,))
        return [file for file in map(_file, rows.fetchall()) if not self.uses_file(file.file_id)]

    def forget_batches(self, now_s: int) -> None:
        """Forget batches that ended long ago."""
        self._db.execute("DELETE FROM batches WHERE ended = 1 AND expires_s <= ?", (now_s,))

    def _place(self, table: str, column: str, owner: str, item_id: str) -> int | None:
        """Return the place of a user's file or batch: 0 without an id, None if it is unknown."""
        if not item_id:
            return 0
        found = self._db.execute(
            f"SELECT place FROM {table} WHERE {column} = ? AND owner = ?", (item_id, owner)
        ).fetchone()
        return None if found is None else found[0]

    def _page(
        self,
        table: str,
        columns: str,
        where: str,
        values: Sequence[str],
        place: int,
        *,
        newest_first: bool,
        count: int,
    ) -> list[tuple[str, ...]]:
        behind, order = ("<", "DESC") if newest_first else (">", "ASC")
        start = f" AND place {behind} {place}" if place else ""
        return self._db.execute(
            f"SELECT {columns} FROM {table} WHERE {where}{start} ORDER BY place {order} LIMIT {count}", values
        ).fetchall()


def _file(row: Sequence[object]) -> StoredFile:
    return StoredFile(**dict(zip(_FILE_FIELDS.split(", "), row, strict=True)))  # type: ignore[arg-type]
