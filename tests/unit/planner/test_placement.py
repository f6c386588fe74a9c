"""Layers to nodes: every layer once, nowhere more than fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgepipe_emulated import emulated_model_config
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import CostModel
from edgepipe.backend.devices import named_device
from edgepipe.errors import EdgepipeError, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.placement import Need, NodeRoom, Placed, place_by_plan, stage_bytes
from edgepipe.planner.plan import plan
from edgepipe.planner.profiles import Links, Machine, TableSpeed
from edgepipe.spec.facts import ModelConfig
from edgepipe.units import parse_link

MB = 10**6


def config(num_layers: int = 30, *, tied: bool = True) -> ModelConfig:
    return emulated_model_config(num_layers=num_layers, vocab_size=2000, context_length=4096, tied_embeddings=tied)


def node(name: str, free_bytes: int, *, bytes_per_weight: int = 2) -> NodeRoom:
    return NodeRoom(
        node_id=NodeId(f"node-{name}"),
        name=name,
        free_bytes=free_bytes,
        bytes_per_weight=bytes_per_weight,
    )


def layers(placed: tuple[Placed, ...]) -> list[str]:
    return [f"{stage.node_id[5:]}:{stage.part.layers}" for stage in placed]


NEED = Need(config=config(), kv_tokens=512)


def test_a_plan_is_followed() -> None:
    rooms = [node("a", 100 * MB), node("b", 100 * MB)]
    assert layers(place_by_plan(NEED, rooms, "b:0-14, a:15-29")) == ["b:0-14", "a:15-29"]


def test_a_plan_of_the_model_s_layers_takes_its_layer_for_drafts_along() -> None:
    plain = config()
    drafting = replace(plain, mtp=replace(plain.layers[0], mtp=True)).with_mtp()
    need = replace(NEED, config=drafting)
    rooms = [node("a", 100 * MB), node("b", 100 * MB)]
    for written in ("b:0-14,a:15-29", "b:0-14,a:15-30"):
        assert layers(place_by_plan(need, rooms, written)) == ["b:0-14", "a:15-30"]
    with pytest.raises(PlanInvalid, match="covers 29 layers"):
        place_by_plan(need, rooms, "b:0-14,a:15-28")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("a:0-14,b:16-29", "leaves out layer 15"),
        ("a:0-14,b:14-29", "twice"),
        ("a:0-14", "15 layers"),
        ("a:0-14,b:15-30", "31 layers"),
        ("a:0-14,c:15-29", "'c'"),
        ("a:0-14,b", "'b'"),
        ("", "''"),
        ("a:14-0,b:15-29", "range"),
    ],
)
def test_a_plan_with_a_mistake_is_refused(plan: str, says: str) -> None:
    with pytest.raises(PlanInvalid) as error:
        place_by_plan(NEED, [node("a", 100 * MB), node("b", 100 * MB)], plan)
    assert says in error.value.what


def test_a_plan_that_does_not_fit_names_the_node() -> None:
    with pytest.raises(NoFeasiblePlacement) as error:
        place_by_plan(NEED, [node("a", 100 * MB), node("b", 1 * MB)], "a:0-14,b:15-29")
    assert error.value.node == "b"


def test_two_nodes_of_one_name_must_be_told_apart() -> None:
    twins = [node("a", 100 * MB), NodeRoom(**{**as_dict(node("a", 100 * MB)), "node_id": NodeId("node-2")})]
    with pytest.raises(PlanInvalid):
        place_by_plan(NEED, twins, "a:0-29")
    assert layers(place_by_plan(NEED, twins, "node-2:0-29")) == ["2:0-29"]


def as_dict(room: NodeRoom) -> dict[str, object]:
    return {name: getattr(room, name) for name in NodeRoom.__slots__}


ROOMS = st.lists(
    st.builds(lambda free, size: (free, size), st.integers(0, 30 * MB), st.sampled_from([2, 4])),
    min_size=1,
    max_size=6,
)


def searched(nodes: list[NodeRoom], shape: ModelConfig, *, num_nodes: int = 0) -> tuple[Placed, ...]:
    """By the search, with nodes that are fast alike."""
    speed = TableSpeed(CostModel(shape, named_device("rtx4090")))
    machines = [Machine(room=room, device="", speed=speed) for room in nodes]
    demand = Demand(config=shape, context_tokens=256, must_keep_tokens=256)
    links = Links(assumed=parse_link("1gbit,0.3ms"))
    return plan(demand, machines, links, Constraints(num_nodes=num_nodes), explain=False).placed


@settings(max_examples=60)
@given(rooms=ROOMS, num_layers=st.integers(1, 40), num_nodes=st.integers(0, 6), tied=st.booleans())
def test_every_layer_once_and_nothing_overfull(
    rooms: list[tuple[int, int]], num_layers: int, num_nodes: int, tied: bool
) -> None:
    nodes = [node(str(i), free, bytes_per_weight=size) for i, (free, size) in enumerate(rooms)]
    shape = config(num_layers, tied=tied)
    try:
        placed = searched(nodes, shape, num_nodes=num_nodes)
    except EdgepipeError:
        return
    need = Need(config=shape, kv_tokens=256)
    by_id = {node.node_id: node for node in nodes}
    assert [layer for stage in placed for layer in stage.part.layers] == list(range(num_layers))
    assert placed[0].part.embedding
    assert placed[-1].part.head
    assert len({stage.node_id for stage in placed}) == len(placed) == (num_nodes or len(placed))
    assert all(
        stage_bytes(need, by_id[stage.node_id], stage.part) <= by_id[stage.node_id].free_bytes for stage in placed
    )


@settings(max_examples=60)
@given(room=st.integers(0, 30 * MB), num_layers=st.integers(1, 40))
def test_a_node_that_holds_everything_is_never_refused(room: int, num_layers: int) -> None:
    shape = config(num_layers)
    whole = searched([node("big", 10**12)], shape)[0].part
    fits = stage_bytes(Need(config=shape, kv_tokens=256), node("a", room), whole) <= room
    try:
        assert layers(searched([node("a", room)], shape)) == [f"a:{whole.layers}"]
        assert fits
    except NoFeasiblePlacement:
        assert not fits
