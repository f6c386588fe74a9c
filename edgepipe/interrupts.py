"""^C, so that it is neither lost nor breaks an event loop while it closes.

Python raises KeyboardInterrupt wherever the main thread is. In a finalizer or the callback of a weak reference it is
dropped, since such code has no caller: the person's ^C is lost. In the callback of an event loop that closes, it turns
into a RuntimeError.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio
    from sys import UnraisableHookArgs

T = TypeVar("T")

_PAUSE_S = 0.01  # the callback that dropped the interrupt has ended by then


def keep_interrupts() -> None:
    """Let this process interrupt itself again whenever Python drops a KeyboardInterrupt."""
    usual = sys.unraisablehook

    def hook(dropped: UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Thread(target=_interrupt_soon, daemon=True).start()
        else:
            usual(dropped)

    sys.unraisablehook = hook


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in an event loop of its own. The first ^C cancels it; the loop closes in order; then it is raised.

    A second ^C is raised at once. Raises what ``work`` raises, and KeyboardInterrupt.
    """
    import asyncio  # only here: commands without a loop start faster

    if not _is_usual_handler():  # a thread, or a program that handles ^C itself
        return asyncio.run(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    pressed = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)

    async def cancellable() -> T:
        task = asyncio.ensure_future(work)
        running.append((asyncio.get_running_loop(), task))
        if pressed:
            task.cancel()
        try:
            return await task
        finally:
            running.clear()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        result = asyncio.run(cancellable())
    except BaseException as error:
        if not pressed:
            raise
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
    return result


def _is_usual_handler() -> bool:
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupt_soon() -> None:
    time.sleep(_PAUSE_S)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)  # wakes it from a wait
