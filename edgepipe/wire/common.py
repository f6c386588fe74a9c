"""The hello that begins a connection, and the conversion of epochs."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.errors import RemoteProtocolError, VersionMismatch
from edgepipe.ids import EngineId, Epoch
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.v1 import common_pb2 as pb

_ROLES = {"cli": "the command line"}
MAX_HELLO_CHARS = 256  # length of each name in a hello; ids have 52, names for people at most 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a connection: who speaks, and which version."""

    protocol_version: int = PROTOCOL_VERSION
    edgepipe_version: str = __version__
    node_id: str = ""
    node_name: str = ""
    cluster_id: str = ""
    cluster_name: str = ""  # the cluster's name for people, which nodes send
    role: str  # "node" | "engine" | "stage" | "gateway" | "cli"


def hello_from_wire(message: pb.Hello) -> Hello:
    """Convert a hello from the wire."""
    return from_wire(message, Hello)


def hello_to_wire(hello: Hello) -> pb.Hello:
    """Convert a hello for the wire."""
    return to_wire(hello, pb.Hello)


def check_hello(hello: Hello, *, own_name: str = "this node") -> None:
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
    other = hello.node_name or hello.node_id or _ROLES.get(hello.role, hello.role) or "the other side"
    older = other if hello.protocol_version < PROTOCOL_VERSION else own_name
    raise VersionMismatch(
        f"{other} and {own_name} speak different versions of the protocol",
        fact=f"{other} runs edgepipe {hello.edgepipe_version or 'unknown'} (protocol {hello.protocol_version}), "
        f"{own_name} {__version__} (protocol {PROTOCOL_VERSION})",
        next_step=f"on {older}: edgepipe update",
    )


def epoch_to_wire(epoch: Epoch) -> pb.Epoch:
    """Convert a pipeline's epoch for the wire."""
    return pb.Epoch(counter=epoch.counter, engine_id=epoch.engine_id)


def epoch_from_wire(epoch: pb.Epoch) -> Epoch:
    """Convert a pipeline's epoch from the wire. Raises RemoteProtocolError."""
    check_numbers(epoch)
    return epoch_of(epoch)


def epoch_of(epoch: pb.Epoch) -> Epoch:
    """Convert an epoch of a message that was checked."""
    return Epoch(epoch.counter, EngineId(epoch.engine_id))
