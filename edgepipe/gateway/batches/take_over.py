"""Makes a copy of another node's batch a batch of this node: record, files and finished lines in one transaction."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from edgepipe.errors import RequestInvalid
from edgepipe.files.durable import sync_names
from edgepipe.gateway.batches.copies import Copy, resumed
from edgepipe.gateway.batches.copy_folder import CopyFolder, Reading
from edgepipe.gateway.batches.database import Database
from edgepipe.gateway.batches.records import Batch, StoredFile


class TakeOver:
    """One take-over: ``perform`` inside a transaction, then ``end``. A crash in between leaves the batch.

    The files get second names first; a crash before the transaction's end leaves the copy, and the next start removes
    files without a record.
    """

    def __init__(self, copy: Copy, *, copies: CopyFolder, files: Path, database: Database) -> None:
        self._copy = copy
        self._copies = copies
        self._files = files
        self._db = database
        self._known = database.find_file(copy.input.file_id)  # this node has the input already

    def perform(self, *, now_s: int) -> Batch:
        """Add the batch. Raises RequestInvalid, OSError."""
        copy, batch_id = self._copy, self._copy.batch.batch_id
        self._check_names(self._known)
        reading = Reading(self._copies, copy)
        self._db.forget_batch(batch_id)  # this node may have owned it before another one took it over
        for file_id in (copy.batch.output_file, copy.batch.error_file):
            self._db.remove_file(file_id)
        self._db.add_batch(copy.batch)
        self._db.add_finished(batch_id, (entry.number for entry in reading.entries()))
        batch = resumed(copy, reading.tally, now_s=now_s)
        self._db.change(batch_id, lambda _: batch, kept_until_s=now_s + batch.kept_s)
        if self._known is None:
            self._db.add_file(replace(copy.input, owner=batch.owner))
        self._link()
        return batch

    def end(self, batch: Batch) -> int:
        """Drop the copy, whose files have their new names. Return the bytes of files that are new here."""
        for file_id, size in ((batch.output_file, batch.output_bytes), (batch.error_file, batch.error_bytes)):
            path = self._files / file_id
            if path.exists():
                os.truncate(path, size)  # a part of an entry follows; the next start would cut it off, too
        self._copies.drop(batch.batch_id)
        new_input = self._copy.input.num_bytes if self._known is None else 0
        return batch.output_bytes + batch.error_bytes + new_input

    def _check_names(self, known: StoredFile | None) -> None:
        """Raise RequestInvalid if the copy's files would replace other files of this node, or read them."""
        batch = self._copy.batch
        before = self._db.find(batch.batch_id)
        own = (before.output_file, before.error_file) if before is not None else ()
        taken = [name for name in (batch.output_file, batch.error_file) if name not in own and self._db.find_file(name)]
        if taken or (known is not None and replace(known, owner="") != replace(self._copy.input, owner="")):
            raise RequestInvalid(
                f"the copy of {batch.batch_id} cannot be used",
                fact="this machine has other files with its names",
                next_step="run the file anew: edgepipe batch run IN.jsonl -o OUT.jsonl",
            )

    def _link(self) -> None:
        """Give the copy's files their names as files of this node; both names share the bytes. Raises OSError."""
        batch = self._copy.batch
        names = (batch.input_file if self._known is None else "", batch.output_file, batch.error_file)
        for number, file_id in enumerate(names):
            source = self._copies.path(self._copy, number)
            if file_id:
                (self._files / file_id).unlink(missing_ok=True)
                if source.exists():
                    os.link(source, self._files / file_id)
        sync_names(self._files)
