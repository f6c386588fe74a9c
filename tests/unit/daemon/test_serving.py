"""What serving decides when nobody says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.daemon.serving.engine_following import EngineFollower
from edgepipe.daemon.serving.serving import Serving
from edgepipe.daemon.serving.spec_room import common_block_size, default_kv_tokens
from edgepipe.errors import NoFeasiblePlacement
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


def serving() -> Serving:
    """Without the parts that a whole node has."""
    fields = ("peers", "models", "ids", "local", "follower", "replicas", "heartbeats", "book", "surveyor", "tasks")
    return Serving(**dict.fromkeys((*fields, "clock")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft", "has_layer", "fits", "placed_with_it"),
    [
        ("", True, True, [True]),
        ("", True, False, [True, False]),
        ("", False, True, [False]),
        ("lookup", True, True, [False]),
        ("off", True, True, [False]),
    ],
)
async def test_the_layer_for_drafts_comes_along_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, draft: str, has_layer: bool, fits: bool, placed_with_it: list[bool]
) -> None:
    plain = tiny_config()
    config = replace(plain, mtp=replace(plain.layers[0], mtp=True)) if has_layer else plain
    model: Any = SimpleNamespace(config=config, drafting=lambda: SimpleNamespace(config=config.with_mtp()))
    request: Any = SimpleNamespace(options=SimpleNamespace(draft=draft))
    tried: list[bool] = []

    async def choose(_request: Any, chosen: Any, *_: Any) -> list[tuple[ModelConfig, str]]:
        tried.append(chosen.config.has_mtp)
        if chosen.config.has_mtp and not fits:
            raise NoFeasiblePlacement("no room")
        return [(chosen.config, "node-a")]

    alone = serving()
    monkeypatch.setattr(alone, "_specs", choose)
    found: Any = (await alone._specs_that_draft(request, model, 256, {}, []))[0][0]
    assert tried == placed_with_it
    assert found.num_layers == plain.num_layers + placed_with_it[-1]


@pytest.mark.parametrize("fits", [True, False])
async def test_a_draft_model_comes_along_where_it_fits(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    draft = SimpleNamespace(name="small")
    bare: Any = SimpleNamespace(config=tiny_config(), draft=None)
    model: Any = SimpleNamespace(config=tiny_config(), draft=draft, drafted_by=lambda _: bare)
    request: Any = SimpleNamespace(options=SimpleNamespace(draft="small"))

    async def choose(_request: Any, chosen: Any, *_: Any) -> list[tuple[Any, str]]:
        if chosen.draft is not None and not fits:
            raise NoFeasiblePlacement(
                "node b lacks 1.2 GB for its layers", fact="they need 3 GB, 1.8 GB are free there"
            )
        return [(chosen, "node-a")]

    alone, changes = serving(), list[str]()
    monkeypatch.setattr(alone, "_specs", choose)
    found: Any = (await alone._specs_that_draft(request, model, 256, {}, changes))[0][0]
    assert (found.draft is draft) == fits
    said = "the draft model small does not fit beside the head: node b lacks 1.2 GB for its layers (they need 3 GB, "
    said += "1.8 GB are free there). Drafts come from a lookup"
    assert changes == ([] if fits else [said])


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1:", "127.0.0.1:no", "127.0.0.1:1"])
async def test_an_engine_s_address_that_is_none_is_no_error(address: str) -> None:
    """A node may report any address. Gateways that send requests there get the error."""
    engine = EngineState(
        model="m", pipeline_id=PipelineId("p"), epoch=Epoch(1, EngineId("e")), state="ready", address=address
    )
    follower = EngineFollower(**dict.fromkeys(("peers", "local", "gateway", "book")))  # type: ignore[arg-type]
    assert await follower._no_way_to(engine, "node-a") is None


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
    assert common_block_size(profiles) == common_block_size(profiles, "8bit") == common
    assert common_block_size(profiles, "4bit") == max(common, 32)
