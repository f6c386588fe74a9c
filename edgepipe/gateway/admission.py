"""Admission control: bounds the running and the waiting requests per key, and their memory."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from edgepipe.errors import QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits per key, except the memory. All requests without a key share one set of limits."""

    max_running: int = 256  # prompts; each may have several choices
    max_waiting: int = 64  # requests
    max_bytes: int = 384 << 20  # requests of all keys together; a body with the most token ids fits alone


@dataclass(slots=True)
class _Line:
    """Requests of one key."""

    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque["Ticket"])


class Admission:
    """Starts requests in order of arrival, per key. Runs on one event loop."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._lines: dict[str, _Line] = {}  # keys with a request
        self._held_bytes = 0

    @property
    def num_running(self) -> int:
        """Number of running prompts."""
        return sum(line.running for line in self._lines.values())

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(len(line.waiting) for line in self._lines.values())

    def enter(self, owner: str, *, num_prompts: int = 1, num_bytes: int = 0) -> Ticket:
        """Reserve a place for a request. Raises QueueFull. Leaving the ticket, a context manager, frees the place.

        ``num_bytes``: the request's memory in this process, as far as known.
        """
        if self._held_bytes + num_bytes > self._limits.max_bytes:
            raise QueueFull(
                "this gateway's requests would need too much memory",
                fact=f"they hold {self._held_bytes >> 20} MiB, this one needs {num_bytes / (1 << 20):.1f}; "
                f"the limit is {self._limits.max_bytes >> 20} MiB",
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
        """Add to a request's memory; negative: subtract."""
        self._held_bytes += more_bytes

    def leave(self, ticket: Ticket) -> None:
        """Free the place of a request that ended or stopped waiting."""
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
    """Place of one request."""

    def __init__(self, admission: Admission, owner: str, weight: int) -> None:
        self.owner = owner
        self.weight = weight
        self.held_bytes = 0
        self.admitted = asyncio.Event()
        self._admission = admission

    def grow(self, more_bytes: int) -> None:
        """Add to the request's memory."""
        self.held_bytes += more_bytes
        self._admission.grow(more_bytes)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)
