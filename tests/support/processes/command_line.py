"""What runs of the command line return, and statuses to print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import BackendUnavailable
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.engines import DraftState, EngineState, StageState
from edgepipe.wire.nodes import ClusterStatus, DeviceState, MemberState, NodeState, Transfer


@dataclass(frozen=True, slots=True)
class Result:
    """How a command line ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def make_status() -> ClusterStatus:
    """Two nodes that serve a model, one that fetches, one that has a problem."""
    gamer = make_member("gamer", device="cuda:0", reserved_bytes=20_600_000_000, free_bytes=1_000_000_000)
    studio = make_member("studio", backend="mlx", reserved_bytes=21_700_000_000, free_bytes=25_300_000_000)
    laptop = make_member(
        "old-laptop",
        device="cpu",
        dtype="",
        state="failed",
        error=BackendUnavailable("torch cannot run on this machine"),
    )
    transfer = Transfer(model="org/bigger", source="node-gamer", bytes_done=12_400_000_000, bytes_total=19_300_000_000)
    engine = make_engine(
        "org/Llama-3.3-70B-Instruct",
        micro_batches=2,
        running=2,
        num_blocks=512,
        free_blocks=480,
        block_size=16,
        tokens_per_s=16.0,
        why="2, since stage 1 takes 62.0 ms a step and never waits; "
        "each token takes 90.1 ms, 4.0 ms of it on the network",
        bottleneck="stage 1",
        predicted_tokens_per_s=32.3,
        admitted_tokens=1000,
        cached_tokens=250,
        preemptions=2,
        drafts=DraftState(source="auto", windows=400, drafted=1500, accepted=1080, factor=1.83),
        recoveries=3,
        stall_ms=1500,
        moves=2,
        move_pause_ms=400,
        kept_tokens=1232,
        replayed_tokens=640,
        context_length=8192,
        stages=(
            _stage(0, "gamer", LayerRange(0, 39), backend="torch", busy=0.38, decode_ms=24.1),
            _stage(1, "studio", LayerRange(39, 80), backend="mlx", busy=0.99, decode_ms=62.0),
        ),
    )
    return ClusterStatus(
        cluster_id="home",
        cluster_name="home",
        node_id=NodeId("node-1"),
        uptime_ms=11_520_000,
        data_dir="/x",
        members=(
            replace(gamer, self=True),
            replace(studio, rtt_ms=0.41),
            replace(laptop, rtt_ms=7.8, state="suspect", node=replace(laptop.node, transfers=(transfer,))),
        ),
        engines=(engine,),
    )


def make_member(
    name: str, *, backend: str = "torch", device: str = "gpu", dtype: str = "bfloat16", **changes: Any
) -> MemberState:
    """A live node with one device, which has the fields in ``changes``."""
    profile = DeviceProfile(
        backend=backend,
        device=device,
        name="",
        compute_dtype=dtype,
        memory_total_bytes=0,
        memory_free_bytes=0,
        bandwidth_bytes_per_s=0.0,
        flops=0.0,
    )
    serving = DeviceState(profile=profile, state="serving")
    node = NodeState(node_id=NodeId(f"node-{name}"), name=name, http_port=8117, devices=(replace(serving, **changes),))
    return MemberState(node=node, state="alive")


def make_engine(model: str, **changes: Any) -> EngineState:
    """An engine that is ready."""
    ready = EngineState(
        model=model, pipeline_id=PipelineId("pipeline-1"), epoch=Epoch(1, EngineId("engine-1")), state="ready"
    )
    return replace(ready, **changes)


def with_engine(status: ClusterStatus, **changes: Any) -> ClusterStatus:
    """The status with another state of its first engine."""
    first, *others = status.engines
    return replace(status, engines=(replace(first, **changes), *others))


def with_devices(status: ClusterStatus, changed: Callable[[DeviceState], DeviceState]) -> ClusterStatus:
    """The status with another state of every device."""
    members = [
        replace(member, node=replace(member.node, devices=tuple(map(changed, member.node.devices))))
        for member in status.members
    ]
    return replace(status, members=tuple(members))


def _stage(index: int, name: str, layers: LayerRange, *, backend: str, busy: float, decode_ms: float) -> StageState:
    return StageState(
        node_id=NodeId(f"node-{name}"),
        node_name=name,
        backend=backend,
        device="gpu",
        slices=(Slice(index=index, layers=layers, embedding=index == 0, head=index == 1),),
        weight_bytes=19_300_000_000,
        kv_bytes=1_300_000_000,
        busy=busy,
        decode_ms=decode_ms,
        one_way_ms=0.2,
    )
