"""^C at the moments at which Python or an event loop would lose it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_BEGIN = """
import asyncio, signal, time, weakref
from edgepipe.interrupts import keep_interrupts, run_interruptible
press = lambda: signal.raise_signal(signal.SIGINT)
"""


def _printed(program: str) -> str:
    """Run a program; return what it printed."""
    command = [sys.executable, "-c", _BEGIN + textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_an_interrupt_in_a_callback_of_a_weak_reference_is_not_lost() -> None:
    program = """
        keep_interrupts()
        class Thing: ...
        thing = Thing()
        weak = weakref.ref(thing, lambda _: press())
        try:
            del thing
            time.sleep(30)
            print("lost")
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert _printed(program) == "interrupted"


@pytest.mark.parametrize(
    ("what", "work"),
    [
        ("while it works", "press(); await asyncio.sleep(30)"),
        ("at its end", "press()"),
        ("while the loop closes", "await anext(left_open())"),
    ],
)
def test_the_loop_closes_before_the_interrupt_is_raised(what: str, work: str) -> None:
    program = f"""
        closed = []
        async def left_open():
            try:
                yield
            finally:
                press()
                await asyncio.sleep(0)
                closed.append(1)
        async def work():
            {work}
        try:
            run_interruptible(work())
            print("lost")
        except KeyboardInterrupt:
            print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    assert _printed(program) == "interrupted True", what


def test_a_second_interrupt_ends_work_that_does_not_stop() -> None:
    program = """
        async def work():
            asyncio.get_running_loop().call_later(0.1, press)
            asyncio.get_running_loop().call_later(0.2, press)
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await asyncio.sleep(30)
        try:
            run_interruptible(work())
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert _printed(program) == "interrupted"


def test_errors_and_results_of_the_work_pass() -> None:
    program = """
        async def answer():
            return 42
        async def fails():
            raise OSError("disk")
        try:
            run_interruptible(fails())
        except OSError as error:
            print(error, run_interruptible(answer()))
    """
    assert _printed(program) == "disk 42"
