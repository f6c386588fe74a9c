"""Responses that clients may refer to later, in memory (PURE)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.responses.items import InputItem

MAX_STORED = 256  # responses
MAX_STORED_BYTES = 64 << 20
STORED_S = 3600.0
_BASE_BYTES = 4096  # a response without its items


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, with all that a later one continues."""

    body: Mapping[str, Any]  # the response as its client got it
    given: tuple[InputItem, ...]  # the items of its prompt, those of earlier responses included
    output: tuple[InputItem, ...]

    @property
    def num_bytes(self) -> int:
        """Estimated memory, in bytes. Items of earlier responses count again, as those may be forgotten first."""
        return _BASE_BYTES + sum(item.held_bytes for item in self.given) + 2 * sum(i.held_bytes for i in self.output)


@dataclass(frozen=True, slots=True)
class _Entry:
    owner: str
    response: StoredResponse
    num_bytes: int
    until_s: float


class ResponseStore:
    """Keeps responses for an hour. When it is full, the user that holds most loses its oldest response."""

    def __init__(
        self, *, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES, stored_s: float = STORED_S
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._stored_s = stored_s
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # keys are owner and id, oldest first
        self._held = Counter[str]()  # bytes by owner

    @property
    def num_bytes(self) -> int:
        """Memory of all responses, in bytes."""
        return sum(self._held.values())

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, owner: str, response_id: str, response: StoredResponse, *, now_s: float) -> None:
        """Store a response, unless it alone is too large."""
        self._forget_old(now_s)
        entry = _Entry(owner, response, response.num_bytes, now_s + self._stored_s)
        if entry.num_bytes > self._most_bytes:
            return
        self._entries[owner, response_id] = entry
        self._held[owner] += entry.num_bytes
        while len(self._entries) > self._most or self.num_bytes > self._most_bytes:
            richest = max(self._held, key=lambda each: self._held[each])
            self._drop(next(key for key in self._entries if key[0] == richest))

    def get(self, owner: str, response_id: str, *, now_s: float) -> StoredResponse:
        """Return a user's response. Raises HttpProblem 404."""
        self._forget_old(now_s)
        if (entry := self._entries.get((owner, response_id))) is None:
            raise HttpProblem(status=404, message=_unknown(response_id), code="response_not_found")
        return entry.response

    def earlier(self, owner: str, response_id: str, *, now_s: float) -> Sequence[InputItem]:
        """Return the items that a response continues. Raises HttpProblem 400 for an unknown one."""
        try:
            before = self.get(owner, response_id, now_s=now_s)
        except HttpProblem as problem:
            raise HttpProblem(
                status=400,
                message=problem.message,
                param="previous_response_id",
                code="previous_response_not_found",
            ) from problem
        return (*before.given, *before.output)

    def delete(self, owner: str, response_id: str, *, now_s: float) -> None:
        """Forget a response. Raises HttpProblem 404."""
        self.get(owner, response_id, now_s=now_s)
        self._drop((owner, response_id))

    def _forget_old(self, now_s: float) -> None:
        while self._entries and next(iter(self._entries.values())).until_s <= now_s:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key)
        self._held[entry.owner] -= entry.num_bytes
        if not self._held[entry.owner]:
            del self._held[entry.owner]


def _unknown(response_id: str) -> str:
    return (
        f"no response '{response_id[:64]}' is stored here. A node stores {MAX_STORED} responses for an hour, "
        "for the key that asked, until it restarts; other nodes do not have them. Send the whole conversation in input"
    )
