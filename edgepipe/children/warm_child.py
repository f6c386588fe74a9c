"""A child process that is kept warm, for work that would block the loop or may have to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any, cast

from edgepipe.children.frames import HEAD
from edgepipe.children.user_turns import MAX_WAITING, UserTurns

_READ_BYTES = 1 << 20  # buffered part of an answer, before the child waits for its reader
_PROCESSES = 2  # most processes; the second one starts when two owners' requests meet
_READY_BYTES = 64  # limit of the frame that reports ready


class ChildEnded(Exception):
    """The child ended by itself, did not start, or was killed because its answer was too long.

    ``code``: exit code, negative for a signal.
    """

    def __init__(self, code: int | None, *, started: bool) -> None:
        super().__init__(code, started)
        self.code = code
        self.started = started


class _TooLong(Exception):
    """The answer exceeds the reader's limit. None of it was read."""


class WarmChild:
    """Runs ``python -m module``, which sends one frame when it is ready, then one answer for every frame.

    The first request starts it, and the next request after its end restarts it. It handles one request at a time. While
    it does so for one owner, a second process serves another one. So no owner's request waits for a single other
    owner's. Further owners take their turns.
    """

    def __init__(self, module: str, *, start_s: float, max_waiting: int = MAX_WAITING) -> None:
        """``max_waiting``: requests of one owner."""
        self._processes = [_ChildProcess(module, start_s=start_s) for _ in range(_PROCESSES)]
        self._free = list(reversed(self._processes))  # the last one is next: the one used last
        self._turns = UserTurns(max_running=_PROCESSES, max_of_owner=_PROCESSES - 1, max_waiting=max_waiting)

    async def start(self) -> None:
        """Start the first process now, so that the first request does not wait for it. Raises ChildEnded."""
        await self._processes[0].start()

    async def ask(self, *parts: bytes, within_s: float, most_bytes: int, owner: str = "") -> bytes:
        """Send a frame made of the parts and return the answer. Raises TimeoutError, ChildEnded and QueueFull.

        within_s    time of the child, without the wait for the owner's turn
        most_bytes  limit of the answer, because hostile data may control the child
        owner       user whose request it is: requests of several owners are handled in turns

        Any interruption ends the child, so that a late answer cannot match the next request.
        """
        async with self._turns.turn(owner):
            process = self._free.pop()
            try:
                return await process.ask(parts, within_s=within_s, most_bytes=most_bytes)
            finally:
                self._free.append(process)

    async def end(self) -> None:
        """Kill the processes. A later request starts a new one."""
        for process in self._processes:
            await process.end()

    async def close(self) -> None:
        """Kill the processes for good: later requests, and those that wait, raise ChildEnded."""
        for process in self._processes:
            process.closed = True
        await self.end()


class _ChildProcess:
    """One process of a ``WarmChild``."""

    def __init__(self, module: str, *, start_s: float) -> None:
        self._module = module
        self._start_s = start_s
        self._using = asyncio.Lock()  # the process: for one request, or to start or end it
        self._child: Process | None = None
        self.closed = False

    async def start(self) -> None:
        """See ``WarmChild.start``."""
        async with self._using:
            await self._ready()

    async def ask(self, parts: tuple[bytes, ...], *, within_s: float, most_bytes: int) -> bytes:
        """See ``WarmChild.ask``."""
        async with self._using:
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
        """See ``WarmChild.end``."""
        async with self._using:
            await self._end()

    async def _ready(self) -> Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self._end()
        if self.closed:
            raise ChildEnded(None, started=False)
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
        """Kill and reap the child. Return the exit code if it had ended by itself.

        ``ended``: its pipe broke, so the loop's watcher is about to reap it; a kill now would take the exit code away
        from the watcher.
        """
        child, self._child = self._child, None
        if child is None:
            return None
        try:
            if ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._start_s):
                        await child.wait()
            if child.returncode is None:
                try:
                    child.kill()
                except ProcessLookupError:
                    pass
            return await child.wait()
        finally:
            # Kills it if that has not happened yet, and frees the pipes now: asyncio offers no public way.
            cast("Any", child)._transport.close()


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
