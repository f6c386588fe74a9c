"""Starts nodes for tests by fork: imports are half of the processor time of a test with real nodes.

A test's process starts one nursery, which imports what nodes and their children need. A node that is forked from it
runs its ``__main__`` with the arguments, environment and streams that it has after ``exec``. Tests of the command line,
of nodes in a lab, and of a node's life start nodes as users do.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from edgepipe.children.orphans import adopting_orphans, fork_orphan, is_own, take_streams

_MESSAGE_BYTES = 1 << 17
_ANSWER_S = 60.0  # deadline of the first answer: a busy machine imports slowly
_MODULES = (
    "edgepipe.daemon.node",
    *(f"edgepipe.workers.{kind}" for kind in ("nursery", "main", "engine", "gateway", "stage")),
)


class ForkedNode:
    """A node that a test's nursery has forked; used as ``asyncio.subprocess.Process`` is."""

    def __init__(self, pid: int, *, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._note_end)

    async def wait(self) -> int:
        """Wait for its end. Return the exit status, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError after its end."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        """See ``send_signal``."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """See ``send_signal``."""
        self.send_signal(signal.SIGTERM)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


async def fork_node(module: str, arguments: Sequence[str], env: Mapping[str, str]) -> ForkedNode:
    """Run ``python -P -m module arguments`` with this environment, in a session of its own."""
    request = {"module": module, "arguments": list(arguments), "env": dict(env), "folder": os.getcwd()}
    (stdout, output), (stderr, errors) = await _pipe(), await _pipe()
    try:
        with adopting_orphans():
            control, _ = _nursery()
            socket.send_fds(control, [json.dumps(request).encode()], [output, errors])
            pid = int(control.recv(_MESSAGE_BYTES))
    finally:
        os.close(output)
        os.close(errors)
    assert pid > 0, os.strerror(-pid)
    assert is_own(pid)
    return ForkedNode(pid, stdout=stdout, stderr=stderr)


async def _pipe() -> tuple[asyncio.StreamReader, int]:
    reader, writer = os.pipe()
    stream = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", 0)
    )
    return stream, writer


@functools.cache
def _nursery() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the nursery of this process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_ANSWER_S)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def _serve(control: socket.socket) -> None:
    gc.disable()
    for module in _MODULES:
        __import__(module)
    gc.freeze()
    gc.enable()
    while True:
        data, passed, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
        if not data:
            return
        pid = fork_orphan(functools.partial(_become, json.loads(data), passed))
        for descriptor in passed:
            os.close(descriptor)
        control.send(str(pid).encode())


def _become(request: dict[str, Any], passed: list[int]) -> None:
    earlier = take_streams([0, *passed])
    status = 1
    try:
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        del earlier
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
