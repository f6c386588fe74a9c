"""Main of every child process: ``python -m edgepipe.workers.main stage|engine|gateway``, settings on standard input.

The process ends when the daemon says stop, when standard input ends (the daemon died), or on SIGTERM. It always ends
within the grace that the daemon gives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from edgepipe.config import Timeouts
from edgepipe.errors import EdgepipeError
from edgepipe.telemetry.log import not_of_a_hang_up, set_up_logging
from edgepipe.workers.daemon_link import DaemonLink
from edgepipe.workers.settings import KINDS, ChildSettings

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # a compute thread that waits for the interpreter idles its device; Python's default is 5 ms

Body = Callable[[ChildSettings, DaemonLink], Awaitable[None]]


def main() -> NoReturn:
    """Read the settings, run the kind's module, exit 0 after an orderly stop and 1 otherwise."""
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        if kind not in KINDS:
            raise SystemExit(f"usage: python -m edgepipe.workers.main {'|'.join(KINDS)}")
        settings = ChildSettings.from_line(sys.stdin.buffer.readline())
    except EdgepipeError as error:
        raise SystemExit("\n".join(error.lines())) from None
    set_up_logging(level=settings.log_level, layout="%(levelname)s %(name)s %(message)s")
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    grpc_log.setLevel(logging.ERROR)  # warns of every stream that a stop ends
    grpc_log.addFilter(not_of_a_hang_up)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    body: Body = importlib.import_module(f"edgepipe.workers.{kind}").run
    gc.freeze()  # imported objects stay: collections would delay steps by checking them
    status = uvloop.run(_live(settings, body))
    sys.stdout.flush()
    os._exit(status)  # libraries' threads and atexit hooks must not keep device memory a moment longer


async def _live(settings: ChildSettings, body: Body) -> int:
    link = DaemonLink(settings)
    stop = asyncio.Event()
    _stop_on(stop)
    work = asyncio.ensure_future(_work(settings, link, body, stop))
    carrier = asyncio.ensure_future(_carry(link, stop))
    await stop.wait()
    _end_for_sure()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    if link.has_reported:
        link.finish()
    else:
        carrier.cancel()  # the daemon never met this child
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(1.0):  # the last reports; the daemon may be gone
            await carrier
    return 1 if not work.cancelled() and work.result() else 0


async def _work(settings: ChildSettings, link: DaemonLink, body: Body, stop: asyncio.Event) -> bool:
    """Run the kind's module; return True if it failed, after reporting the failure."""
    try:
        await body(settings, link)
    except EdgepipeError as error:
        logger.error("%s", error)
        link.report(error)
        return True
    except Exception:
        logger.exception("a bug ended the %s process", settings.kind)
        return True
    finally:
        stop.set()
    return False


async def _carry(link: DaemonLink, stop: asyncio.Event) -> None:
    try:
        await link.run()
    except EdgepipeError as error:
        logger.error("%s", error)
    finally:
        stop.set()


def _stop_on(stop: asyncio.Event) -> None:
    """Stop on SIGTERM and at the end of standard input: the daemon died, or closed it."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), on_input)


def _end_for_sure() -> None:
    """Exit from a thread in case the loop hangs."""
    guard = threading.Timer(Timeouts.loopback().child_stop_s, os._exit, args=(1,))
    guard.daemon = True
    guard.start()


if __name__ == "__main__":
    main()
