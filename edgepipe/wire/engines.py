"""An engine's serve spec, state and trace as values, and their conversion."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, ActivationType
from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, NodeId, PipelineId
from edgepipe.model.facts import Slice
from edgepipe.wire.common import (
    activation_type_from_wire,
    activation_type_to_wire,
    epoch_to_wire,
    error_to_wire,
    slices_from_wire,
    slices_to_wire,
)
from edgepipe.wire.v1 import common_pb2, engine_pb2, node_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """The slices that a node runs."""

    node_id: NodeId
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """Model to serve, its placement and settings."""

    model: str
    manifest_hash: str = ""
    stages: tuple[StagePlacement, ...] = ()  # in the order that a token passes them
    micro_batches: int = 0  # M; 0: sized by measurements
    context_length: int = 0  # tokens per sequence; 0: the model's
    kv_tokens: int = 0  # requested KV pool; 0: by free memory
    dtype: str = "auto"
    activation_type: ActivationType = ActivationType.BF16
    policy: str = ""  # scheduling policy; empty: the default
    throughput: bool = False  # placed for many chats instead of one
    concurrency: int = 0  # number of chats; 0: the default
    moves: bool = False  # move stages automatically if another placement is clearly better
    num_nodes: int = 0  # requested by the user; 0: the planner decides
    exclude: tuple[str, ...] = ()  # names or ids of excluded nodes
    first: str = ""  # node of the first layers
    fixed: bool = False  # the user gave the placement: start there or fail
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens per KV block, for as long as the model is served


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A quarantined node, or a quarantined directed link between two nodes."""

    node_id: NodeId
    other_id: NodeId | None = None  # set: the link from ``node_id`` to this node
    seconds: float  # remaining
    reason: str  # a clause for people
    node_name: str = ""
    other_name: str = ""


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
    busy: float = 0.0  # busy share of the last seconds
    step_ms: float = 0.0  # EWMA of compute
    upload_ms: float = 0.0  # EWMA of its outgoing link
    one_way_ms: float = 0.0  # EWMA of its outgoing link
    decode_ms: float = 0.0  # measured step of ``EngineState.decode_rows`` sequences; 0 while not known
    decode_upload_ms: float = 0.0  # upload of that step on its outgoing link; 0 while not known
    # Since the start of the epoch:
    computed_s: float = 0.0
    bubble_s: float = 0.0  # its device waited while steps were in flight
    hop_bytes: int = 0  # over its outgoing link
    hop_latency_counts: tuple[int, ...] = ()  # steps, one count per bound of HOP_LATENCY_S and one beyond
    hop_latency_s: float = 0.0  # sum over these steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine's report of its state."""

    model: str
    pipeline_id: PipelineId
    epoch: Epoch
    state: str  # "starting" | "loading" | "ready" | "recovering" | "failed" | "stopping"
    error: EdgepipeError | None = None
    micro_batches: int = 0  # M
    in_flight: int = 0  # steps
    running: int = 0  # sequences
    waiting: int = 0  # sequences
    num_blocks: int = 0
    free_blocks: int = 0
    block_size: int = 0  # tokens
    tokens_per_s: float = 0.0
    stages: tuple[StageState, ...] = ()
    context_length: int = 0  # tokens, prompt and output
    address: str = ""  # HOST:PORT for gateways
    manifest_hash: str = ""
    message: str = ""  # current activity, for people
    progress: float = 0.0  # 0..1 while loading
    why: str = ""  # reason for this M, for people
    bottleneck: str = ""  # slowest server: "stage 1" or "link 1-2", counted from 0; empty while not known
    predicted_tokens_per_s: float = 0.0  # at this M with the running sequences; 0 while not known
    latency_ms: float = 0.0  # of the whole ring: one-way delays, sampling, the token's return
    preemptions: int = 0  # since the epoch began
    admitted_tokens: int = 0  # since the epoch began: known tokens of sequences when they were admitted
    cached_tokens: int = 0  # admitted tokens found in the prefix cache
    decode_rows: float = 0.0  # rows of a micro-batch of the running sequences; 0 if none runs
    recoveries: int = 0  # epochs that replaced a failed one
    stall_ms: int = 0  # total, from the detection of a failure to the first token after it
    moves: int = 0  # epochs that began after a requested move
    move_pause_ms: int = 0  # total, from the end of the old epoch to the first token after it
    kept_tokens: int = 0  # of sequences that survived a failure: found still computed
    replayed_tokens: int = 0  # of the same sequences: recomputed by the stages up to the last one that lost them
    left_out: tuple[LeftOut, ...] = ()  # current quarantines


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The engine's record of one step. Each machine has its own monotonic clock."""

    step: int
    decode_rows: int
    prefill_tokens: int
    micro_batches: int  # M when it was planned
    planned_us: int  # engine's clock
    used_blocks: int  # of the KV pool, when it was planned
    spans: tuple[tuple[int, int], ...]  # per stage: start and end on its device, stage's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """Record of the recent steps."""

    steps: tuple[StepTrace, ...]
    now_us: int  # engine's clock
    preemptions: int  # since the epoch began


def serve_spec_to_wire(spec: ServeSpec) -> node_pb2.ServeSpec:
    """Convert a serve spec for the wire."""
    return node_pb2.ServeSpec(
        model=spec.model,
        manifest_hash=spec.manifest_hash,
        stages=[
            node_pb2.StagePlacement(node_id=stage.node_id, slices=slices_to_wire(stage.slices)) for stage in spec.stages
        ],
        micro_batches=spec.micro_batches,
        context_length=spec.context_length,
        kv_tokens=spec.kv_tokens,
        dtype=spec.dtype,
        activation_type=activation_type_to_wire(spec.activation_type),
        policy=spec.policy,
        throughput=spec.throughput,
        concurrency=spec.concurrency,
        moves=spec.moves,
        num_nodes=spec.num_nodes,
        exclude=spec.exclude,
        first=spec.first,
        fixed=spec.fixed,
        block_size=spec.block_size,
    )


