"""The disk below a stage's host memory: a thread that copies blocks and states to an encrypted file and back.

The thread never makes a step wait, nor the loop. It works in the order of ``perform``. What belongs to an ended epoch
is dropped: ``begin_epoch`` returns after the last byte of it that could still reach host memory.

After a problem (a full disk, one that fails or hangs) each answer names it, until the engine asks for copies afresh:
then a new file is opened. The engine decides when (``scheduler/disk_works.py``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from edgepipe.backend.protocol import DiskBackend
from edgepipe.clock import Clock
from edgepipe.errors import RemoteProtocolError
from edgepipe.plain_words import plain
from edgepipe.stage.held_keys import HeldKeys
from edgepipe.stage.tier_file import Damaged, TierFile
from edgepipe.wire.tiers import DiskCopied, DiskCopies

T = TypeVar("T")

logger = logging.getLogger(__name__)

LATE_S = 20.0  # a disk that has not done a few copies by then hangs: even a slow one writes 100 MB in this time
_MOST_QUEUED = 8  # messages: an engine sends four, and those of an ended epoch may still be there
_MOST_COPIES = 256  # copies in one message
_HANGS = "the disk still hangs"
_CLOSE_S = 2.0  # time for the current copy; a disk that hangs is left behind


class DiskTier:
    """One stage's file and its thread. All methods are called on the loop."""

    def __init__(
        self,
        backend: DiskBackend,
        folder: Path,
        *,
        host_places: Sequence[int],
        disk_places: Sequence[int],
        clock: Clock,
        late_s: float = LATE_S,
        held: HeldKeys | None = None,
    ) -> None:
        """Open a file in ``folder``. A folder that cannot be used is a problem that each answer names.

        held    takes the keys of what is on disk
        late_s  time after which a disk counts as one that hangs
        """
        self._backend = backend
        self._folder = folder
        self._host_places, self._disk_places = tuple(host_places), tuple(disk_places)
        self._clock = clock
        self._late_s = late_s
        self._held = held or HeldKeys(host_places)
        self._problem = ""
        self._said = ""  # the newest problem that was logged
        self._file: TierFile | None = None
        self._epoch = 0  # copies of others are dropped
        self._lock = threading.Lock()  # held while host memory is written, and to change ``_epoch``
        self._num_queued = 0
        self._num_left = 0  # jobs that the thread has not ended
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._sizes = [sum(map(len, backend.host_place(number, 0))) for number in range(len(host_places))]
        self._open()
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes that the file takes."""
        file = self._file
        return file.num_bytes if file is not None else 0

    def begin_epoch(self) -> None:
        """Drop the copies that have not been made."""
        with self._lock:
            self._epoch += 1

    def forget(self) -> None:
        """Forget what is in the file: another engine begins."""
        self.begin_epoch()
        self._put(self._forget)

    async def perform(self, copies: DiskCopies) -> DiskCopied:
        """Make the copies of the open epoch, and return what became of them. Raises RemoteProtocolError."""
        check_copies(copies, self._host_places, self._disk_places, num_queued=self._num_queued)
        if copies.afresh and self._num_left:
            return self._copied(copies, failed=range(len(copies.host_places)), problem=self._problem or _HANGS)
        if copies.afresh:
            self._put(self._open if self._problem else self._forget)
        loop, epoch = asyncio.get_running_loop(), self._epoch
        answer: asyncio.Future[DiskCopied] = loop.create_future()
        self._num_queued += 1
        self._put(lambda: self._make(copies, epoch), lambda copied: loop.call_soon_threadsafe(_settle, answer, copied))
        try:
            async with asyncio.timeout(self._late_s):
                return await answer
        except TimeoutError:
            self.begin_epoch()  # what comes late reaches host memory no more
            self._fail(f"a few copies took more than {self._late_s:g} s")
            return self._copied(copies, failed=range(len(copies.host_places)))
        finally:
            self._num_queued -= 1

    async def close(self) -> None:
        """End the thread and free the disk's space. A disk that hangs is left to the end of the process."""
        self.begin_epoch()
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _put(self, job: Callable[[], T], done: Callable[[T], object] = lambda _: None) -> None:
        """Let the thread do a job, and then call ``done`` with its result."""

        def run() -> None:
            result = job()
            with self._lock:
                self._num_left -= 1
            done(result)

        with self._lock:
            self._num_left += 1
        self._jobs.put(run)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._close_file()

    def _open(self) -> None:
        """Begin with a new file, and without a problem."""
        self._close_file()
        self._problem = ""
        try:
            self._file = TierFile(self._folder, self._sizes, self._disk_places)
        except OSError as exc:
            self._fail(f"no file can be made in {self._folder}: {plain(exc)}")

    def _forget(self) -> None:
        self._held.lose_disk()
        if self._file is not None:
            self._file.forget()

    def _close_file(self) -> None:
        """Give the file's space back."""
        self._held.lose_disk()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _make(self, copies: DiskCopies, epoch: int) -> DiskCopied:
        begun_s, failed, number = self._clock.monotonic_s(), list[int](), copies.memory_class
        for index, (host, disk) in enumerate(zip(copies.host_places, copies.disk_places, strict=True)):
            try:
                done = (self._write if copies.out else self._read)(number, host, disk, epoch)
            except Exception as exc:
                self._fail(plain(exc))
                done = False
            if not done or self._problem:
                failed.append(index)
        if self._problem:
            self._close_file()
        if failed:
            return self._copied(copies, failed=failed)
        took_s = self._backend.disk_seconds(number, len(copies.host_places), self._clock.monotonic_s() - begun_s)
        return self._copied(copies, took_s=took_s)

    def _write(self, number: int, host: int, disk: int, epoch: int) -> bool:
        if self._file is None or self._problem:
            return False
        with self._lock:
            if epoch != self._epoch:
                return False  # the next engine may count on what the place holds
            copied = self._held.begin_write(number, host, disk)
        self._file.write(number, disk, self._backend.host_place(number, host))
        self._held.end_write(number, host, disk, copied)
        return True

    def _read(self, number: int, host: int, disk: int, epoch: int) -> bool:
        """Bring a place back. What was never written here is a copy that other stages have: this one lost its own."""
        if self._file is None or self._problem:
            return False
        try:
            found = self._file.read(number, disk)
        except Damaged:
            self._held.lose(number, disk)
            logger.warning("a copy on disk is damaged: its tokens are computed again")
            return False
        with self._lock:
            if epoch != self._epoch:
                return False
            if found is not None:
                _fill(self._backend.host_place(number, host), found)
            self._held.copied_back(number, host, disk)
        return True

    def _fail(self, problem: str) -> None:
        """Use the file no more. Say each problem once."""
        if self._problem:
            return
        self._problem = problem
        logger.log(
            logging.DEBUG if problem == self._said else logging.WARNING,
            "idle conversations do not go to disk for now: %s",
            problem,
        )
        self._said = problem

    def _copied(
        self, copies: DiskCopies, *, failed: Sequence[int] = (), took_s: float = 0.0, problem: str = ""
    ) -> DiskCopied:
        return DiskCopied(
            epoch=copies.epoch,
            number=copies.number,
            failed=tuple(failed),
            took_us=round(1e6 * took_s),
            problem=problem or self._problem,
        )


