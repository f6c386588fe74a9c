"""Admission control: bounds the running and the waiting requests of each user, and their memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from edgepipe.errors import EdgepipeError, QueueFull
from edgepipe.gateway.shares import Shares, memory_shares

_CHOICE_TOKENS = 64  # least cost of a choice until its first token; so the engine's queue has room for 16 users


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits per line, except the memory."""

    max_running: int = 192  # choices: 3/4 of those that an engine computes at a time, so other users find places
    max_beginning: int = 4  # running prompts without a first token, or more of them that have together at most:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of a request that starts at once: one prompt."""

    num_choices: int = 1
    num_tokens: int = 0

    @property
    def beginning_tokens(self) -> int:
        """What the part costs until its first token, in tokens."""
        return self.num_tokens + _CHOICE_TOKENS * self.num_choices


@dataclass(slots=True)
class _Places:
    """Requests of one line."""

    requests: int = 0  # running and waiting
    prompts: int = 0  # running prompts
    running: int = 0  # running choices
    beginning: int = 0  # running prompts without a first token
    beginning_tokens: int = 0  # tokens that the prompts without a first token cost, see ``Part``
    num_steps: int = 1  # steps that the model's rings compute at a time, as last reported
    num_engines: int = 1  # pipelines of the model, as last reported
    waiting: deque[Ticket] = field(default_factory=deque["Ticket"])  # requests with a part that has not started


class Admission:
    """Starts requests in order of arrival, per line. Runs on one event loop.

    A request with many prompts starts prompt by prompt, as earlier choices of its line end. Later requests wait until
    its last prompt has started. A started prompt waits for no other, so each line advances.

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
        """Number of waiting requests; none of their prompts has started."""
        return sum(not ticket.admitted.is_set() for places in self._lines.values() for ticket in places.waiting)

    def enter(
        self,
        line: Line,
        *,
        parts: Sequence[Part] = (Part(),),
        num_bytes: int = 0,
        num_steps: int = 1,
        num_engines: int = 1,
    ) -> Ticket:
        """Reserve a place for a request. Raises QueueFull. Leaving the ticket, a context manager, frees its places.

        parts        at least one
        num_bytes    the request's memory in this process, as far as known
        num_steps    steps that the model's rings compute at a time: so many times ``max_beginning_tokens`` begin
        num_engines  the model's pipelines: so many times ``max_running`` choices run
        """
        ticket = Ticket(self, line, parts)
        ticket.memory.take(num_bytes)
        places = self._lines.setdefault(line, _Places())
        places.num_steps, places.num_engines = num_steps, num_engines
        if self._num_beyond(places, ticket) > self._limits.max_waiting:
            ticket.memory.release()
            num_waiting = sum(not each.admitted.is_set() for each in places.waiting)
            raise QueueFull(
                "too many requests are waiting",
                fact=f"{places.running} choices of this user run and {num_waiting} requests wait; at most "
                f"{self._most_running(places)} choices may run, and {self._limits.max_waiting} requests wait beyond "
                "them",
                next_step="try again in a moment",
            )
        places.requests += 1
        places.waiting.append(ticket)
        self._start(places)
        return ticket

    def began(self, ticket: Ticket, part: int) -> None:
        """Record the first token of a part."""
        places = self._lines[ticket.line]
        self._count_beginning(places, ticket, part, -1)
        self._start(places)

    def choice_ended(self, ticket: Ticket, part: int) -> None:
        """Free the place of a choice of a running part."""
        places = self._lines[ticket.line]
        self._resize(places, ticket, part, ticket.running[part] - 1)
        self._start(places)

    def leave(self, ticket: Ticket) -> None:
        """Free the places of a request that ended or stopped waiting."""
        places = self._lines[ticket.line]
        ticket.memory.release()
        for part in list(ticket.running):
            self._resize(places, ticket, part, 0)
        if ticket.num_started < len(ticket.parts):
            places.waiting.remove(ticket)
        places.requests -= 1
        self._start(places)
        if not places.requests:
            del self._lines[ticket.line]

    def _start(self, places: _Places) -> None:
        """Start the next parts of the first waiting requests for which there is room."""
        while places.waiting and self._fits(places, places.waiting[0].next_part):
            ticket = places.waiting[0]
            part, num_choices = ticket.num_started, ticket.next_part.num_choices
            self._resize(places, ticket, part, num_choices)
            ticket.num_started += 1
            ticket.num_unstarted_choices -= num_choices
            self._count_beginning(places, ticket, part, 1)
            if ticket.num_started == len(ticket.parts):
                places.waiting.popleft()
            ticket.admitted.set()
            ticket.changed.set()

    def _num_beyond(self, places: _Places, ticket: Ticket) -> int:
        """Return how many requests without a started part, this one included, exceed the running choices' limit."""
        room, beyond = self._most_running(places) - places.running, 0
        for each in (*places.waiting, ticket):
            room -= min(each.num_unstarted_choices, self._most_running(places))
            beyond += room < 0 and not each.admitted.is_set()
        return beyond

    def _most_running(self, places: _Places) -> int:
        return self._limits.max_running * places.num_engines

    def _fits(self, places: _Places, part: Part) -> bool:
        if places.running + self._num_places(part.num_choices) > self._most_running(places):
            return False
        tokens = places.beginning_tokens + part.beginning_tokens
        most = self._limits.max_beginning_tokens * places.num_steps
        return places.beginning < self._limits.max_beginning or tokens <= most

    def _num_places(self, num_choices: int) -> int:
        """Return the places of a part's running choices: a part with more than the limit runs alone."""
        return min(num_choices, self._limits.max_running)

    def _resize(self, places: _Places, ticket: Ticket, part: int, num_choices: int) -> None:
        """Set the number of a part's running choices."""
        before = ticket.running.pop(part, 0)
        places.running += self._num_places(num_choices) - self._num_places(before)
        places.prompts += bool(num_choices) - bool(before)
        if num_choices:
            ticket.running[part] = num_choices
        elif part in ticket.beginning:
            self._count_beginning(places, ticket, part, -1)

    @staticmethod
    def _count_beginning(places: _Places, ticket: Ticket, part: int, sign: int) -> None:
        places.beginning += sign
        places.beginning_tokens += sign * ticket.parts[part].beginning_tokens
        (ticket.beginning.add if sign > 0 else ticket.beginning.remove)(part)


