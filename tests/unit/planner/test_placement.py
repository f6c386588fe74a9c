"""Layers to nodes: every layer once, nowhere more than fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import EdgepipeError, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.model.facts import ModelConfig, Rope
from edgepipe.planner.placement import Need, NodeRoom, Placed, place, place_by_plan, stage_bytes

MB = 10**6


def config(num_layers: int = 30, *, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=64,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=2000,
        context_length=4096,
        rms_norm_eps=1e-5,
        rope=Rope(),
        tied_embeddings=tied,
    )


def node(name: str, free_bytes: int, *, bytes_per_weight: int = 2) -> NodeRoom:
    return NodeRoom(
        node_id=NodeId(f"node-{name}"),
        name=name,
        free_bytes=free_bytes,
        bytes_per_weight=bytes_per_weight,
        bytes_per_kv=bytes_per_weight,
    )


def layers(placed: tuple[Placed, ...]) -> list[str]:
    return [f"{one.node_id[5:]}:{one.part.layers}" for one in placed]


NEED = Need(config=config(), kv_tokens=512)


def test_one_node_that_holds_it_is_enough():
    assert layers(place(NEED, [node("a", 100 * MB), node("b", 200 * MB)])) == ["b:0-29"]


def test_asked_for_two_nodes_they_share_by_memory():
    placed = place(NEED, [node("a", 200 * MB), node("b", 100 * MB)], num_nodes=2)
    assert layers(placed) == ["a:0-19", "b:20-29"]


def test_too_little_everywhere_says_how_much_is_missing():
    with pytest.raises(NoFeasiblePlacement) as error:
        place(NEED, [node("a", 2 * MB), node("b", 1 * MB)])
    assert "missing" in error.value.fact
    assert "a 2.0 MB" in error.value.fact


def test_more_nodes_than_there_are():
    with pytest.raises(NoFeasiblePlacement):
        place(NEED, [node("a", 200 * MB)], num_nodes=2)


def test_no_node_at_all():
    with pytest.raises(NoFeasiblePlacement):
        place(NEED, [])


def test_more_nodes_than_layers():
    with pytest.raises(PlanInvalid):
        place(Need(config=config(2), kv_tokens=1), [node(str(i), 100 * MB) for i in range(3)], num_nodes=3)


def test_a_plan_is_followed():
    rooms = [node("a", 100 * MB), node("b", 100 * MB)]
    assert layers(place_by_plan(NEED, rooms, "b:0-14, a:15-29")) == ["b:0-14", "a:15-29"]


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
def test_a_plan_with_a_mistake_is_refused(plan: str, says: str):
    with pytest.raises(PlanInvalid) as error:
        place_by_plan(NEED, [node("a", 100 * MB), node("b", 100 * MB)], plan)
    assert says in error.value.what


def test_a_plan_that_does_not_fit_names_the_node():
    with pytest.raises(NoFeasiblePlacement) as error:
        place_by_plan(NEED, [node("a", 100 * MB), node("b", 1 * MB)], "a:0-14,b:15-29")
    assert error.value.node == "b"


def test_two_nodes_of_one_name_must_be_told_apart():
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


@given(rooms=ROOMS, num_layers=st.integers(1, 40), num_nodes=st.integers(0, 6), tied=st.booleans())
def test_every_layer_once_and_nothing_overfull(
    rooms: list[tuple[int, int]], num_layers: int, num_nodes: int, tied: bool
):
    nodes = [node(str(i), free, bytes_per_weight=size) for i, (free, size) in enumerate(rooms)]
    need = Need(config=config(num_layers, tied=tied), kv_tokens=256)
    try:
        placed = place(need, nodes, num_nodes=num_nodes)
    except EdgepipeError:
        return
    by_id = {one.node_id: one for one in nodes}
    assert [layer for one in placed for layer in one.part.layers] == list(range(num_layers))
    assert placed[0].part.embedding
    assert placed[-1].part.head
    assert len({one.node_id for one in placed}) == len(placed) == (num_nodes or len(placed))
    assert all(stage_bytes(need, by_id[one.node_id], one.part) <= by_id[one.node_id].free_bytes for one in placed)


@given(room=st.integers(0, 30 * MB), num_layers=st.integers(1, 40))
def test_a_node_that_holds_everything_is_never_refused(room: int, num_layers: int):
    need = Need(config=config(num_layers), kv_tokens=256)
    whole = place(need, [node("big", 10**12)])[0].part
    fits = stage_bytes(need, node("a", room), whole) <= room
    try:
        assert layers(place(need, [node("a", room)])) == [f"a:{whole.layers}"]
        assert fits
    except NoFeasiblePlacement:
        assert not fits
