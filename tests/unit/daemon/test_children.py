"""What the daemon knows of a child process."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edgepipe.config import Timeouts
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.errors import StageLost
from edgepipe.plain_words import plain
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.children import Introduced, IntroducedPeers
from tests.support.daemon.stage_settings import STAGE_SETTINGS


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    waits = "import sys; sys.stdin.read()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", waits, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    made = Child(STAGE_SETTINGS, process)
    made.introduce(())
    yield made
    made.kill()
    await process.wait()


async def _newest(child: Child) -> int:
    """The version of the peers that it was told of last."""
    async for command in child.commands():
        if child._commands.empty():  # pyright: ignore[reportPrivateUsage]
            assert isinstance(command.command, IntroducedPeers)
            return command.command.version
    return 0


async def test_a_child_that_answers_lives(child: Child) -> None:
    asking = asyncio.ensure_future(child.lives())
    await asyncio.sleep(0)
    child.take_report(Introduced(version=await _newest(child)))
    assert await asking


async def test_a_child_that_is_being_killed_does_not(child: Child) -> None:
    asking = asyncio.ensure_future(child.lives())
    await asyncio.sleep(0)
    assert not asking.done()  # its process stands
    child.kill()
    await child.process.wait()
    child.ended()
    assert not await asking
    assert child.state == "exited"


async def test_a_silent_child_is_believed_to_live(child: Child) -> None:
    silent = Child(child.settings, child.process, knows_s=0.01)
    silent.introduce(())
    assert await silent.lives()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EAGAIN])
async def test_a_process_that_the_system_cannot_start_is_a_failure_of_that_process(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node must survive it: a gateway that ran out of memory is restarted while memory is still short."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    children = Children(Timeouts.loopback(), FakeClock(), hang_check_s=1.0)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(StageLost, match="cannot be started") as caught:
            await children.start(STAGE_SETTINGS, tasks)
    assert caught.value.fact == plain(OSError(number, ""))
    assert children.running() == []