def serve_spec_from_wire(message: node_pb2.ServeSpec) -> ServeSpec:
    """Convert a serve spec. Raises PlanInvalid for an empty range, RemoteProtocolError for an unknown type."""
    unspecified = message.activation_type == common_pb2.ACTIVATION_TYPE_UNSPECIFIED
    return ServeSpec(
        model=message.model,
        manifest_hash=message.manifest_hash,
        stages=tuple(
            StagePlacement(node_id=NodeId(stage.node_id), slices=slices_from_wire(stage.slices))
            for stage in message.stages
        ),
        micro_batches=message.micro_batches,
        context_length=message.context_length,
        kv_tokens=message.kv_tokens,
        dtype=message.dtype or "auto",
        activation_type=ActivationType.BF16 if unspecified else activation_type_from_wire(message.activation_type),
        policy=message.policy,
        throughput=message.throughput,
        concurrency=message.concurrency,
        moves=message.moves,
        num_nodes=message.num_nodes,
        exclude=tuple(message.exclude),
        first=message.first,
        fixed=message.fixed,
        block_size=message.block_size or DEFAULT_BLOCK_SIZE,
    )


def engine_state_to_wire(state: EngineState) -> engine_pb2.EngineState:
    """Convert an engine's state for the wire."""
    return engine_pb2.EngineState(
        model=state.model,
        pipeline_id=state.pipeline_id,
        epoch=epoch_to_wire(state.epoch),
        state=state.state,
        error=None if state.error is None else error_to_wire(state.error),
        micro_batches=state.micro_batches,
        in_flight=state.in_flight,
        running=state.running,
        waiting=state.waiting,
        num_blocks=state.num_blocks,
        free_blocks=state.free_blocks,
        block_size=state.block_size,
        tokens_per_s=state.tokens_per_s,
        stages=[_stage_to_wire(stage) for stage in state.stages],
        context_length=state.context_length,
        address=state.address,
        manifest_hash=state.manifest_hash,
        message=state.message,
        progress=state.progress,
        why=state.why,
        bottleneck=state.bottleneck,
        predicted_tokens_per_s=state.predicted_tokens_per_s,
        latency_ms=state.latency_ms,
        preemptions=state.preemptions,
        admitted_tokens=state.admitted_tokens,
        cached_tokens=state.cached_tokens,
        decode_rows=state.decode_rows,
        recoveries=state.recoveries,
        stall_ms=state.stall_ms,
        moves=state.moves,
        move_pause_ms=state.move_pause_ms,
        kept_tokens=state.kept_tokens,
        replayed_tokens=state.replayed_tokens,
        left_out=[left_out_to_wire(entry) for entry in state.left_out],
    )


def left_out_to_wire(entry: LeftOut) -> engine_pb2.LeftOut:
    """Convert a quarantined node or link for the wire."""
    return engine_pb2.LeftOut(
        node_id=entry.node_id,
        other_id=entry.other_id or "",
        seconds=entry.seconds,
        reason=entry.reason,
        node_name=entry.node_name,
        other_name=entry.other_name,
    )


def _stage_to_wire(stage: StageState) -> engine_pb2.StageState:
    return engine_pb2.StageState(
        node_id=stage.node_id,
        node_name=stage.node_name,
        backend=stage.backend,
        device=stage.device,
        slices=slices_to_wire(stage.slices),
        address=stage.address,
        weight_bytes=stage.weight_bytes,
        kv_bytes=stage.kv_bytes,
        busy=stage.busy,
        step_ms=stage.step_ms,
        upload_ms=stage.upload_ms,
        one_way_ms=stage.one_way_ms,
        decode_ms=stage.decode_ms,
        decode_upload_ms=stage.decode_upload_ms,
        computed_s=stage.computed_s,
        bubble_s=stage.bubble_s,
        hop_bytes=stage.hop_bytes,
        hop_latency_counts=stage.hop_latency_counts,
        hop_latency_s=stage.hop_latency_s,
    )


def trace_to_wire(trace: EngineTrace) -> engine_pb2.EngineTrace:
    """Convert a trace for the wire."""
    message = engine_pb2.EngineTrace(now_us=trace.now_us, preemptions=trace.preemptions)
    for step in trace.steps:
        message.steps.add(
            step=step.step,
            decode_rows=step.decode_rows,
            prefill_tokens=step.prefill_tokens,
            micro_batches=step.micro_batches,
            planned_us=step.planned_us,
            used_blocks=step.used_blocks,
            spans=[engine_pb2.DeviceSpan(begin_us=begin_us, end_us=end_us) for begin_us, end_us in step.spans],
        )
    return message


def trace_from_wire(message: engine_pb2.EngineTrace) -> EngineTrace:
    """Convert a trace from the wire."""
    steps = tuple(
        StepTrace(
            step=step.step,
            decode_rows=step.decode_rows,
            prefill_tokens=step.prefill_tokens,
            micro_batches=step.micro_batches,
            planned_us=step.planned_us,
            used_blocks=step.used_blocks,
            spans=tuple((span.begin_us, span.end_us) for span in step.spans),
        )
        for step in message.steps
    )
    return EngineTrace(steps=steps, now_us=message.now_us, preemptions=message.preemptions)
