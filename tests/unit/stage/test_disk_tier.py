"""A stage's file for KV that leaves host memory: what comes back is what went there, or nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgepipe.backend.types import TierMove
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import EngineId, Epoch
from edgepipe.scheduler import Tier
from edgepipe.stage import tier_file
from edgepipe.stage.disk_tier import DiskTier
from edgepipe.stage.held_keys import HeldKeys
from edgepipe.stage.tier_file import PIECE_BYTES, Damaged, TierFile
from edgepipe.system import SystemClock
from edgepipe.wire.tiers import DiskCopied, DiskCopies, keys_of

PLACES, PARTS = 4, (3, 2 * PIECE_BYTES + 5, PIECE_BYTES - 3)


class Memory:
    """Host memory of one class, whose places are in three pieces; ``slow`` holds a copy up until it is set."""

    def __init__(self) -> None:
        self.places = [[bytearray(os.urandom(size)) for size in PARTS] for _ in range(PLACES)]
        self.slow: threading.Event | None = None
        self.asked = threading.Event()

    def host_place(self, number: int, kept: int) -> Sequence[memoryview]:
        """See ``DiskBackend``."""
        self.asked.set()
        if self.slow is not None:
            self.slow.wait()
        return [memoryview(part) for part in self.places[kept]]

    def disk_seconds(self, number: int, count: int, took_s: float) -> float:
        """See ``DiskBackend``."""
        return 0.25 * count


def tier(memory: Memory, folder: Path, *, late_s: float = 60.0, held: HeldKeys | None = None) -> DiskTier:
    places = {"host_places": (PLACES,), "disk_places": (8,)}
    return DiskTier(memory, folder, **places, clock=SystemClock(), late_s=late_s, held=held)


def copies(*pairs: tuple[int, int], out: bool, number: int = 1, memory_class: int = 0) -> DiskCopies:
    hosts, disks = zip(*pairs, strict=True)
    return DiskCopies(
        epoch=Epoch(1, EngineId("e")),
        number=number,
        memory_class=memory_class,
        out=out,
        host_places=hosts,
        disk_places=disks,
    )


async def test_places_come_back_elsewhere_byte_by_byte(tmp_path: Path) -> None:
    memory, folder = Memory(), tmp_path / "kv"
    disk = tier(memory, folder)
    before = [[bytes(part) for part in place] for place in memory.places]
    done = await disk.perform(copies((0, 7), (1, 2), out=True))
    assert done == DiskCopied(epoch=done.epoch, number=1, took_us=500_000)
    await disk.perform(copies((3, 7), (0, 2), out=False, number=2))
    assert [memory.places[3], memory.places[0], memory.places[1]] == [before[0], before[1], before[1]]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir()), "the file has no name"
    await disk.close()


def test_nothing_readable_is_in_the_file(tmp_path: Path) -> None:
    file = TierFile(tmp_path, [1000, 3 * PIECE_BYTES], [2, 3])
    secret = b"the ship sailed on over the dark sea" * 20
    file.write(0, 1, [memoryview(secret + bytes(1000 - len(secret)))])
    file.write(0, 1, [memoryview(secret + bytes(1000 - len(secret)))])
    descriptor = file._file  # pyright: ignore[reportPrivateUsage]
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    stored = os.pread(descriptor, 1 << 20, 0)
    assert secret[:16] not in stored
    assert file.read(0, 1) == secret + bytes(1000 - len(secret))
    assert file.read(0, 0) is None
    file.forget()
    assert file.read(0, 1) is None
    file.close()


@pytest.mark.parametrize("change", ["a bit", "another place", "an older copy", "cut off"])
def test_a_changed_copy_is_found(tmp_path: Path, change: str) -> None:
    size = PIECE_BYTES + 100
    file = TierFile(tmp_path, [size], [2])
    descriptor = file._file  # pyright: ignore[reportPrivateUsage]
    file.write(0, 0, [memoryview(os.urandom(size))])
    older = os.pread(descriptor, 2 * size, 0)
    for place in (0, 1):
        file.write(0, place, [memoryview(os.urandom(size))])
    if change == "a bit":
        (byte,) = os.pread(descriptor, 1, PIECE_BYTES + 50)
        os.pwrite(descriptor, bytes([byte ^ 1]), PIECE_BYTES + 50)
    elif change == "another place":
        os.pwrite(descriptor, os.pread(descriptor, len(older), len(older)), 0)
    elif change == "an older copy":
        os.pwrite(descriptor, older, 0)
    else:
        os.ftruncate(descriptor, PIECE_BYTES + 50)
    with pytest.raises(Damaged):
        file.read(0, 0)
    file.close()


async def test_a_damaged_copy_is_lost_and_the_others_come(tmp_path: Path) -> None:
    memory = Memory()
    disk = tier(memory, tmp_path)
    before = bytes(memory.places[1][0])
    await disk.perform(copies((0, 0), (1, 1), out=True))
    os.pwrite(disk._file._file, b"x", 10)  # pyright: ignore
    done = await disk.perform(copies((2, 0), (3, 1), out=False))
    assert (done.failed, done.problem) == ((0,), "")
    assert memory.places[3][0] == before
    await disk.close()


async def test_what_an_ended_epoch_reads_reaches_host_memory_no_more(tmp_path: Path) -> None:
    memory = Memory()
    disk = tier(memory, tmp_path)
    await disk.perform(copies((0, 0), out=True))
    memory.slow = threading.Event()
    disk._jobs.put(memory.slow.wait)  # pyright: ignore[reportPrivateUsage]
    reading = asyncio.create_task(disk.perform(copies((1, 0), out=False)))
    await asyncio.sleep(0)
    disk.begin_epoch()
    before = [bytes(part) for part in memory.places[1]]
    memory.slow.set()
    assert (await reading).failed == (0,)
    assert memory.places[1] == before
    await disk.close()


def with_keys(*places: int) -> HeldKeys:
    """The keys of these places in host memory: each has its number sixteen times."""
    held = HeldKeys([9])
    held.end(held.begin([TierMove(0, 0, place, out=True, key=bytes([place]) * 16) for place in places]))
    return held


def on_disk(held: HeldKeys) -> dict[bytes, int]:
    pages = [page for page in held.pages(Epoch(1, EngineId("e"))) if page.tier == Tier.DISK]
    return {key: place for page in pages for key, place in zip(keys_of(page.keys), page.places, strict=True)}


async def test_what_an_ended_epoch_would_write_does_not_replace_what_the_next_engine_may_take_over(
    tmp_path: Path,
) -> None:
    memory, held = Memory(), with_keys(0, 1)
    disk = tier(memory, tmp_path, held=held)
    await disk.perform(copies((0, 5), out=True))
    assert on_disk(held) == {bytes(16): 5}
    gate = threading.Event()
    disk._jobs.put(gate.wait)  # pyright: ignore[reportPrivateUsage]
    writing = asyncio.create_task(disk.perform(copies((1, 5), out=True)))
    await asyncio.sleep(0)
    disk.begin_epoch()
    gate.set()
    assert (await writing).failed == (0,)
    assert on_disk(held) == {bytes(16): 5}
    before = [bytes(part) for part in memory.places[0]]
    await disk.perform(copies((3, 5), out=False))
    assert memory.places[3] == before
    await disk.close()


async def test_what_is_damaged_or_was_in_an_older_file_has_no_key(tmp_path: Path) -> None:
    held = with_keys(0, 1, 2)
    disk = tier(Memory(), tmp_path, held=held)
    await disk.perform(copies((0, 0), (1, 1), out=True))
    os.pwrite(disk._file._file, b"x", 10)  # pyright: ignore
    await disk.perform(copies((3, 0), out=False))
    assert on_disk(held) == {bytes([1]) * 16: 1}
    await disk.perform(replace(copies((2, 2), out=True), afresh=True))
    assert on_disk(held) == {bytes([2]) * 16: 2}
    await disk.close()


async def test_a_disk_that_hangs_rests_at_once_until_it_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    disk = tier(memory, tmp_path, late_s=0.01)
    memory.slow = threading.Event()
    done = await disk.perform(copies((0, 0), out=True))
    assert (done.failed, done.problem) == ((0,), "a few copies took more than 0.01 s")
    assert caplog.text.count("do not go to disk for now") == 1
    afresh = await disk.perform(replace(copies((0, 0), out=True), afresh=True))
    assert (afresh.failed, afresh.problem) == ((0,), done.problem), "its thread still waits for the disk"
    disk._late_s = 60.0  # pyright: ignore[reportPrivateUsage]
    memory.slow.set()
    again = await disk.perform(copies((0, 0), out=True))
    assert (again.failed, again.problem) == ((0,), done.problem)
    memory.slow = None
    healed = await disk.perform(replace(copies((0, 0), (1, 1), out=True), afresh=True))
    assert (healed.failed, healed.problem) == ((), "")
    before = bytes(memory.places[1][0])
    await disk.perform(copies((3, 1), out=False))
    assert memory.places[3][0] == before
    await disk.close()


async def test_a_full_disk_gets_its_space_back_and_a_new_file_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    disk = tier(memory, tmp_path)
    await disk.perform(copies((0, 0), out=True))
    first = disk._file._file  # pyright: ignore
    monkeypatch.setattr(tier_file.os, "pwrite", no_space)
    for _ in range(2):
        full = await disk.perform(replace(copies((1, 1), out=True), afresh=True))
        assert (full.failed, full.problem) == ((0,), "the disk is full")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first)
    assert caplog.text.count("the disk is full") == 1
    monkeypatch.undo()
    healed = await disk.perform(replace(copies((1, 1), out=True), afresh=True))
    assert healed.problem == ""
    lost = await disk.perform(copies((2, 0), out=False))
    assert disk._file.read(0, 0) is None, "what lay there is gone"  # pyright: ignore
    assert lost.problem == ""
    await disk.close()


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_folder_that_cannot_be_made_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    disk = tier(Memory(), tmp_path / "kv")
    done = await disk.perform(copies((0, 0), out=True))
    assert done.failed == (0,)
    assert f"no file can be made in {tmp_path / 'kv'}" in done.problem
    await disk.close()


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        (copies((PLACES, 0), out=True), "host memory has 4 places"),
        (copies((0, 8), out=True), "the disk has 8 places"),
        (copies((0, 0), out=True, memory_class=1), "memory class 1"),
        (copies(*[(0, 0)] * 257, out=True), "they are 257"),
    ],
)
async def test_places_that_the_stage_does_not_have_are_refused(tmp_path: Path, wrong: DiskCopies, fact: str) -> None:
    disk = tier(Memory(), tmp_path)
    with pytest.raises(RemoteProtocolError, match="to or from disk are invalid") as refused:
        await disk.perform(wrong)
    assert fact in refused.value.fact
    await disk.close()
