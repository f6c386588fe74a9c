"""Cases R5 and R8 of the fault catalogue: disks that are full or cannot be written, at the start and later."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from edgepipe.cluster.founding import found_local_cluster, open_trust
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.daemon.machine.data_dir import DataDir
from edgepipe.daemon.network.remembered import RememberedAddresses
from edgepipe.errors import ConfigInvalid
from edgepipe.ids import PipelineId
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.engines import ServeSpec
from tests.support.daemon.serve_books import lone_book
from tests.support.processes.waiting import until


def refusing(number: int) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only")])
def test_a_start_on_such_a_disk_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    opened = DataDir(tmp_path / "node")
    monkeypatch.setattr(os, "fsync", refusing(number))
    with pytest.raises(ConfigInvalid, match="cannot be written") as caught:
        opened.next_incarnation(FakeClock())
    assert reason in caught.value.fact
    opened.close()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(os, "pwrite", refusing(number))
    with pytest.raises(ConfigInvalid, match="cannot be written"):
        DataDir(tmp_path / "node")


async def test_a_trust_store_that_cannot_be_written_works_on_and_is_written_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of a read-only disk cannot even have its rights set, which is told as another error."""
    found_local_cluster([tmp_path / name for name in "ab"], name="home")
    a, b = (
        open_trust(tmp_path / name, cluster="", node_name=name, clock=FakeClock(), write_again_s=0.01) for name in "ab"
    )
    (peer,) = [peer for peer in a.outbound() if peer.node_id == b.node_id]
    await a.promote(peer)
    keeper = asyncio.create_task(b.run())
    refuse, refused = refusing(errno.EROFS), 0

    def refuse_and_count(*args: object) -> None:
        nonlocal refused
        refused += 1
        refuse(*args)

    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "chmod", refuse_and_count)
        b.hear(a.node_id, digest=a.digest, statements=[statement.signed for statement in a.held().values()])
        await until(lambda: refused >= 2)
        assert not keeper.done(), "the node goes on"
        await until(lambda: bool(b.unwritten))
    assert _on_disk(tmp_path / "b") != b.digest
    await until(lambda: _on_disk(tmp_path / "b") == b.digest, timeout_s=5)
    keeper.cancel()


def _on_disk(folder: Path) -> bytes:
    again: TrustKeeper = open_trust(folder, cluster="", node_name="again", clock=FakeClock())
    return again.digest


async def test_what_is_served_is_known_though_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    book = lone_book(tmp_path)
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    keeper = asyncio.create_task(book.run())
    own = book._trust.key_pair.fingerprint
    book.ask(PipelineId("p"), ServeSpec(model="tiny"), engine_node=own)
    book.note_served(PipelineId("p"), ServeSpec(model="tiny"))
    await until(lambda: "were not written" in caplog.text, timeout_s=5)
    assert [record.spec.model for record in book.served()] == ["tiny"]
    assert not keeper.done()
    assert book.unwritten == "the disk is full"
    monkeypatch.undo()  # the disk has room again, and nothing else changes
    await until(lambda: [record.spec.model for record in lone_book(tmp_path).served()] == ["tiny"], timeout_s=30)
    await until(lambda: book.unwritten == "", timeout_s=5)
    keeper.cancel()


async def test_addresses_that_could_not_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remembered = RememberedAddresses(tmp_path / "addresses.json", write_again_s=0.01)
    keeper = asyncio.create_task(remembered.run())
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refusing(errno.ENOSPC))
        remembered.note("a", "10.0.0.1:7117")
        await until(lambda: "cannot be written" in caplog.text, timeout_s=30)
    await until(lambda: RememberedAddresses(tmp_path / "addresses.json").all() == {"a": "10.0.0.1:7117"}, timeout_s=30)
    keeper.cancel()
