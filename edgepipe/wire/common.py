"""Conversions of values that several services share."""

from __future__ import annotations

from collections.abc import Iterable

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.backend.types import ActivationType, DeviceProfile
from edgepipe.errors import EdgepipeError, RemoteProtocolError, VersionMismatch, error_class
from edgepipe.ids import EngineId, Epoch
from edgepipe.model.facts import LayerRange, Slice
from edgepipe.safe_text import one_line
from edgepipe.wire.sizes import MAX_ERROR_BYTES, MAX_ERROR_NAME_BYTES
from edgepipe.wire.v1 import common_pb2 as pb

_ACTIVATIONS = {
    ActivationType.BF16: pb.ACTIVATION_TYPE_BF16,
    ActivationType.FLOAT32: pb.ACTIVATION_TYPE_FLOAT32,
}


MAX_HELLO_CHARS = 256  # per name in a hello; ids have 52, names for people at most 63


def make_hello(
    *, role: str, node_id: str = "", node_name: str = "", cluster_id: str = "", cluster_name: str = ""
) -> pb.Hello:
    """Make the first message of a connection from this process."""
    return pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        edgepipe_version=__version__,
        node_id=node_id,
        node_name=node_name,
        cluster_id=cluster_id,
        role=role,
        cluster_name=cluster_name,
    )


def check_hello(hello: pb.Hello, *, own_name: str = "this node") -> None:
    """Check the other side's hello.

    Raises VersionMismatch, which names the side to upgrade, and RemoteProtocolError for long names, since names are
    logged and stored. The other side also shows the error, so pass ``own_name`` if this side has a name.
    """
    names = (hello.node_id, hello.node_name, hello.cluster_id, hello.cluster_name, hello.role, hello.edgepipe_version)
    if any(len(name) > MAX_HELLO_CHARS for name in names):
        raise RemoteProtocolError(
            "a name in the other side's hello is too long", fact=f"{max(map(len, names))} characters"
        )
    if hello.protocol_version == PROTOCOL_VERSION:
        return
    other = hello.node_name or hello.node_id or hello.role or "the other side"
    older = other if hello.protocol_version < PROTOCOL_VERSION else own_name
    raise VersionMismatch(
        f"{other} and {own_name} speak different versions of the protocol",
        fact=f"{other} runs edgepipe {hello.edgepipe_version or 'unknown'} (protocol {hello.protocol_version}), "
        f"{own_name} {__version__} (protocol {PROTOCOL_VERSION})",
        next_step=f"upgrade edgepipe on {older}: pip install --upgrade edgepipe",
    )


def error_to_wire(error: EdgepipeError) -> pb.Error:
    """Convert an error for another process; its texts are cut to the limits of messages."""
    return pb.Error(
        code=error.code,
        what=_cut(error.what, MAX_ERROR_BYTES),
        fact=_cut(error.fact, MAX_ERROR_BYTES),
        next_step=_cut(error.next_step, MAX_ERROR_BYTES),
        node=_cut(error.node, MAX_ERROR_NAME_BYTES),
        stage=_cut(error.stage, MAX_ERROR_NAME_BYTES),
        request_id=_cut(error.request_id, MAX_ERROR_NAME_BYTES),
    )


def _cut(text: str, most_bytes: int) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= most_bytes else data[: most_bytes - 4].decode(errors="ignore") + " ..."


def error_from_wire(error: pb.Error) -> EdgepipeError:
    """Restore an error as its own class, with texts safe to show; unknown codes become plain ``EdgepipeError``."""
    return error_class(error.code)(
        one_line(error.what),
        fact=one_line(error.fact),
        next_step=one_line(error.next_step),
        node=one_line(error.node),
        stage=one_line(error.stage),
        request_id=one_line(error.request_id),
    )


def epoch_to_wire(epoch: Epoch) -> pb.Epoch:
    """Convert a pipeline's epoch for the wire."""
    return pb.Epoch(counter=epoch.counter, engine_id=epoch.engine_id)


def epoch_from_wire(epoch: pb.Epoch) -> Epoch:
    """Convert a pipeline's epoch from the wire."""
    return Epoch(epoch.counter, EngineId(epoch.engine_id))


def slices_to_wire(slices: Iterable[Slice]) -> list[pb.Slice]:
    """Convert slices for the wire."""
    return [
        pb.Slice(
            index=part.index,
            layers=pb.LayerRange(start=part.layers.start, end=part.layers.end),
            embedding=part.embedding,
            head=part.head,
        )
        for part in slices
    ]


def slices_from_wire(slices: Iterable[pb.Slice]) -> tuple[Slice, ...]:
    """Convert slices from the wire. Raises PlanInvalid for an empty range."""
    return tuple(
        Slice(
            index=part.index,
            layers=LayerRange(part.layers.start, part.layers.end),
            embedding=part.embedding,
            head=part.head,
        )
        for part in slices
    )


def activation_type_to_wire(kind: ActivationType) -> pb.ActivationType.ValueType:
    """Convert the type of activations for the wire."""
    return _ACTIVATIONS[kind]


def activation_type_from_wire(kind: pb.ActivationType.ValueType) -> ActivationType:
    """Convert the type of activations from the wire. Raises RemoteProtocolError for an unknown type."""
    for domain, wire in _ACTIVATIONS.items():
        if wire == kind:
            return domain
    raise RemoteProtocolError("the other side uses an unknown activation type", fact=f"type number {kind}")


def profile_to_wire(profile: DeviceProfile) -> pb.DeviceProfile:
    """Convert a device's profile for the wire."""
    return pb.DeviceProfile(
        backend=profile.backend,
        device=profile.device,
        name=profile.name,
        compute_dtype=profile.compute_dtype,
        memory_total_bytes=profile.memory_total_bytes,
        memory_free_bytes=profile.memory_free_bytes,
        bandwidth_bytes_per_s=profile.bandwidth_bytes_per_s,
        flops=profile.flops,
        block_sizes=profile.block_sizes,
        contiguous_kv=profile.contiguous_kv,
    )