def check_copies(
    copies: DiskCopies, host_places: Sequence[int], disk_places: Sequence[int], *, num_queued: int
) -> None:
    """Raise RemoteProtocolError for places that a stage does not have, or too many copies.

    host_places, disk_places  numbers of places, by memory class
    num_queued                messages that wait already
    """
    number, count, problem = copies.memory_class, len(copies.host_places), ""
    if number >= len(disk_places):
        problem = f"they are of memory class {number}"
    elif count != len(copies.disk_places):
        problem = f"they name {count} places in host memory and {len(copies.disk_places)} on disk"
    elif not 0 < count <= _MOST_COPIES or num_queued >= _MOST_QUEUED:
        problem = f"they are {count}, and {num_queued} messages wait"
    elif max(copies.host_places) >= host_places[number]:
        problem = f"host memory has {host_places[number]} places"
    elif max(copies.disk_places) >= disk_places[number]:
        problem = f"the disk has {disk_places[number]} places"
    if problem:
        raise RemoteProtocolError(f"copies {copies.number} to or from disk are invalid", fact=problem)


def _fill(parts: Sequence[memoryview], found: bytes) -> None:
    begin = 0
    for part in parts:
        part[:] = memoryview(found)[begin : begin + len(part)]
        begin += len(part)


def _settle(answer: asyncio.Future[DiskCopied], copied: DiskCopied) -> None:
    if not answer.done():
        answer.set_result(copied)
