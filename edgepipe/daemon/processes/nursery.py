"""The daemon's side of the nursery, a process from which it forks children; see ``workers/nursery.py``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading

from edgepipe.children.orphans import adopting_orphans, is_own
from edgepipe.config import forks_safely
from edgepipe.workers.nursery import MESSAGE_BYTES, ForkRequest, serve

logger = logging.getLogger(__name__)


class ForkedProcess:
    """A child of this process that the nursery has forked; used as ``asyncio.subprocess.Process`` is."""

    def __init__(self, pid: int, *, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout  # its errors, too
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)  # the system keeps the id until this process has waited for its end
        asyncio.get_running_loop().add_reader(self._descriptor, self._note_end)

    async def wait(self) -> int | None:
        """Wait for its end. Return the exit status, negative for a signal."""
        await self._ended.wait()
        self.stdin.close()
        return self.returncode

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class Nursery:
    """The process that forks children. Once it has ended, the daemon starts them by ``exec``."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._control: socket.socket | None = control
        self._pid = pid
        self._one_request = asyncio.Lock()

    async def fork(self, request: ForkRequest, *, mark: int, within_s: float, limit: int) -> ForkedProcess | None:
        """Fork a child. Return None if the nursery has ended. Raises OSError if the system refuses.

        mark      descriptor to pass on as ``request.mark``
        limit     longest line of the child's output, bytes
        within_s  a nursery that takes longer hangs and is ended
        """
        async with self._one_request:
            if self._control is None:
                return None
            ours, theirs = socket.socketpair()
            with theirs:
                stdout, stdin = await asyncio.open_connection(sock=ours, limit=limit)
                passed = [theirs.fileno(), *([mark] if mark >= 0 else ())]
                answer = await self._ask(self._control, request, passed, within_s=within_s)
            if answer > 0 and is_own(answer):
                return ForkedProcess(answer, stdin=stdin, stdout=stdout)
            stdin.close()
            if answer < 0:
                raise OSError(-answer, os.strerror(-answer))
            logger.warning("the nursery has ended or cannot be used: children start by themselves from now on")
            self.end()
            return None

    def end(self) -> None:
        """End the nursery; its children go on. May be called twice."""
        if self._control is not None:
            self._control.close()
            self._control = None
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    async def _ask(self, control: socket.socket, request: ForkRequest, passed: list[int], *, within_s: float) -> int:
        """Return the id of the child that was forked, -errno if the system refused, 0 if the nursery does not answer.

        An interrupted request ends the nursery: its late answer would belong to the next one. A child that was forked
        meanwhile ends by itself, at the end of its standard input.
        """
        try:
            with adopting_orphans():
                socket.send_fds(control, [request.to_bytes()], passed)
                async with asyncio.timeout(within_s):
                    await _until_readable(control.fileno())
                return json.loads(control.recv(MESSAGE_BYTES) or b"0")
        except OSError:  # TimeoutError, too
            return 0
        except BaseException:
            self.end()
            raise


def start_nursery() -> Nursery | None:
    """Fork the nursery from this process, which must have no thread yet. Return None where that is not safe."""
    if sys.platform != "linux" or threading.active_count() > 1 or not forks_safely():
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # else both processes would write what is buffered
    pid = os.fork()
    if pid == 0:
        serve(theirs)
    theirs.close()
    ours.setblocking(False)
    return Nursery(ours, pid)


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
