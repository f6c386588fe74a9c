"""An engine that gives every request another answer, in the order of a script."""

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
    """Each request gets the next answer; after the last one, the last again. An error ends a request in mid-answer."""

    script: Sequence[Scripted] = ()
    broken_after: int = 4  # tokens before an error
    asked: int = field(default=0, init=False)

    async def _answer(
        self, submit: engine_pb2.Submit, have: Sequence[int], outbox: asyncio.Queue[engine_pb2.EngineEvent | None]
    ) -> None:
        said = self.script[min(self.asked, len(self.script) - 1)]
        self.asked += 1
        self.error = said if isinstance(said, EdgepipeError) else None
        self.hold_after = self.broken_after if self.error is not None else None
        self.answer = b"Half an answer" if isinstance(said, EdgepipeError) else said
        await FakeEngine._answer(self, submit, have, outbox)

    def prompt(self, place: int) -> str:
        """The prompt of a request, as text."""
        return bytes(self.submits[place].prompt).decode()


def with_context(view: ClusterView, num_tokens: int) -> ClusterView:
    """The view with another context of every model."""
    served = [replace(model, engine=replace(model.engine, context_length=num_tokens)) for model in view.served]
    return replace(view, served=tuple(served))
