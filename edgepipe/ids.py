"""Types of identities, and the protocol ``IdSource`` that makes them; ``edgepipe.system`` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

NodeId = NewType("NodeId", str)  # stable per data directory
PipelineId = NewType("PipelineId", str)
EngineId = NewType("EngineId", str)
RequestId = NewType("RequestId", str)  # unique within the gateway's node
SequenceId = NewType("SequenceId", int)  # unique within a pipeline's epoch; one per choice of a request
StepId = NewType("StepId", int)  # counts from 1 within an epoch


MAX_EPOCH_STEP = 1 << 20  # larger jumps of the counter are rejected: a pipeline recovers a few times an hour


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The version of a pipeline. Totally ordered by the counter, then by the engine's id."""

    counter: int
    engine_id: EngineId

    def __str__(self) -> str:
        return f"{self.counter}@{self.engine_id}"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identifies a request within an engine. All attempts of a request share it."""

    node_id: NodeId  # the gateway's node
    request_id: RequestId


class IdSource(Protocol):
    """Makes unique identities."""

    def new(self, prefix: str) -> str:
        """Return a new identity such as ``pipeline-3f9a0c21``."""
        ...
