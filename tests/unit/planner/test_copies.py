"""Copies of a model's parts on several disks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgepipe.ids import NodeId
from edgepipe.planner.copies import Disk, ModelParts, plan_copies
from edgepipe.spec.facts import LayerRange, Slice

PARTS = ModelParts(sizes=(5, 10, 10, 10, 10, 6))
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def disk(node_id: NodeId, *holds: int, free: int = 1000, computes: bool = True) -> Disk:
    return Disk(node_id=node_id, holds=frozenset(holds), free_bytes=free, computes=computes)


def part(first: int, last: int, *, of: int = 4) -> Slice:
    layers = LayerRange(first, last + 1)
    return Slice(index=0, layers=layers, embedding=first == 0, head=last == of - 1)


def test_a_slice_needs_its_layers_and_a_tied_head_the_embedding() -> None:
    assert PARTS.of([part(0, 1)]) == {0, 1, 2}
    assert PARTS.of([part(2, 3)]) == {3, 4, 5}
    assert ModelParts(sizes=PARTS.sizes, tied=True).of([part(2, 3)]) == {0, 3, 4, 5}
    assert PARTS.fetch_bytes(frozenset({3}), [part(2, 3)]) == 16


def test_what_one_disk_has_alone_is_copied_to_another_in_one_piece() -> None:
    plan = plan_copies(PARTS, [disk(A, *range(6)), disk(B, 3, 4, 5), disk(C)], copies=2)
    assert plan.fetch == {C: (0, 1, 2)}
    assert plan.lacking_bytes == 0


def test_what_fits_on_no_disk_whole_is_spread_and_what_fits_nowhere_is_counted() -> None:
    disks = [disk(A, *range(6), free=0), disk(B, free=26), disk(C, free=12)]
    plan = plan_copies(PARTS, disks, copies=2)
    assert plan.fetch == {B: (0, 1, 2), C: (3,)}
    assert plan.lacking_bytes == 10 + 6


def test_a_node_that_cannot_compute_keeps_copies_when_no_other_has_room() -> None:
    whole = disk(A, *range(6))
    assert plan_copies(PARTS, [whole, disk(B, computes=False), disk(C)], copies=2).fetch == {C: tuple(range(6))}
    plan = plan_copies(PARTS, [whole, disk(B, computes=False), disk(C, free=0)], copies=2)
    assert plan.fetch == {B: tuple(range(6))}


def test_parts_that_nobody_has_are_named_and_the_others_copied() -> None:
    plan = plan_copies(PARTS, [disk(A, 0, 1, 2, 3, 5), disk(B)], copies=2)
    assert plan.lost == (4,)
    assert plan.fetch == {B: (0, 1, 2, 3, 5)}


@given(
    st.lists(st.integers(1, 20), min_size=3, max_size=8),
    st.lists(
        st.tuples(st.sets(st.integers(0, 7)), st.integers(0, 120), st.booleans(), st.booleans()), min_size=1, max_size=5
    ),
    st.integers(1, 3),
)
def test_every_part_has_its_copies_or_there_is_no_room(
    sizes: list[int], drawn: list[tuple[set[int], int, bool, bool]], copies: int
) -> None:
    parts = ModelParts(sizes=tuple(sizes))
    disks = [
        Disk(
            node_id=NodeId(f"n{index}"),
            holds=frozenset(held) & parts.all,
            free_bytes=free,
            computes=computes,
            leaves=leaves,
        )
        for index, (held, free, computes, leaves) in enumerate(drawn)
    ]
    plan = plan_copies(parts, disks, copies=copies)
    for disk in disks:
        fetched = plan.fetch.get(disk.node_id, ())
        assert not disk.holds.intersection(fetched)
        assert parts.num_bytes(fetched) <= disk.free_bytes * (not disk.leaves)
    after = [disk.holds | set(plan.fetch.get(disk.node_id, ())) for disk in disks]
    possible = [
        min(copies, sum(number in disk.holds or not disk.leaves for disk in disks)) for number in range(len(sizes))
    ]
    counts = [sum(number in held for held in after) for number in range(len(sizes))]
    missing = sum(
        size * (wanted - count)
        for number, (size, count, wanted) in enumerate(zip(sizes, counts, possible, strict=True))
        if count < wanted and number not in plan.lost
    )
    assert missing == plan.lacking_bytes
    for number in plan.lost:
        assert counts[number] == 0
