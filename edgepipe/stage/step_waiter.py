"""A thread that waits for the device, so that the compute thread can submit steps that arrive meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from edgepipe.backend.protocol import Ticket, WaitingBackend

_ROUNDS = 32  # waits on the thread after the last one in which a step arrived


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait for a submitted step."""

    backend: WaitingBackend
    ticket: Ticket


class StepWaiter:
    """Waits for one submitted step at a time, and then calls ``tell`` with the wait.

    The compute thread calls all methods. A wait on this thread costs one wake-up more than a wait on the compute
    thread. So the compute thread uses it only while steps arrive during waits (``pays``): in a stage with several
    batches, not for a lone chat.
    """

    def __init__(self, *, name: str, tell: Callable[[Wait], None]) -> None:
        self._tell = tell
        self._waits: SimpleQueue[Wait | None] = SimpleQueue()
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = False

    @property
    def pays(self) -> bool:
        """Whether a step arrived during one of the last waits."""
        return self._rounds > 0

    def note_wait(self, *, arrived: bool) -> None:
        """Note whether a step arrived during a wait, on either thread."""
        self._rounds = _ROUNDS if arrived else max(0, self._rounds - 1)

    def begin(self, backend: WaitingBackend, ticket: Ticket) -> Wait:
        """Begin to wait for a step. The thread has no other wait, except for steps that are collected already."""
        if not self._begun:
            self._thread.start()
            self._begun = True
        wait = Wait(backend, ticket)
        self._waits.put(wait)
        return wait

    def close(self) -> None:
        """End the thread."""
        if self._begun:
            self._waits.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (wait := self._waits.get()) is not None:
            with suppress(Exception):  # ``collect`` raises it on the compute thread
                wait.backend.wait(wait.ticket)
            self._tell(wait)
            del wait  # the step's output may be large
