"""An engine's serve spec, state and trace, as values."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.expert_reads import ExpertShare
from edgepipe.backend.types import DEFAULT_SETTINGS, PackedProducts, SlowPath, StageSettings
from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, NodeId, PipelineId
from edgepipe.spec.facts import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """The slices that a node runs."""

    node_id: NodeId
    slices: tuple[Slice, ...]
    ram_percent: int = 0  # share of each layer's experts in host memory; 0: as the node is set


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """Model to serve, its placement and settings."""

    model: str
    manifest_hash: str = ""
    stages: tuple[StagePlacement, ...] = ()  # stages in the order that a token passes them
    settings: StageSettings = DEFAULT_SETTINGS
    micro_batches: int = 0  # M; 0: sized by measurements
    kv_tokens: int = 0  # requested KV pool; 0: by free memory
    experts_in_ram: str = ""  # "auto" or a share such as "40%", see ``expert_places``; empty: as nodes are set
    policy: str = ""  # scheduling policy; empty: the default
    throughput: bool = False  # placed for many chats instead of one
    concurrency: int = 0  # number of chats; 0: the default
    moves: bool = False  # move stages automatically if another placement is clearly better
    num_nodes: int = 0  # requested by the user; 0: the planner decides
    exclude: tuple[str, ...] = ()  # names or ids of excluded nodes
    first: str = ""  # node of the first layers
    fixed: bool = False  # the user gave the placement: start there or fail
    on_request: bool = False  # a request loaded it, and a request's keep_alive may stop it
    names: tuple[str, ...] = ()  # further names by which requests may ask for the model
    template_keywords: str = ""  # JSON: of the chat template, where a request does not say; empty: none
    itl_goal: str = ""  # time that prompts may add to a decode's turn: "100ms" or "off"; empty: the default
    draft: str = ""  # source of drafts: see ``draft_way``, or a model's name; empty: the default, "auto"
    must_keep_context: bool = False  # the user was promised the whole context
    num_replicas: int = 0  # independent pipelines of the model; 0: one
    replica: int = 0  # the place of its record, from 1 on; 0: the only pipeline so far, at place 1
    replica_pipelines: tuple[PipelineId, ...] = ()  # all of them
    replica_share: float = 0.0  # planned share of the conversations; 0: an equal one
    auto_replicas: bool = False  # the planner chooses their number, also when a machine joins


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A quarantined node, or a quarantined directed link between two nodes."""

    node_id: NodeId
    other_id: NodeId | None = None  # set: the link from ``node_id`` to this node
    seconds: float  # remaining
    reason: str  # a clause for people
    node_name: str = ""
    other_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A move of stages that the engine's daemon recommends."""

    why: str = ""  # reason for people: what changed
    plan: str = ""  # "a:0-14,b:15-29"
    gain: float = 0.0  # share of the wanted speed: 0.2 is a fifth more tokens per second
    pause_s: float = 0.0  # the move's price


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftState:
    """Drafts since the epoch began."""

    source: str = ""  # source of drafts: "auto", "lookup", "mtp", "model"; empty: nothing drafts
    windows: int = 0  # rows with drafts
    drafted: int = 0  # drafts that these verified
    accepted: int = 0
    factor: float = 0.0  # tokens per second over those without drafts, of the last windows, as predicted; 0: no window
    ahead: int = 0  # windows that began before the tokens of the one before them were known


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSteps:
    """How prompts go into steps."""

    in_flight: int  # P: steps with prompt tokens
    num_tokens: int  # tokens of such a step, decodes included
    ms: float  # expected time of such a step on the slowest stage or link
    bound: str  # bound of the rate: "stage 1", "link 0-1" or "goal"
    over_goal_ms: float = 0.0  # smallest step with prompt tokens misses the goal by this; 0: it keeps the goal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Engine's view of a stage."""

    node_id: NodeId
    node_name: str = ""
    backend: str = ""
    device: str = ""
    slices: tuple[Slice, ...] = ()
    address: str = ""
    weight_bytes: int = 0
    kv_bytes: int = 0
    ram_percent: int = 0  # share of each layer's experts in host memory
    busy: float = 0.0  # busy share of the last seconds
    step_ms: float = 0.0  # EWMA of compute
    upload_ms: float = 0.0  # EWMA of its outgoing link
    one_way_ms: float = 0.0  # EWMA of its outgoing link
    decode_ms: float = 0.0  # measured step of ``EngineState.decode_rows`` sequences; 0 while not known
    decode_upload_ms: float = 0.0  # upload of that step on its outgoing link; 0 while not known
    products: tuple[PackedProducts, ...] = ()  # empty: no packed weights
    slow_paths: tuple[SlowPath, ...] = ()  # reasons why its steps are slow
    # Since the start of the epoch:
    computed_s: float = 0.0
    bubble_s: float = 0.0  # its device waited while steps were in flight
    hop_bytes: int = 0  # bytes over its outgoing link
    hop_latency_counts: tuple[int, ...] = ()  # steps, one count per bound of HOP_LATENCY_S and one beyond
    hop_latency_s: float = 0.0  # sum over these steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine's report of its state."""

    model: str
    pipeline_id: PipelineId
    epoch: Epoch
    state: str  # "starting" | "loading" | "ready" | "recovering" | "waiting" | "failed" | "stopping"
    error: EdgepipeError | None = None
    micro_batches: int = 0  # M
    in_flight: int = 0  # steps
    running: int = 0  # sequences
    waiting: int = 0  # sequences
    num_blocks: int = 0
    free_blocks: int = 0
    state_slots: int = 0  # slots for states of recurrent layers; 0: no layer is recurrent
    free_slots: int = 0  # slots that no sequence holds
    missed_snapshots: int = 0  # snapshots since the epoch began that were not taken, as sequences held all slots
    host_blocks: int = 0  # KV blocks that host memory has room for, on every stage; 0: no idle KV goes there
    used_host_blocks: int = 0
    restored_tokens: int = 0  # count since the epoch began: tokens whose KV came back from host memory
    disk_blocks: int = 0  # KV blocks that the disk has room for, on every stage; 0: no idle KV goes there
    used_disk_blocks: int = 0
    fetched_tokens: int = 0  # count since the epoch began: tokens whose KV came from disk to host memory
    disk_problem: str = ""  # why the disk rests; empty: it is used
    disk_again_unix_s: int = 0  # time of the next try; 0: no disk rests
    host_bound_blocks: int = 0  # blocks of host_blocks that may be used now
    host_problem: str = ""  # why less host memory is used than there is; empty: nothing else needs it
    block_size: int = 0  # tokens
    tokens_per_s: float = 0.0
    stages: tuple[StageState, ...] = ()
    context_length: int = 0  # tokens, prompt and output
    address: str = ""  # HOST:PORT for gateways
    manifest_hash: str = ""
    template_keywords: str = ""  # see ServeSpec
    message: str = ""  # current activity, for people
    progress: float = 0.0  # 0..1 while loading
    why: str = ""  # reason for this M, for people
    bottleneck: str = ""  # slowest server: "stage 1" or "link 1-2", counted from 0; empty while not known
    predicted_tokens_per_s: float = 0.0  # speed at this M with the running sequences; 0 while not known
    latency_ms: float = 0.0  # delay of the whole ring: links in one direction, sampling, the token's return
    preemptions: int = 0  # count since the epoch began
    admitted_tokens: int = 0  # known tokens of sequences when they were admitted, since the epoch began
    cached_tokens: int = 0  # admitted tokens found in the prefix cache
    decode_rows: float = 0.0  # rows of a micro-batch of the running sequences; 0 if none runs
    # As the last prompt was computed; None: no prompt yet, or a stage's times are not known.
    prompt_steps: PromptSteps | None = None
    drafts: DraftState | None = None
    recoveries: int = 0  # epochs that replaced a failed one
    stall_ms: int = 0  # total, from the detection of a failure to the first token after it
    moves: int = 0  # epochs that began after a requested move
    move_pause_ms: int = 0  # total, from the end of the old epoch to the first token after it
    kept_tokens: int = 0  # tokens of sequences that survived a failure, found still computed
    # Tokens of the same sequences that the stages recomputed, up to the last one that lost them.
    replayed_tokens: int = 0
    left_out: tuple[Quarantined, ...] = ()  # current quarantines
    # Shares that its steps read, by tokens; empty: no experts, or not counted.
    expert_shares: tuple[ExpertShare, ...] = ()
    certificate: bytes = b""  # certificate of the engine's process; set by its daemon
    advice: Advice | None = None  # advice of its daemon
    starts_at_us: int = 0  # paused after crashes until then, by the wall clock of its node; 0: not paused
    names: tuple[str, ...] = ()  # further names of the model; set by the node that shows the state, from its records
    # Set by the node that shows the state, from its records:
    num_replicas: int = 0  # independent pipelines of the model; 0: one
    replica: int = 0  # which of them this is, from 1 on; 0: the only one
    replica_share: float = 0.0  # planned share of the conversations; 0: an equal one

    @property
    def title(self) -> str:
        """The model's name for people, with the number of the replica."""
        return f"{self.model} replica {self.replica}/{self.num_replicas}" if self.replica else self.model


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Start and end of a step on a stage's device, stage's clock."""

    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The engine's record of one step. Each machine has its own monotonic clock."""

    step: int
    decode_rows: int
    prefill_tokens: int
    micro_batches: int  # M when it was planned
    planned_us: int  # engine's clock
    used_blocks: int  # used blocks of the KV pool when it was planned
    spans: tuple[DeviceSpan, ...]  # one per stage, in the order that a token passes; fewer while some have not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """Record of the recent steps."""

    steps: tuple[StepTrace, ...]
    now_us: int  # engine's clock
    preemptions: int  # count since the epoch began
