"""A child process that is kept warm: for work that would hold up the loop, or that may have to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any, cast

from edgepipe.model.frames import HEAD

_READ_BYTES = 1 << 20  # of an answer, before the child has to wait for its reader
_READY_BYTES = 64  # of the frame that says that the child is ready


class ChildEnded(Exception):
    """It ended by itself, did not start, or was killed for an answer that is too long.

    ``code``: its exit code, negative for a signal.
    """

    def __init__(self, code: int | None, *, started: bool) -> None:
        super().__init__(code, started)
        self.code = code
        self.started = started


class _TooLong(Exception):
    """The answer is longer than its reader takes; not one byte of it was read."""


class WarmChild:
    """Runs ``python -m module``, which says one frame when it is ready and then answers every frame with one.

    Started by the first question and again after it ended; one question at a time.
    """

    def __init__(self, module: str, *, start_s: float) -> None:
        self._module = module
        self._start_s = start_s
        self._turn = asyncio.Lock()
        self._child: Process | None = None

    async def start(self) -> None:
        """Start it now, so that the first question need not wait for it. Raises ChildEnded."""
        async with self._turn:
            await self._ready()

    async def ask(self, *parts: bytes, within_s: float, most_bytes: int) -> bytes:
        """The answer to a frame made of the parts. Raises TimeoutError and ChildEnded.

        most_bytes  bound of the answer: what works on foreign data in the child may have taken the child over

        Whatever interrupts it ends the child: a late answer must not meet the next question.
        """
        async with self._turn:
            child = await self._ready()
            try:
                async with asyncio.timeout(within_s):
                    return await _exchange(child, parts, most_bytes)
            except _TooLong as exc:
                raise ChildEnded(await self._end(), started=True) from exc
            except (asyncio.IncompleteReadError, ConnectionError) as exc:
                raise ChildEnded(await self._end(ended=True), started=True) from exc
            except BaseException:
                await self._end()
                raise

    async def end(self) -> None:
        """Kill it. It may be asked again afterwards."""
        async with self._turn:
            await self._end()

    async def _ready(self) -> Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self._end()
        command = (sys.executable, "-P", "-m", self._module)
        self._child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=_READ_BYTES
        )
        try:
            async with asyncio.timeout(self._start_s):
                await _receive(self._child, _READY_BYTES)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, _TooLong) as exc:
            raise ChildEnded(await self._end(), started=False) from exc
        except BaseException:
            await self._end()
            raise
        return self._child

    async def _end(self, *, ended: bool = False) -> int | None:
        """Kill and reap; the exit code if the child had ended by itself.

        ``ended``: its pipe broke, so it is about to be reaped; a kill now would look for it first and take its exit
        code away from the loop's watcher.
        """
        child, self._child = self._child, None
        if child is None:
            return None
        if ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._start_s):
                    await child.wait()
        if child.returncode is None:
            try:
                child.kill()
            except ProcessLookupError:
                pass
        code = await child.wait()
        cast("Any", child)._transport.close()  # frees the pipes now; asyncio offers no public way
        return code


async def _exchange(child: Process, parts: tuple[bytes, ...], most_bytes: int) -> bytes:
    if child.stdin is None:
        raise RuntimeError("the child was started without a pipe")
    child.stdin.write(HEAD.pack(sum(map(len, parts))))
    for part in parts:
        child.stdin.write(part)
    await child.stdin.drain()
    return await _receive(child, most_bytes)


async def _receive(child: Process, most_bytes: int) -> bytes:
    if child.stdout is None:
        raise RuntimeError("the child was started without a pipe")
    (length,) = HEAD.unpack(await child.stdout.readexactly(HEAD.size))
    if length > most_bytes:
        raise _TooLong(length)
    return await child.stdout.readexactly(length)
