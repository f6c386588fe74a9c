"""The nursery: a process that has imported what children need and forks one for each request of its daemon.

The daemon forks it before its own threads start (``daemon/processes/nursery.py``). A child is the daemon's own, not the
nursery's: the nursery forks a process that forks the child and ends, and the system hands the child to the daemon. A
child looks like a process that was started by itself: its own session, environment, streams and command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from edgepipe.config import enter_child_environment
from edgepipe.system import raise_descriptor_limit
from edgepipe.workers.settings import KINDS

MESSAGE_BYTES = 4096
_ARGUMENTS = slice(45, 47)  # of the fields after the name in /proc/self/stat: where the command line begins and ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A child to fork. Two descriptors travel beside it: a socket for its streams, and a stage's mark."""

    kind: str  # stage | engine | gateway
    threads: int  # compute threads; 0: as many as there are cores
    mark: int  # the number of the mark's descriptor within the child; -1: none

    def to_bytes(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()


def serve(control: socket.socket) -> NoReturn:
    """Fork children until the daemon closes its end of ``control``. The calling process never returns.

    Each answer is a number: the child's process id, or -errno if the system refuses.
    """
    try:
        _settle(control.fileno())
        for module in ("main", *KINDS):
            importlib.import_module(f"edgepipe.workers.{module}")
        gc.freeze()  # children share these objects' memory as long as no collection writes to them
        while True:
            data, passed, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
            if not data:
                break
            answer = _fork(ForkRequest(**json.loads(data)), passed)
            for descriptor in passed:
                os.close(descriptor)
            control.send(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _settle(control: int) -> None:
    """Let go of what the daemon has: its session, streams, descriptors, signal handlers and current folder."""
    os.setsid()  # only the daemon handles ^C of the terminal
    raise_descriptor_limit()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.unraisablehook = sys.__unraisablehook__
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _close_all_but(control)
    sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of libraries' sleeping threads
    _show_as("nursery")


def _fork(request: ForkRequest, passed: Sequence[int]) -> int:
    reader, writer = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                if os.fork() == 0:
                    os.setsid()  # before the daemon knows the process, whose group it may kill at once
                    os.write(writer, str(os.getpid()).encode())
                    _become(request, passed)
            finally:
                os._exit(0)
        os.waitpid(between, 0)
    except OSError as exc:
        return -(exc.errno or errno.EAGAIN)
    finally:
        os.close(writer)
        with open(reader, "rb") as source:
            pid = source.read()
    return int(pid) if pid else -errno.EAGAIN  # the second fork failed


def _become(request: ForkRequest, passed: Sequence[int]) -> NoReturn:
    """Run a child's main function in this process."""
    earlier = (sys.stdin, sys.stdout, sys.stderr)  # kept: a stream that nothing holds would close its descriptor
    try:
        for number in (0, 1, 2):
            os.dup2(passed[0], number)
        if request.mark >= 0:
            os.dup2(passed[1], request.mark)
        _close_all_but(request.mark)
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        enter_child_environment(threads=request.threads)
        sys.argv[1:] = [request.kind]
        _show_as(request.kind)
        importlib.import_module("edgepipe.workers.main").main()
    except SystemExit as exc:
        sys.stderr.write(f"{exc.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        del earlier
        os._exit(1)


def _close_all_but(kept: int) -> None:
    """Close all descriptors above those of the standard streams but one."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):  # the one that listed them is closed already
                os.close(number)


def _show_as(kind: str) -> None:
    """Let ``ps`` show the command line that a process of that kind has if the system starts it.

    It is written over the daemon's, and cut to its length. A last byte that is not 0 says that it is one text.
    """
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    begin, end = map(int, fields[_ARGUMENTS])
    most = end - begin - 2
    shown = f"{sys.executable} -P -m edgepipe.workers.main {kind}".encode()
    if len(shown) > most:
        shown = f"edgepipe.workers.main {kind}".encode()
    ctypes.memmove(begin, shown[:most].ljust(most + 1, b"\0") + b".", end - begin)
