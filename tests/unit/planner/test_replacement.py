"""Layers of lost nodes, and who takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgepipe_emulated import emulated_model_config

from edgepipe.ids import NodeId
from edgepipe.planner.placement import Need, NodeRoom, Placed, stage_bytes
from edgepipe.planner.replacement import replace_lost
from edgepipe.spec.facts import LayerRange, Slice, make_slices

CONFIG = emulated_model_config(num_layers=6)
NEED = Need(config=CONFIG, kv_tokens=64)
SLICES = make_slices([LayerRange(0, 1), LayerRange(1, 4), LayerRange(4, 6)], 6)
STANDING = tuple(Placed(node_id=NodeId(name), part=part) for name, part in zip("abc", SLICES, strict=True))


def room(name: str, free_bytes: int = 1 << 40) -> NodeRoom:
    return NodeRoom(node_id=NodeId(name), name=name, free_bytes=free_bytes, bytes_per_weight=2)


def costs(given: Mapping[str, int]) -> Callable[[NodeId, Sequence[Slice]], int]:
    return lambda node_id, _slices: given.get(node_id, 0)


def homes(placed: tuple[Placed, ...] | None) -> str:
    assert placed is not None
    assert [stage.part for stage in placed] == list(SLICES)
    return "".join(stage.node_id for stage in placed)


def test_nobody_moves_while_all_are_there() -> None:
    assert homes(replace_lost(NEED, STANDING, [room(name) for name in "abcd"], fetch_bytes=costs({}))) == "abc"


def test_a_lost_stage_goes_where_least_is_to_be_fetched() -> None:
    rooms = [room(name) for name in "acde"]
    assert homes(replace_lost(NEED, STANDING, rooms, fetch_bytes=costs({"d": 10, "e": 0}))) == "aec"


def test_nodes_that_do_not_reach_each_other_are_no_neighbours() -> None:
    rooms = [room(name) for name in "abcd"]
    apart = {(NodeId("c"), NodeId("b")), (NodeId("b"), NodeId("c"))}
    assert replace_lost(NEED, STANDING, rooms, fetch_bytes=costs({}), broken=apart) is None
    assert (
        homes(replace_lost(NEED, STANDING, rooms[1:], fetch_bytes=costs({}), broken={(NodeId("b"), NodeId("a"))}))
        == "dbc"
    )


def test_a_node_without_room_is_passed_over_and_the_largest_stage_chooses_first() -> None:
    small = stage_bytes(NEED, room("d"), SLICES[0])
    rooms = [room("c"), room("d", small), room("e")]
    assert homes(replace_lost(NEED, STANDING, rooms, fetch_bytes=costs({"e": 5}))) == "dec"


def test_with_too_few_nodes_there_is_no_replacement() -> None:
    assert replace_lost(NEED, STANDING, [room("a"), room("c")], fetch_bytes=costs({})) is None
    assert replace_lost(NEED, STANDING, [room("a"), room("c"), room("d", 1)], fetch_bytes=costs({})) is None
