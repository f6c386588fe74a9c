"""Nodes and clusters as they report themselves, as values."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId, PipelineId
from edgepipe.spec.facts import LayerRange
from edgepipe.wire.batches import BatchFacts
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import EngineState
from edgepipe.wire.serving import BrokenLink, Introduction, ServeRecord
from edgepipe.wire.trust import TrustSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What a pipeline's stage holds of a device."""

    pipeline_id: PipelineId
    num_bytes: int = 0
    ram_bytes: int = 0  # experts in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A node's device and what is reserved of it."""

    profile: DeviceProfile | None = None
    reserved_bytes: int = 0
    state: str = ""  # "starting" | "idle" | "loading" | "serving" | "failed"
    error: EdgepipeError | None = None
    free_bytes: int = 0  # free for reservations
    reserved: tuple[Reserved, ...] = ()
    fenced_messages: int = 0  # messages of replaced epochs that its stages dropped
    ram_free_bytes: int = 0  # host memory for experts that is free for reservations


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnDisk:
    """A model's files on a node."""

    model: str = ""
    manifest_hash: str = ""
    num_bytes: int = 0
    complete: bool = False
    parts: tuple[LayerRange, ...] = ()  # present parts, numbered as in edgepipe.planner.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A download, or a copy from another node, under way."""

    model: str = ""
    source: str = ""  # node id or "hub"
    bytes_done: int = 0
    bytes_total: int = 0
    copy: bool = False  # a copy for safety; no request waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's report of itself."""

    node_id: NodeId
    name: str = ""
    address: str = ""  # HOST:PORT of its daemon
    incarnation: int = 0  # grows with every start
    edgepipe_version: str = ""
    platform: str = ""
    devices: tuple[DeviceState, ...] = ()
    engines: tuple[EngineState, ...] = ()  # run by this node
    models: tuple[ModelOnDisk, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    http_port: int = 0
    version: int = 0  # grows with every change of this message
    gateways: tuple[bytes, ...] = ()  # certificates of its gateway and of commands that call engines
    serves: tuple[ServeRecord, ...] = ()
    draining: bool = False  # the node takes no new work, and its work moves away
    silent: tuple[str, ...] = ()  # ids of known nodes that it does not hear
    sleeps_soon: bool = False  # the machine is about to sleep: silence from now on is sleep, not death
    leaving: bool = False  # the node stops as soon as its work has moved, or a time is over
    disk_free_bytes: int = 0  # free bytes on the disk of models
    batches: BatchFacts | None = None  # facts of its gateway; None: the gateway has not read its disk yet

    @property
    def introduction(self) -> Introduction:
        """The node's id, address and name."""
        return Introduction(node_id=self.node_id, address=self.address, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """A node as the asked node sees it."""

    node: NodeState
    state: str = ""  # "alive" | "suspect" | "dead" | "left"
    rtt_ms: float = 0.0  # round trip from the asked node
    self: bool = False
    gap_ms: float = 0.0  # 99th percentile between its heartbeats over two minutes, seen from the asked node
    clock_skew_ms: float = 0.0  # the node's wall clock minus the asked node's


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentNode:
    """A member of the cluster that does not run, or that this node cannot hear."""

    node_id: NodeId
    name: str = ""
    state: str = ""  # "dead" | "asleep" | "left": it said goodbye | "unseen": not heard since the asked node started
    since_us: int = 0  # wall clock of the asked node


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignNode:
    """A node outside the cluster, or one that speaks another version of the protocol. Nothing of it is proven."""

    node_id: NodeId
    name: str = ""
    address: str = ""
    cluster_id: str = ""
    cluster_name: str = ""
    edgepipe_version: str = ""
    protocol_version: int = 0
    pairing_port: int = 0  # 0: no pairing window is open


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPeer:
    """A node that was found and refused: another cluster, or another version of the protocol."""

    peer: str = ""  # the peer's address or name
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildState:
    """A child process of the daemon."""

    kind: str = ""
    pid: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The cluster as the asked node sees it."""

    cluster_id: str = ""
    cluster_name: str = ""
    members: tuple[MemberState, ...] = ()
    engines: tuple[EngineState, ...] = ()
    node_id: NodeId
    uptime_ms: int = 0
    children: tuple[ChildState, ...] = ()
    data_dir: str = ""
    refused: tuple[RefusedPeer, ...] = ()
    refused_handshakes: int = 0  # connections to this node's processes without a valid certificate
    absent: tuple[AbsentNode, ...] = ()
    broken_links: tuple[BrokenLink, ...] = ()
    neighbours: tuple[ForeignNode, ...] = ()
    discovery_problem: str = ""  # empty: multicast seems to work
    removed: bool = False  # this node was removed from its cluster
    trust_damage: str = ""  # empty: the trust store is intact
    unwritten: tuple[str, ...] = ()  # files that this node cannot write to its disk, and why
    num_tasks: int = 0  # tasks of the daemon's event loop; grows with served models, not with time


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A served model and its local metadata."""

    engine: EngineState
    model_path: str = ""  # local folder with config, tokenizer and template
    on_request: bool = False  # requests decide how long it stays


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What a gateway knows of its cluster."""

    cluster_id: str = ""
    members: tuple[MemberState, ...] = ()
    served: tuple[ServedModel, ...] = ()
    absent: tuple[AbsentNode, ...] = ()
    loadable: tuple[str, ...] = ()  # models on a disk of the cluster that a request would load
    stopped: tuple[str, ...] = ()  # stopped pipelines: requests stop waiting for their engines


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat."""

    hello: Hello | None = None  # sent in the first beat of a stream
    sequence: int = 0
    echo: int = 0  # highest sequence seen from the other side
    echo_delay_us: int = 0  # time since it came
    state: NodeState | None = None  # sent when it changed, and at least every two seconds
    known: tuple[Introduction, ...] = ()  # other members: one working address leads to all
    leaving: bool = False
    sleeping: bool = False  # the machine is about to sleep and keeps its state
    trust_digest: bytes = b""  # digest of the sender's trust store; sent when it changed, and with every state
    trust: TrustSet | None = None  # statements that the other side lacks, a piece at a time
    trust_keys: tuple[bytes, ...] = ()  # keys of all the sender's statements; sent when the digests differ
    wall_ms: int = 0  # sender's wall clock, sent with every state; 0: not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a node's log."""

    source: str = ""
    text: str = ""
