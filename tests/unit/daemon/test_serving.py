"""What serving decides when nobody says."""

from __future__ import annotations

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.daemon.serving.serving import Serving, common_block_size, default_kv_tokens
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.placement import NodeRoom, Placed
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.layout import slice_parameters
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.wire.engines import EngineState


def room(*, host: bool) -> NodeRoom:
    return NodeRoom(
        node_id=NodeId("node-a"),
        name="a",
        free_bytes=10**12,
        bytes_per_weight=4,
        shares_host_memory=host,
    )


def alone(config: ModelConfig) -> tuple[Placed, ...]:
    (whole,) = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    return (Placed(node_id=NodeId("node-a"), part=whole),)


@pytest.mark.parametrize("context", [256, 100_000])
def test_gpus_get_room_for_sixteen_long_chats_and_at_least_one_context(context: int) -> None:
    config = tiny_config()
    placed = alone(config)
    assert default_kv_tokens(config, context, placed, [room(host=False)]) == max(16 * min(context, 4096), context)


def test_host_memory_is_taken_modestly() -> None:
    config = tiny_config(num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, hidden_size=64)
    placed = alone(config)
    tokens = default_kv_tokens(config, 1024, placed, [room(host=True)])
    token_bytes = config.kv_bytes_per_token(form="float32")
    weights = 4 * slice_parameters(config, placed[0].part)
    assert tokens == max(1024, max(512 << 20, weights) // token_bytes)


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1:", "127.0.0.1:no", "127.0.0.1:1"])
async def test_an_engine_s_address_that_is_none_is_no_error(address: str) -> None:
    """A node may report any address. Gateways that send requests there get the error."""
    fields = ("peers", "models", "ids", "local", "gateway", "heartbeats", "book", "surveyor", "tasks")
    serving = Serving(**dict.fromkeys(fields))  # type: ignore[arg-type]
    engine = EngineState(
        model="m", pipeline_id=PipelineId("p"), epoch=Epoch(1, EngineId("e")), state="ready", address=address
    )
    assert await serving._no_way_to(engine, "node-a") is None


@pytest.mark.parametrize(
    ("sizes", "common"),
    [([], 16), ([(16, 256), (16,)], 16), ([(16, 256), (256,)], 256), ([(16,), (256,)], 16), ([(), (256,)], 256)],
)
def test_a_block_is_as_small_as_every_device_serves_well(sizes: list[tuple[int, ...]], common: int) -> None:
    profiles = [
        DeviceProfile(
            backend="torch",
            device="cpu",
            name="CPU",
            compute_dtype="float32",
            memory_total_bytes=0,
            memory_free_bytes=0,
            bandwidth_bytes_per_s=0,
            flops=0,
            block_sizes=each,
        )
        for each in sizes
    ]
    assert common_block_size(profiles) == common
