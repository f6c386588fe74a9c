"""Types of identities. Whoever makes new ones is handed an ``IdSource``; the system's lives in ``edgepipe.daemon``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

NodeId = NewType("NodeId", str)  # stable per data directory
PipelineId = NewType("PipelineId", str)
EngineId = NewType("EngineId", str)
RequestId = NewType("RequestId", str)  # unique within the gateway's node
SequenceId = NewType("SequenceId", int)  # unique within a pipeline's epoch; one per choice of a request
StepId = NewType("StepId", int)  # counts from 1 within an epoch


MAX_EPOCH_STEP = 1 << 20  # a counter that is further ahead is not believed: a pipeline recovers a few times an hour


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The version of a pipeline. Totally ordered: the counter first, the engine's id breaks ties."""

    counter: int
    engine_id: EngineId

    def __str__(self) -> str:
        return f"{self.counter}@{self.engine_id}"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names a request within an engine. All attempts of one request share it."""

    node_id: NodeId  # of the gateway
    request_id: RequestId


class IdSource(Protocol):
    """Makes identities that nobody else has."""

    def new(self, prefix: str) -> str:
        """A fresh identity such as ``pipeline-3f9a0c21``."""
        ...
