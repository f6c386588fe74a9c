"""The nursery: a process that has imported what children need and forks one for each request of its daemon.

The daemon forks it before its own threads start (``daemon/processes/nursery.py``). A child is the daemon's own, not the
nursery's (``children/orphans.py``). It looks like a process that was started by itself: its own session, environment,
streams and command line.
"""

from __future__ import annotations

import ctypes
import functools
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

from edgepipe.children.orphans import close_descriptors, fork_orphan, take_streams
from edgepipe.config import enter_child_environment
from edgepipe.system import raise_descriptor_limit
from edgepipe.workers.settings import KINDS

MESSAGE_BYTES = 4096
_ARGUMENTS = slice(45, 47)  # fields after the name in /proc/self/stat: where the command line begins and ends


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
        gc.disable()  # imports make many objects, and no garbage
        for module in ("main", *KINDS):
            importlib.import_module(f"edgepipe.workers.{module}")
        gc.freeze()  # children share these objects' memory as long as no collection writes to them
        gc.enable()
        while True:
            data, passed, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
            if not data:
                break
            answer = fork_orphan(functools.partial(_become, ForkRequest(**json.loads(data)), passed))
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
    close_descriptors(but=control)
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of the program, or the current one
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of libraries' sleeping threads
    _show_as("nursery")


def _become(request: ForkRequest, passed: Sequence[int]) -> NoReturn:
    """Run a child's main function in this process."""
    earlier = None
    try:
        earlier = take_streams([passed[0]] * 3, kept=passed[1:], number=request.mark)
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
