"""Reads and checks a request's body without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from edgepipe.children.user_turns import UserTurns
from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.body import MAX_BODY_BYTES, parse_json_object, read_body
from edgepipe.gateway.body_child import GOOD, id_lists, kind_name, unpack
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.problems import HttpProblem, busy
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.strict_body import BodyT, validate

_INLINE_BYTES = 128 << 10  # 3-4 ms of parsing; a child process reads larger bodies
_SMALL_BYTES = 8 << 10  # 0.3 ms: larger bodies are parsed in turns
_MAX_PARSING = 512  # a user's bodies that wait to be parsed on the loop: one per connection
_ID_BYTES = 36  # an integer and its place in a list
_READ_S = 30.0  # 8 MB of small values take 3-4 s of CPU
_MOST_BYTES = 8 * MAX_BODY_BYTES  # checked bodies grow at most threefold: lists of one token id each
_START_S = 20.0  # start of an interpreter on an overloaded machine


def _new_turns() -> UserTurns:
    return UserTurns(max_waiting=_MAX_PARSING)


def _new_child() -> WarmChild:
    return WarmChild("edgepipe.gateway.body_child", start_s=_START_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """Reads and checks bodies. Raises HttpProblem for every invalid body, QueueFull beyond its user's memory."""

    models: ModelTable
    body_s: float  # longest time until a body has arrived
    child: WarmChild = field(default_factory=_new_child)  # started by the first large body
    # Turns of bodies that this process parses: one per turn of the loop.
    turns: UserTurns = field(default_factory=_new_turns)

    async def read(self, request: Request, kind: type[BodyT], *, of_any_type: bool = False) -> BodyT:
        """Return the checked body. ``of_any_type``: accept any Content-Type. Raises HttpProblem."""
        memory = memory_of(request)
        body = await read_body(request, memory=memory, within_s=self.body_s, of_any_type=of_any_type)
        checked = await self.checked(body, kind, owner_of(request))
        memory.take(_ID_BYTES * sum(map(len, id_lists(checked))))
        return checked

    async def checked(self, body: bytes, kind: type[BodyT], owner: str) -> BodyT:
        """Return the checked body in the owner's turn. Raises HttpProblem, QueueFull."""
        if len(body) <= _SMALL_BYTES:
            return validate(kind, parse_json_object(body))
        if len(body) <= _INLINE_BYTES:
            async with self.turns.turn(owner):
                await asyncio.sleep(0)  # bodies that have arrived get into line before the next is chosen
                return validate(kind, parse_json_object(body))
        return await self._read_in_child(body, kind, owner)

    async def _read_in_child(self, body: bytes, kind: type[BodyT], owner: str) -> BodyT:
        context = max((served.context_length for served in self.models.served), default=0)
        asked = json.dumps({"kind": kind_name(kind), "context": context}).encode()
        try:
            answer = await self.child.ask(asked, b"\n", body, owner=owner, within_s=_READ_S, most_bytes=_MOST_BYTES)
        except (TimeoutError, ChildEnded) as exc:
            raise busy("the body could not be read: this machine has too little CPU time or memory now") from exc
        if answer[:1] != GOOD:
            raise HttpProblem(**cast("dict[str, Any]", json.loads(answer[1:])))
        return unpack(kind, memoryview(answer)[1:])
