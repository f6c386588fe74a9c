"""An engine that answers each request by a script, for programs that ask several times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edgepipe.errors import EdgepipeError
from edgepipe.wire.nodes import ClusterView
from edgepipe.wire.v1 import engine_pb2
from tests.support.gateways.fake_engine import FakeEngine

Scripted = bytes | EdgepipeError


@dataclass(slots=True)
class ScriptedEngine(FakeEngine):
    """The first request gets the first answer, and so on; the last answer is also that of all further requests.

    An answer that is an error ends its request after ``broken_after`` tokens.
    """

    script: Sequence[Scripted] = field(default_factory=list[Scripted])
    broken_after: int = 4
    begun: bytes = b"This answer never ends, "

    async def _answer(
        self, submit: engine_pb2.Submit, have: Sequence[int], outbox: asyncio.Queue[engine_pb2.EngineEvent | None]
    ) -> None:
        place = min(next(at for at, each in enumerate(self.submits) if each is submit), len(self.script) - 1)
        step = self.script[place]
        if isinstance(step, EdgepipeError):
            self.answer, self.error, self.hold_after = self.begun, step, self.broken_after
        else:
            self.answer, self.error, self.hold_after = step, None, None
        await FakeEngine._answer(self, submit, have, outbox)

    def prompt(self, place: int) -> str:
        """The prompt of a request, as text."""
        return bytes(self.submits[place].prompt).decode()


def with_context(view: ClusterView, num_tokens: int) -> ClusterView:
    """The view with another context of every model."""
    served = [replace(model, engine=replace(model.engine, context_length=num_tokens)) for model in view.served]
    return replace(view, served=tuple(served))
