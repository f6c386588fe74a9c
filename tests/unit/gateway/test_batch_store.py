"""The folder of files and batches: what is counted is on the disk, whatever breaks in between."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgepipe.errors import CapacityError, ConfigInvalid, DiskFull
from edgepipe.gateway.batches import store as store_module
from edgepipe.gateway.batches.lines import Outcome, Place, error_entry
from edgepipe.gateway.batches.records import Batch, CheckedInput, IllegalChange, StoredFile, TokenUsage
from edgepipe.gateway.batches.store import FilesSettings, Store

NOW_S = 1_000_000
DAY_S = 24 * 3600


def settings_of(folder: Path) -> FilesSettings:
    return FilesSettings(folder=folder / "batches", least_free_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(settings_of(tmp_path))
    yield made
    made.close()


def put(store: Store, data: bytes, *, file_id: str = "file-in", owner: str = "a", now_s: int = NOW_S) -> StoredFile:
    """Upload a file."""
    upload = store.new_upload(file_id)
    upload.write(data)
    file = StoredFile(
        file_id=file_id,
        owner=owner,
        num_bytes=len(data),
        created_s=now_s,
        expires_s=now_s + 30 * DAY_S,
        filename="in.jsonl",
        purpose="batch",
    )
    store.keep(upload, file)
    return file


def begin(store: Store, *, batch_id: str = "batch_1", owner: str = "a", num_lines: int = 20) -> Batch:
    """A batch that computes."""
    batch = Batch(
        batch_id=batch_id,
        owner=owner,
        endpoint="/v1/completions",
        input_file="file-in",
        completion_window="24h",
        created_s=NOW_S,
        expires_s=NOW_S + DAY_S,
        output_file=f"{batch_id}-out",
        error_file=f"{batch_id}-err",
        kept_s=30 * DAY_S,
    )
    store.add_batch(batch)
    return store.checked(batch, CheckedInput(num_lines=num_lines), now_s=NOW_S)


def outcome(number: int, *, good: bool = True) -> Outcome:
    entry = error_entry(entry_id="e", custom_id=f"c{number}", number=number, code="x", message="m" * (number % 7))
    return Outcome(number=number, entry=entry, succeeded=good, usage=TokenUsage(completion=1))


def numbers(path: Path, size: int) -> list[int]:
    """The lines whose results a file has in its durable part."""
    return [json.loads(text)["line"] for text in path.read_bytes()[:size].splitlines()] if size else []


def test_files_are_private_and_belong_to_one_user(store: Store, tmp_path: Path) -> None:
    file = put(store, b"{}\n")
    for path in (tmp_path / "batches").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert store.file("a", "file-in") == file
    assert store.file("b", "file-in") is None
    begin(store)
    assert store.batch("b", "batch_1") is None
    assert store.list_batches("b", after="", count=9) == []
    assert store.list_batches("b", after="batch_1", count=9) is None


def test_pages(store: Store) -> None:
    for number in range(7):
        put(store, b"x", file_id=f"file-{number}")
    put(store, b"x", file_id="file-other", owner="b")
    for newest_first in (True, False):
        wanted = [f"file-{number}" for number in range(7)]
        after, found = "", list[str]()
        while page := store.list_files("a", purpose="", after=after, newest_first=newest_first, count=3):
            found += [file.file_id for file in page]
            after = found[-1]
        assert found == (wanted[::-1] if newest_first else wanted)
    assert store.list_files("a", purpose="batch_output", after="", newest_first=True, count=9) == []
    assert store.list_files("a", purpose="", after="file-other", newest_first=True, count=9) is None


def test_a_second_gateway_does_not_open_the_folder(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        Store(settings_of(tmp_path))
    store.close()
    Store(settings_of(tmp_path)).close()


def test_a_newer_database_is_left_alone(store: Store, tmp_path: Path) -> None:
    store.close()
    with sqlite3.connect(tmp_path / "batches" / "batches.sqlite3") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigInvalid, match="newer"):
        Store(settings_of(tmp_path))


def test_a_crash_at_any_point_loses_no_counted_line_and_repeats_none(store: Store, tmp_path: Path) -> None:
    """The folder is copied at random moments, as a power cut leaves it, with a torn tail of the files."""
    put(store, b"".join(b'{"line": %d}\n' % number for number in range(1, 21)))
    begin(store)
    rng = random.Random(1)
    waiting, snapshots = list(range(1, 21)), list[Path]()
    batch: Batch | None = None
    while waiting:
        group = [waiting.pop(rng.randrange(len(waiting))) for _ in range(min(len(waiting), rng.randrange(1, 5)))]
        batch = store.record("batch_1", [outcome(number, good=number % 3 > 0) for number in group])
        torn = tmp_path / f"torn-{len(waiting)}"
        shutil.copytree(tmp_path / "batches", torn / "batches")
        for name in ("batch_1-out", "batch_1-err"):
            with (torn / "batches" / "files" / name).open("ab") as file:
                file.write(b'{"line": 99, "cut')
        snapshots.append(torn)
    assert batch is not None
    assert batch.all_lines_done
    for torn in snapshots:
        again = Store(settings_of(torn))
        (found,) = again.unfinished()
        done = [
            number
            for name, size in (("batch_1-out", found.output_bytes), ("batch_1-err", found.error_bytes))
            for number in numbers(again.path_of(name), again.path_of(name).stat().st_size if size else 0)
        ]
        assert len(done) == len(set(done)) == found.completed + found.failed == found.usage.completion
        rest = list[int]()
        place, before = Place(), None
        while place != before:
            before = place
            lines, place = again.next_lines(found, place)
            rest += [line.number for line in lines]
        assert sorted(done + rest) == list(range(1, 21))
        found = again.record("batch_1", [outcome(number) for number in rest]) if rest else found
        ended = again.finish(
            again.change("batch_1", lambda now: now.finalizing("completed", now_s=NOW_S + 5)),
            lambda now: now.ended(now_s=NOW_S + 6),
            now_s=NOW_S + 6,
        )
        assert (ended.status, ended.completed + ended.failed) == ("completed", 20)
        output = again.file("a", "batch_1-out")
        assert output is not None
        assert output.num_bytes == again.path_of("batch_1-out").stat().st_size
        again.close()


def test_a_full_disk_changes_nothing_and_room_lets_it_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, b"{}\n" * 20)
    begin(store)
    before = store.record("batch_1", [outcome(1)])
    real = os.fsync
    calls = itertools.count()

    def full(file: int) -> None:
        if next(calls) < 2:
            raise OSError(errno.ENOSPC, "no space")
        real(file)

    monkeypatch.setattr(store_module.os, "fsync", full)
    for _ in range(2):
        with pytest.raises(DiskFull, match="full"):
            store.record("batch_1", [outcome(2), outcome(3, good=False)])
        assert store.batch("a", "batch_1") == before
        assert store.path_of("batch_1-out").stat().st_size == before.output_bytes
    after = store.record("batch_1", [outcome(2), outcome(3, good=False)])
    assert (after.completed, after.failed) == (2, 1)
    assert numbers(store.path_of("batch_1-out"), after.output_bytes) == [1, 2]


def test_little_free_space_counts_as_full(tmp_path: Path) -> None:
    store = Store(FilesSettings(folder=tmp_path / "batches", least_free_bytes=1 << 60))
    with pytest.raises(DiskFull):
        put(store, b"x")
    assert list((tmp_path / "batches" / "files").iterdir()) == []
    store.close()


def test_what_a_crash_left_is_removed(store: Store, tmp_path: Path) -> None:
    put(store, b"x")
    (tmp_path / "batches" / "files" / "file-half.part").write_bytes(b"half")
    (tmp_path / "batches" / "files" / "file-orphan").write_bytes(b"orphan")
    store.close()
    again = Store(settings_of(tmp_path))
    assert [path.name for path in (tmp_path / "batches" / "files").iterdir()] == ["file-in"]
    assert again.held_bytes() == {"a": 1}
    again.close()


def test_files_expire_unless_a_batch_reads_them(store: Store) -> None:
    file = put(store, b"{}\n")
    put(store, b"x", file_id="file-other", owner="b")
    batch = begin(store, num_lines=1)
    assert store.delete_file(file) == "batch_1"
    later_s = NOW_S + 31 * DAY_S
    assert [gone.file_id for gone in store.expire(later_s)] == ["file-other"]
    store.record("batch_1", [outcome(1)])
    finished = store.change("batch_1", lambda now: now.finalizing("completed", now_s=NOW_S))
    store.finish(finished, lambda now: now.ended(now_s=NOW_S), now_s=NOW_S)
    assert {gone.file_id for gone in store.expire(later_s)} == {"file-in", "batch_1-out"}
    assert store.batch("a", batch.batch_id) is None
    assert store.held_bytes() == {}


def test_a_change_that_is_not_allowed_leaves_the_batch(store: Store) -> None:
    put(store, b"{}\n")
    begin(store, num_lines=1)
    cancelled = store.change("batch_1", lambda now: now.cancelled(now_s=NOW_S))
    store.finish(cancelled, lambda now: now.ended(now_s=NOW_S), now_s=NOW_S)
    with pytest.raises(IllegalChange):
        store.change("batch_1", lambda now: now.cancelled(now_s=NOW_S))
    with pytest.raises(IllegalChange):
        store.record("batch_1", [outcome(1)])
    found = store.batch("a", "batch_1")
    assert found is not None
    assert found.status == "cancelled"
    assert store.file("a", "batch_1-out") is None
