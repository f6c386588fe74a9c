"""Admission control: bounds the running and the waiting requests of each user, and their memory."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from edgepipe.errors import QueueFull
from edgepipe.gateway.shares import Shares, memory_shares

_CHOICE_TOKENS = 64  # what a choice costs at least until its first token; so the engine's queue has room for 16 users


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits per line, except the memory."""

    max_running: int = 256  # choices: as many as an engine computes at a time; a request with more runs alone
    max_beginning: int = 4  # running requests without a first token, or more of them that have together at most:
    max_beginning_tokens: int = (
        4096  # tokens of their prompts, for each step of the ring: another prompt waits for them
    )
    max_waiting: int = 64  # requests beyond those that fit into ``max_running``
    max_bytes: int = 384 << 20  # bodies and requests of all users; a body with the most token ids fits into 3/4 of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Requests that wait for each other: those of one user, model and priority."""

    owner: str
    model: str = ""
    priority: int = 0


@dataclass(slots=True)
class _Places:
    """Requests of one line."""

    prompts: int = 0  # running
    running: int = 0  # choices
    beginning: int = 0  # running requests without a first token
    beginning_tokens: int = 0  # of these: see ``Ticket``
    num_steps: int = 1  # that the model's ring computes at a time, as last reported
    waiting: deque[Ticket] = field(default_factory=deque["Ticket"])


class Admission:
    """Starts requests in order of arrival, per line. Runs on one event loop.

    An engine reads prompts in order of arrival, of all users alike. So only few prompts of a line are there at a time
    without a first token: another user's prompt waits for these at most, not for all that wait here.
    """

    def __init__(self, limits: AdmissionLimits, memory: Shares | None = None) -> None:
        """``memory``: shares of ``max_bytes`` that others use, too."""
        self._limits = limits
        self._lines: dict[Line, _Places] = {}  # lines with a request
        self.memory = memory or memory_shares(limits.max_bytes)

    @property
    def num_running(self) -> int:
        """Number of running prompts."""
        return sum(places.prompts for places in self._lines.values())

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(len(places.waiting) for places in self._lines.values())

    def enter(
        self,
        line: Line,
        *,
        num_prompts: int = 1,
        num_choices: int = 1,
        num_tokens: int = 0,
        num_bytes: int = 0,
        num_steps: int = 1,
    ) -> Ticket:
        """Reserve a place for a request. Raises QueueFull. Leaving the ticket, a context manager, frees the place.

        num_choices  of all prompts
        num_tokens   of all prompts
        num_bytes    the request's memory in this process, as far as known
        num_steps    steps that the model's ring computes at a time: so many times ``max_beginning_tokens`` begin
        """
        num_choices = min(num_choices, self._limits.max_running)
        ticket = Ticket(self, line, num_prompts=num_prompts, num_choices=num_choices, num_tokens=num_tokens)
        ticket.memory.take(num_bytes)
        places = self._lines.setdefault(line, _Places())
        places.num_steps = num_steps
        if self._num_beyond(places, ticket) > self._limits.max_waiting:
            ticket.memory.release()
            raise QueueFull(
                "too many requests are waiting",
                fact=f"{places.running} choices of this user run and {len(places.waiting)} requests wait; at most "
                f"{self._limits.max_running} choices may run, and {self._limits.max_waiting} requests wait beyond them",
                next_step="try again in a moment",
            )
        places.waiting.append(ticket)
        self._start(line, places)
        return ticket

    def began(self, ticket: Ticket) -> None:
        """Record the first token of a request."""
        places = self._lines[ticket.line]
        self._count_beginning(places, ticket, -1)
        self._start(ticket.line, places)

    def leave(self, ticket: Ticket) -> None:
        """Free the place of a request that ended or stopped waiting."""
        places = self._lines[ticket.line]
        ticket.memory.release()
        if ticket.admitted.is_set():
            places.prompts -= ticket.num_prompts
            places.running -= ticket.num_choices
            if not ticket.has_begun:
                self._count_beginning(places, ticket, -1)
        else:
            places.waiting.remove(ticket)
        self._start(ticket.line, places)

    def _start(self, line: Line, places: _Places) -> None:
        """Admit the first waiting requests for which there is room."""
        while places.waiting and self._fits(places, places.waiting[0]):
            ticket = places.waiting.popleft()
            places.prompts += ticket.num_prompts
            places.running += ticket.num_choices
            self._count_beginning(places, ticket, 1)
            ticket.admitted.set()
        if not places.running and not places.waiting:
            del self._lines[line]

    def _num_beyond(self, places: _Places, ticket: Ticket) -> int:
        """Return how many waiting requests, this one included, have no place among the running ones."""
        room, beyond = self._limits.max_running - places.running, 0
        for each in (*places.waiting, ticket):
            fits = not beyond and each.num_choices <= room
            room -= each.num_choices if fits else 0
            beyond += not fits
        return beyond

    def _fits(self, places: _Places, ticket: Ticket) -> bool:
        if places.running + ticket.num_choices > self._limits.max_running:
            return False
        tokens = places.beginning_tokens + ticket.beginning_tokens
        most = self._limits.max_beginning_tokens * places.num_steps
        return places.beginning < self._limits.max_beginning or tokens <= most

    @staticmethod
    def _count_beginning(places: _Places, ticket: Ticket, sign: int) -> None:
        places.beginning += sign
        places.beginning_tokens += sign * ticket.beginning_tokens


class Ticket:
    """Place of one request."""

    def __init__(
        self, admission: Admission, line: Line, *, num_prompts: int, num_choices: int, num_tokens: int
    ) -> None:
        self.line = line
        self.num_prompts = num_prompts
        self.num_choices = num_choices
        self.beginning_tokens = num_tokens + _CHOICE_TOKENS * num_choices
        self.memory = admission.memory.holding(line.owner)
        self.admitted = asyncio.Event()
        self.has_begun = False
        self._admission = admission

    def began(self) -> None:
        """Record the request's first token; further calls have no effect."""
        if not self.has_begun:
            self.has_begun = True
            self._admission.began(self)

    def grow(self, more_bytes: int) -> None:
        """Add to the request's memory."""
        self.memory.add(more_bytes)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)
