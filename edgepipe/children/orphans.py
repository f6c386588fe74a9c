"""Children that a prepared process forks for its parent: without imports, and with the parent's id. Linux only.

The prepared process calls ``fork_orphan``, its parent waits for the answer within ``adopting_orphans``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


@contextlib.contextmanager
def adopting_orphans() -> Generator[None]:
    """Let this process become the parent of descendants whose parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def is_own(pid: int) -> bool:
    """Return whether a process is a child of this one: some containers do not let orphans be adopted."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return False
    return True


def fork_orphan(run: Callable[[], Any]) -> int:
    """Run ``run`` in a new process with a session of its own, whose parent is the one that adopts orphans.

    Returns its id, or -errno if the system refuses. The process ends when ``run`` returns.
    """
    reader, writer = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                if os.fork() == 0:
                    os.setsid()  # must come before the id is known: the parent may then kill the group at once
                    os.write(writer, str(os.getpid()).encode())
                    run()
            finally:
                os._exit(0)
        os.waitpid(between, 0)
    except OSError as exc:
        return -(exc.errno or errno.EAGAIN)
    finally:
        os.close(writer)
        with open(reader, "rb") as source:
            pid = source.read()  # reads to the end: ``run`` begins with ``take_streams``, which closes the other writer
    return int(pid) if pid else -errno.EAGAIN  # the second fork failed


def take_streams(streams: Sequence[int], *, kept: Sequence[int] = (), number: int = -1) -> object:
    """Make these three descriptors the standard streams and close all others. ``kept``: one more, as this number.

    Returns the earlier streams. The caller holds them, as a stream that nothing holds closes its descriptor.
    """
    earlier = (sys.stdin, sys.stdout, sys.stderr)
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    for descriptor in kept:
        os.dup2(descriptor, number)
    close_descriptors(but=number)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    return earlier


def close_descriptors(*, but: int) -> None:
    """Close all descriptors above those of the standard streams but one."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != but:
            with contextlib.suppress(OSError):  # the one that listed them is closed already
                os.close(number)