class Ticket:
    """Places of one request. Parts start in their order; a part is named by its index."""

    def __init__(self, admission: Admission, line: Line, parts: Sequence[Part]) -> None:
        self.line = line
        self.parts = tuple(parts)
        self.num_started = 0  # parts
        self.num_unstarted_choices = sum(part.num_choices for part in self.parts)
        self.running: dict[int, int] = {}  # choices by part, for parts with a running choice
        self.beginning: set[int] = set()  # running parts without a first token
        self.memory = admission.memory.holding(line.owner)
        self.admitted = asyncio.Event()  # the first part has started
        self.changed = asyncio.Event()  # a part has started; the reader of the parts' results may set it, too
        self.on_leave: Callable[[], None] = _nothing  # called when the places are freed
        self._refusal: EdgepipeError | None = None
        self._admission = admission

    def refuse(self, error: EdgepipeError) -> None:
        """End the request with an error, whether it waits or runs."""
        self._refusal = error
        self.admitted.set()
        self.changed.set()

    def raise_refusal(self) -> None:
        """Raise the error of ``refuse``, if it was called."""
        if self._refusal is not None:
            raise self._refusal

    @property
    def next_part(self) -> Part:
        """The first part that has not started."""
        return self.parts[self.num_started]

    def began(self, part: int) -> None:
        """Record a part's first token; further calls have no effect."""
        if part in self.beginning:
            self._admission.began(self, part)

    def choice_ended(self, part: int) -> None:
        """Free the place of an ended choice."""
        self._admission.choice_ended(self, part)

    def grow(self, more_bytes: int) -> None:
        """Add to the request's memory."""
        self.memory.add(more_bytes)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)
        self.on_leave()


def _nothing() -> None:
    """Do nothing when a ticket's places are freed."""
