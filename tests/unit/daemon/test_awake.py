"""The machine is kept awake exactly while it hosts something."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edgepipe.cluster.changes import Changes
from edgepipe.daemon.machine.awake import awake_command, keep_awake


@asynccontextmanager
async def lines_of(pipe: Path) -> AsyncIterator[asyncio.StreamReader]:
    """What programs write into a named pipe."""
    os.mkfifo(pipe)
    reader = asyncio.StreamReader()
    file = os.fdopen(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    yield reader
    transport.close()


async def test_it_runs_while_the_node_hosts(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    script = f"trap 'echo ended > {pipe}; exit' TERM; echo began > {pipe}; while :; do sleep 0.05; done"
    changes, hosts = Changes(), False
    task = asyncio.create_task(keep_awake(lambda: hosts, changes.watch, ("/bin/sh", "-c", script)))
    async with asyncio.timeout(20), lines_of(pipe) as said:
        await asyncio.sleep(0)
        for expected in (b"began\n", b"ended\n", b"began\n"):
            hosts = not hosts
            changes.notify()
            assert await said.readline() == expected
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await said.readline() == b"ended\n"


async def test_a_missing_program_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes()
    async with asyncio.timeout(10):
        await keep_awake(lambda: True, changes.watch, ("/nowhere/caffeinate",))
    assert "may fall asleep" in caplog.text


def test_only_macs_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert awake_command() == ()
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert awake_command()[:3] == ("/usr/bin/caffeinate", "-i", "-s")
