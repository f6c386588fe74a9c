"""How many requests run at once, and how many wait for that."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from edgepipe.errors import QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Per key, but for the memory; whoever asks without one shares the place of nobody's key."""

    max_running: int = 256  # prompts; each may have several choices
    max_waiting: int = 64  # requests
    max_bytes: int = 384 << 20  # of all requests of all keys: the largest body of token ids fits alone


@dataclass(slots=True)
class _Line:
    """One key's requests."""

    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque["Ticket"])


class Admission:
    """Lets requests run in the order in which they came, per key. Runs on one event loop."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._lines: dict[str, _Line] = {}  # of keys that have a request
        self._held_bytes = 0

    @property
    def num_running(self) -> int:
        """Prompts that run."""
        return sum(line.running for line in self._lines.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return sum(len(line.waiting) for line in self._lines.values())

    def enter(self, owner: str, *, num_prompts: int = 1, num_bytes: int = 0) -> Ticket:
        """A place for a request. Raises QueueFull. The ticket is a context manager: leaving it gives the place back.

        ``num_bytes``: what the request takes of this process's memory, as far as it is known.
        """
        if self._held_bytes + num_bytes > self._limits.max_bytes:
            raise QueueFull(
                "the requests that run and wait here are too large together",
                fact=f"they take {self._held_bytes >> 20} MiB of memory, this one {num_bytes / (1 << 20):.1f}; "
                f"{self._limits.max_bytes >> 20} MiB are the most",
                next_step="try again in a moment",
            )
        line = self._lines.setdefault(owner, _Line())
        weight = min(num_prompts, self._limits.max_running)
        ticket = Ticket(self, owner, weight)
        if not line.waiting and line.running + weight <= self._limits.max_running:
            line.running += weight
            ticket.admitted.set()
        elif len(line.waiting) < self._limits.max_waiting:
            line.waiting.append(ticket)
        else:
            raise QueueFull(
                "too many requests are waiting",
                fact=f"{line.running} prompts run and {len(line.waiting)} requests wait",
                next_step="try again in a moment",
            )
        ticket.grow(num_bytes)
        return ticket

    def grow(self, more_bytes: int) -> None:
        """A request takes more memory than before, or less."""
        self._held_bytes += more_bytes

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, or does not wait any longer."""
        line = self._lines[ticket.owner]
        self.grow(-ticket.held_bytes)
        if ticket.admitted.is_set():
            line.running -= ticket.weight
        else:
            line.waiting.remove(ticket)
        while line.waiting and line.running + line.waiting[0].weight <= self._limits.max_running:
            following = line.waiting.popleft()
            line.running += following.weight
            following.admitted.set()
        if not line.running and not line.waiting:
            del self._lines[ticket.owner]


class Ticket:
    """One request's place."""

    def __init__(self, admission: Admission, owner: str, weight: int) -> None:
        self.owner = owner
        self.weight = weight
        self.held_bytes = 0
        self.admitted = asyncio.Event()
        self._admission = admission

    def grow(self, more_bytes: int) -> None:
        """The request takes so much more memory."""
        self.held_bytes += more_bytes
        self._admission.grow(more_bytes)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)
