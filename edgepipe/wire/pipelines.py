"""The constants of a stage and of a Ring stream for one epoch, as values, and their conversion."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.types import ActivationType
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import Epoch, NodeId, PipelineId
from edgepipe.spec.facts import Slice
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.v1 import stage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeighbour:
    """The previous or next stage, as its daemon reported it to the engine."""

    node_id: NodeId
    certificate: bytes = b""  # PEM; empty without encryption


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A stage's constants for one epoch."""

    pipeline_id: PipelineId
    epoch: Epoch
    slices: tuple[Slice, ...]  # slices of this stage
    num_slices: int  # slices of the whole pipeline
    hidden_size: int
    activation_type: ActivationType
    num_blocks: int
    block_size: int  # tokens
    window_blocks: tuple[int, ...] = ()  # blocks of each windowed memory class; empty: all layers keep the context
    state_slots: int = 0  # slots of recurrent layers' states; 0: no layer is recurrent
    host_places: tuple[int, ...] = ()  # see ``Backend.allocate_kv``
    disk_places: tuple[int, ...] = ()  # places on disk below host memory, by the same classes; empty: no such disk
    kv_digest: bytes = b""  # digest of what the KV of given tokens depends on: equal digests mean equal KV
    asks_held: bool = False  # the engine does not know what the stage holds: ``HeldPlaces`` ahead of ``Opened``
    next_address: str  # HOST:PORT of the stage with the next slice; "" for the last
    max_in_flight: int  # steps
    step_deadline_ms: int
    next: RingNeighbour | None = None  # identity of the stage at ``next_address``
    previous: RingNeighbour | None = None  # the stage that sends activations


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRing:
    """The constants of a Ring stream."""

    pipeline_id: PipelineId
    epoch: Epoch
    slice: int  # index of the slice that the stream feeds
    hidden_size: int
    activation_type: ActivationType


def spec_to_wire(spec: PipelineSpec, hello: Hello) -> stage_pb2.OpenPipeline:
    """Make the first message of a Control stream."""
    message = to_wire(spec, stage_pb2.OpenPipeline)
    message.hello.CopyFrom(hello_to_wire(hello))
    return message


def spec_from_wire(message: stage_pb2.OpenPipeline) -> PipelineSpec:
    """Convert a stage's constants. Raises RemoteProtocolError for an invalid number."""
    if not message.slices:
        raise RemoteProtocolError("the pipeline cannot be opened: this stage has no slice")
    return from_wire(message, PipelineSpec)
