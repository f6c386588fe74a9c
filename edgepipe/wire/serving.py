"""What is served where: requests, signed records, plans, surveys and copies, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgepipe.backend.types import DEFAULT_SETTINGS, DeviceProfile, StageSettings
from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, NodeId, PipelineId
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.wire.engines import EngineState, Quarantined, ServeSpec, StagePlacement


class Moves(Enum):
    """Whether stages move by themselves when another placement is clearly better."""

    UNCHANGED = "unchanged"
    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """A node and where it answers."""

    node_id: NodeId
    address: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBody:
    """What is served, with which content, by whose engine. Who may sign it: ``daemon.serving.serve_rules``."""

    cluster_id: str = ""
    signer: str = ""  # node id
    pipeline_id: PipelineId
    spec: ServeSpec
    stopped: bool = False
    version: int = 0  # the highest of a model's records counts
    engine_node: str = ""  # node id
    asker: str = ""  # node id of the node that had it served
    begun: bool = False  # it has answered, so a lost engine is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecord:
    """A signed ``ServeBody``, kept by every node; see the .proto for the signature."""

    body: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """A person's request to serve a model."""

    options: ServeSpec  # a spec without stages
    plan: str = ""  # "a:0-14,b:15-29"; empty: the planner decides
    rebalance: bool = False  # place a served model anew
    moves: Moves = Moves.UNCHANGED  # AUTO: stages move by themselves from now on
    must_keep_context: bool = False  # the KV of one whole context must fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEvent:
    """Progress of a model that is about to be served."""

    message: str = ""
    progress: float = 0.0  # 0..1
    engines: tuple[EngineState, ...] = ()  # all pipelines of the model, ready; only in the last event
    note: str = ""  # line to keep on the screen: what was left out, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngineRequest:
    """Asks a node to run a model's engine."""

    pipeline_id: PipelineId
    spec: ServeSpec
    record: ServeRecord = ServeRecord()  # the signed reason; empty on the engine's own node
    nodes: tuple[Introduction, ...] = ()  # introductions of all nodes in the spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEngine:
    """Tells an engine's process what to serve."""

    pipeline_id: PipelineId
    spec: ServeSpec
    nodes: tuple[Introduction, ...] = ()
    model_config: str = ""  # JSON of edgepipe.spec.facts.ModelConfig
    model_weights: str = ""  # JSON of edgepipe.weights.weight_table.WeightTable; empty: floats
    epoch_counter: int = 0  # 1 + the pipeline's highest known counter
    resuming: bool = False  # it follows another engine: requests wait while stages are placed and prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWanted:
    """An engine that lost stages asks for a placement."""

    spec: ServeSpec  # spec before the loss
    left_out: tuple[Quarantined, ...] = ()
    question: int = 0  # the answer has the same number


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """A placement or an error: the answer to an engine's question, or a proposed move."""

    spec: ServeSpec | None = None
    nodes: tuple[Introduction, ...] = ()  # introductions of all nodes in the spec
    error: EdgepipeError | None = None
    question: int = 0  # 0: a proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """The nodes that the daemon hears. Sent when they, or the room on their devices, change."""

    nodes: tuple[Introduction, ...] = ()
    leaving: tuple[str, ...] = ()  # node ids of nodes that are being drained


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceRequest:
    """Asks the node of a pipeline's engine to place the pipeline anew."""

    pipeline_id: PipelineId
    num_nodes: int = 0  # 0: the planner decides
    moves: Moves = Moves.UNCHANGED  # AUTO: stages move by themselves from now on
    stages: tuple[StagePlacement, ...] = ()  # where they go; empty: the engine's node finds the best placement


@dataclass(frozen=True, slots=True, kw_only=True)
class VouchReply:
    """Whether a node hears another."""

    hears: bool = False  # the node, and it is not being drained
    draining: bool = False  # the asked node is being drained
    highest: Epoch | None = None  # epoch of the pipeline that it has obeyed
    proof: bytes = b""  # the node's own signed proof that it has the engine, see ``alive_proof``; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """A measured directed link between two nodes."""

    sender: str = ""
    receiver: str = ""
    one_way_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLinksReply:
    """One node's links to others."""

    links: tuple[LinkProfile, ...] = ()
    unreached: tuple[str, ...] = ()  # ids of nodes to which no new connection could be made


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """All links between nodes, as last measured."""

    links: tuple[LinkProfile, ...] = ()
    at_ms: int = 0  # wall clock of the node; 0: not measured since it started


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLink:
    """Two nodes that the asked node hears and that do not hear each other.

    In surveys: a directed link that carries nothing.
    """

    node_id: NodeId
    other_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedMachine:
    """A machine as the planner needs it."""

    node_id: NodeId
    name: str = ""
    device: DeviceProfile
    free_bytes: int = 0  # memory for weights and KV
    taken_bytes: int = 0  # memory that other programs use
    value_bytes: int = 0  # size of a weight, a key or a value
    shares_host_memory: bool = False
    layer: LayerProfile | None = None  # None: not measured
    ram_free_bytes: int = 0  # host memory for experts
    obstacle: EdgepipeError | None = None  # why other nodes do not reach it; None: they do


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyReply:
    """A model's shape and the machines and links for it."""

    model: str = ""
    model_config: str = ""
    model_weights: str = ""  # JSON of edgepipe.weights.weight_table.WeightTable; empty: floats
    machines: tuple[SurveyedMachine, ...] = ()
    links: tuple[LinkProfile, ...] = ()
    unusable: tuple[str, ...] = ()  # nodes that cannot compute, each with the reason
    broken: tuple[BrokenLink, ...] = ()  # directed links that carry nothing, from the first to the other
    settings: StageSettings = DEFAULT_SETTINGS  # see ``StageSettings.of_layer``


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEvent:
    """The remaining work of a node that is being drained."""

    stages: tuple[str, ...] = ()  # models with a stage here
    engines: tuple[str, ...] = ()  # models whose engine is here


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCopyRequest:
    """Asks a node to fetch and keep parts of a model."""

    model: str = ""
    manifest_hash: str = ""
    parts: tuple[int, ...] = ()  # numbered as in edgepipe.planner.copies
    source: str = ""  # node id to ask first
    paced: bool = False  # leave most of the link free


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgress:
    """Progress of one node's copy."""

    node_id: NodeId
    node_name: str = ""
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateEvent:
    """Progress of a model's copies."""

    copies: tuple[CopyProgress, ...] = ()  # all copies, in every event
