"""What runs of the command line return, and statuses to print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgepipe.wire.v1 import common_pb2, engine_pb2
from edgepipe.wire.v1 import node_pb2 as pb


@dataclass(frozen=True, slots=True)
class Result:
    """How a command line ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def make_status() -> pb.ClusterStatus:
    """Two nodes that serve a model, one that fetches, one that has a problem."""
    status = pb.ClusterStatus(
        cluster_id="home", cluster_name="home", node_id="node-1", uptime_ms=11_520_000, data_dir="/x"
    )
    _member(status, "gamer", backend="torch", device="cuda:0", dtype="bfloat16", reserved=20.6e9, free=1.0e9, own=True)
    _member(status, "studio", backend="mlx", device="gpu", dtype="bfloat16", reserved=21.7e9, free=25.3e9, rtt_ms=0.41)
    broken = _member(status, "old-laptop", backend="torch", device="cpu", dtype="", reserved=0, free=0, rtt_ms=7.8)
    broken.node.devices[0].state = "failed"
    broken.node.devices[0].error.what = "torch cannot run on this machine"
    broken.state = "suspect"
    transfer = broken.node.transfers.add(model="org/bigger", source="node-gamer", bytes_done=12_400_000_000)
    transfer.bytes_total = 19_300_000_000
    engine = status.engines.add(
        model="org/Llama-3.3-70B-Instruct",
        state="ready",
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
        recoveries=3,
        stall_ms=1500,
        moves=2,
        move_pause_ms=400,
        kept_tokens=1232,
        replayed_tokens=640,
        context_length=8192,
    )
    _stage(engine, "gamer", 0, 39, backend="torch", busy=0.38, decode_ms=24.1, one_way_ms=0.2)
    _stage(engine, "studio", 39, 80, backend="mlx", busy=0.99, decode_ms=62.0, one_way_ms=0.2)
    return status


def _member(
    status: pb.ClusterStatus,
    name: str,
    *,
    backend: str,
    device: str,
    dtype: str,
    reserved: float,
    free: float,
    own: bool = False,
    rtt_ms: float = 0.0,
) -> pb.MemberState:
    member = status.members.add(state="alive", rtt_ms=rtt_ms, self=own)
    member.node.name, member.node.node_id, member.node.http_port = name, f"node-{name}", 8117
    member.node.devices.add(
        profile=common_pb2.DeviceProfile(backend=backend, device=device, compute_dtype=dtype),
        reserved_bytes=int(reserved),
        free_bytes=int(free),
        state="serving",
    )
    return member


def _stage(
    engine: engine_pb2.EngineState,
    name: str,
    start: int,
    end: int,
    *,
    backend: str,
    busy: float,
    decode_ms: float,
    one_way_ms: float,
) -> None:
    stage = engine.stages.add(
        node_id=f"node-{name}",
        node_name=name,
        backend=backend,
        device="gpu",
        weight_bytes=19_300_000_000,
        kv_bytes=1_300_000_000,
        busy=busy,
        decode_ms=decode_ms,
        one_way_ms=one_way_ms,
    )
    stage.slices.add(layers=common_pb2.LayerRange(start=start, end=end))
