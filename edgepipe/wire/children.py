"""Messages between a daemon and its child processes, and about stages to be loaded, as values."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.types import DEFAULT_SETTINGS, DeviceProfile, PackedProducts, SlowPath, StageSettings
from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, NodeId, PipelineId
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.wire.batches import BatchReport
from edgepipe.wire.engines import EngineState, StagePlacement
from edgepipe.wire.nodes import ClusterView
from edgepipe.wire.serving import PlanMade, PlanWanted, Reachable, RunEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRequest:
    """Asks a node to load a stage."""

    pipeline_id: PipelineId
    epoch: Epoch
    model: str = ""
    manifest_hash: str = ""
    placement: StagePlacement
    settings: StageSettings
    kv_tokens: int = 0  # requested; fewer if memory is short
    weights_node: str = ""  # id of a node with all tensors
    fresh: bool = False  # start a new process, even if the present one holds exactly this
    promised_tokens: int = 0  # tokens of ``kv_tokens`` that the user was promised; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareProgress:
    """Progress of tensors that are fetched or loaded."""

    phase: str = ""  # "fetching" | "loading"
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A stage that is ready to be opened."""

    address: str = ""  # HOST:PORT of the stage
    max_blocks: int = 0  # KV blocks that fit into the reservation
    max_host_blocks: int = 0  # KV blocks that fit into the reservation of host memory
    max_disk_blocks: int = 0  # KV blocks that fit into what ``StageSettings.kv_disk`` asks for
    held_blocks: int = 0  # KV blocks that the stage has allocated for an earlier epoch; 0: none, or not known
    held_host_blocks: int = 0  # the same in host memory
    held_disk_blocks: int = 0  # and on disk
    kv_block_bytes: int = 0  # bytes of one block in all layers
    window_block_bytes: tuple[int, ...] = ()  # bytes of one block of each windowed memory class, in its layers
    weight_bytes: int = 0
    profile: DeviceProfile
    products: tuple[PackedProducts, ...] = ()
    slow_paths: tuple[SlowPath, ...] = ()
    settings: StageSettings  # settings that its layers are built with
    certificate: bytes = b""  # the stage's certificate
    crashed_epoch: int = 0  # counter of the epoch whose step crashed or hung the previous stage; 0: no such step
    crashed_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareEvent:
    """Progress of a stage that loads, and at last the stage."""

    event: PrepareProgress | Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLayerRequest:
    """Asks a node to measure one layer of a model's shape."""

    model_config: str = ""  # JSON of edgepipe.spec.facts.ModelConfig
    model_weights: str = ""  # JSON of edgepipe.weights.weight_table.WeightTable; empty: floats
    settings: StageSettings = DEFAULT_SETTINGS  # see ``StageSettings.of_layer``
    known_only: bool = False  # return known values, measure nothing
    fresh: bool = False  # measure again if possible
    again_if_busy: bool = False  # measure again if other programs ran beside a measurement of over a minute ago


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShard:
    """Tells a stage process what to load."""

    pipeline_id: PipelineId
    epoch: Epoch
    path: str = ""  # folder or file that open_weights takes
    placement: StagePlacement
    settings: StageSettings
    draft_path: str = ""  # the draft model's folder or file; empty: none is here


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoaded:
    """A stage process has loaded its layers."""

    weight_bytes: int = 0
    kv_block_bytes: int = 0  # bytes of one block in all layers
    window_block_bytes: tuple[int, ...] = ()  # bytes of one block of each windowed memory class, in its layers
    memory_free_bytes: int = 0  # free memory of the device after loading
    products: tuple[PackedProducts, ...] = ()
    slow_paths: tuple[SlowPath, ...] = ()
    settings: StageSettings  # settings that its layers are built with


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseStage:
    """Holds a stage's steps back, because its epoch may have been replaced, or lets them continue."""

    paused: bool = False
    epoch: Epoch | None = None  # the engine's, if not ``paused``; a stage in another epoch stays paused


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChild:
    """Tells a child to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntroducedPeer:
    """A process that a child may talk to."""

    node_id: NodeId  # its node
    kind: str = ""  # "node" | "gateway" | "engine" | "stage"
    certificate: bytes = b""
    may_not_call: bool = False  # it may be called, but may not call


@dataclass(frozen=True, slots=True, kw_only=True)
class IntroducedPeers:
    """All processes that a child may talk to. The child answers with ``Introduced`` once this holds."""

    version: int = 0
    peers: tuple[IntroducedPeer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """A child knows these peers."""

    version: int = 0  # version of ``IntroducedPeers``


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedCall:
    """A call that a child refused."""

    who: str = ""
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWanted:
    """A gateway got a request for a model that is not served."""

    model: str = ""
    owner: str = ""  # the fingerprint of the request's key; empty without a key


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadWanted:
    """A model that a request loaded was idle for as long as requests wanted it kept."""

    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model that a request loaded and that stays for a time."""

    pipeline_id: PipelineId
    keep_s: float = 0.0  # how long it stays without a request
    idle_since_s: float = 0.0  # wall clock; 0: a request uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModels:
    """All such models: from a gateway, and to its successor."""

    models: tuple[KeptModel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadQueue:
    """The models that requests want and that are not served yet."""

    loading: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()  # models in the order in which their loads will begin


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """The reason why a requested model is still not served."""

    model: str = ""
    error: EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStarted:
    """First report of a child process."""

    child_id: str = ""
    kind: str = ""  # "stage" | "engine" | "gateway"
    port: int = 0  # port of its server
    profile: DeviceProfile | None = None  # stages
    certificate: bytes = b""  # made by the child at its start; its key never leaves it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProgress:
    """A child's progress, four times a second while work is pending, otherwise once a second.

    Engines report that their loop runs.
    """

    received: int = 0
    started: int = 0
    finished: int = 0
    sent: int = 0
    limit_ms: int = 0  # limit without progress on started work, or without a report; beyond it, the child hangs
    refused_handshakes: int = 0  # connections without a valid certificate
    fenced: int = 0  # dropped plans and frames of replaced epochs
    disk_bytes: int = 0  # size of a stage's file of KV
    kv_blocks: int = 0  # blocks of the context that a stage has allocated
    host_blocks: int = 0  # the same in host memory
    disk_blocks: int = 0  # and on disk


Report = (
    ChildStarted
    | ChildProgress
    | PrepareProgress
    | ShardLoaded
    | EngineState
    | EdgepipeError
    | PlanWanted
    | DeniedCall
    | Introduced
    | LayerProfile
    | LoadWanted
    | UnloadWanted
    | KeptModels
    | BatchReport
)
"""What a child reports to its daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReport:
    """A report from a child to its daemon."""

    report: Report
    child_id: str = ""  # set in the first report of any kind


Command = (
    LoadShard
    | ClusterView
    | RunEngine
    | StopChild
    | PlanMade
    | Reachable
    | PauseStage
    | IntroducedPeers
    | ProfileLayerRequest
    | LoadFailed
    | LoadQueue
    | KeptModels
)
"""What a daemon tells its child to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCommand:
    """A command from the daemon to its child."""

    command: Command
