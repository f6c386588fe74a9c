"""How much host memory a stage uses while other programs need the machine's memory, too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.host_memory import headroom_bytes
from edgepipe.backend.types import TierMove
from edgepipe.errors import RemoteProtocolError
from edgepipe.stage.host_bound import GROW_S, WHOLE, HostBound, HostUse, check_places

GB = 10**9
MACHINE = 32 * GB
KEPT = headroom_bytes(MACHINE)


def look(bound: HostBound, *, left: int, held: int, now_s: float = 0.0) -> bool:
    return bound.look(available_bytes=left, machine_bytes=MACHINE, held_bytes=held, now_s=now_s)


def test_a_tier_with_room_stays_whole() -> None:
    bound = HostBound(tier_bytes=8 * GB)
    assert not look(bound, left=8 * GB + KEPT, held=0)
    assert not look(bound, left=KEPT, held=8 * GB)
    assert bound.permille == WHOLE


def test_a_shortage_counts_at_once_and_what_the_tier_holds_is_part_of_its_room() -> None:
    bound = HostBound(tier_bytes=8 * GB)
    assert look(bound, left=KEPT // 2, held=8 * GB)
    assert 890 < bound.permille < 910, "half of the headroom less, and a little more"
    assert not look(bound, left=KEPT // 2, held=8 * GB), "the memory that is being given back is still held"
    assert look(bound, left=KEPT // 5, held=6 * GB)
    assert 340 < bound.permille < 350, "the machine may swap: half of what it holds"
    assert look(bound, left=0, held=GB)
    assert bound.permille == 0, "the headroom is more than what it holds"


def test_room_counts_again_after_a_while_and_only_what_was_there_all_the_time() -> None:
    bound = HostBound(tier_bytes=8 * GB)
    look(bound, left=KEPT + 2 * GB, held=0)
    short = bound.permille
    assert not look(bound, left=KEPT + 7 * GB, held=0, now_s=1.0)
    assert not look(bound, left=KEPT + 4 * GB, held=GB, now_s=2.0)
    assert not look(bound, left=KEPT + 7 * GB, held=GB, now_s=0.9 + GROW_S)
    assert look(bound, left=KEPT + 7 * GB, held=GB, now_s=1.0 + GROW_S)
    assert short < bound.permille == 625, "five of eight"
    assert not look(bound, left=KEPT + 9 * GB, held=0, now_s=100.0)
    assert not look(bound, left=KEPT + 5 * GB, held=0, now_s=105.0), "not worth it"
    assert not look(bound, left=KEPT + 9 * GB, held=0, now_s=101.0 + GROW_S), "the time begins again"
    assert look(bound, left=KEPT + 9 * GB, held=0, now_s=101.0 + 2 * GROW_S)
    assert bound.permille == WHOLE


@given(st.lists(st.tuples(st.integers(0, 20 * GB), st.floats(0, 30)), min_size=1, max_size=40))
def test_the_bound_never_exceeds_the_room(history: list[tuple[int, float]]) -> None:
    """The tier fills what it may use. Six looks are enough to give back what it may not."""
    bound, now_s, held = HostBound(tier_bytes=8 * GB), 0.0, 0
    for room, pause_s in history:
        now_s += pause_s
        for _ in range(6):
            look(bound, left=max(0, KEPT + room - held), held=held, now_s=now_s)
            assert 0 <= bound.permille <= WHOLE
            held = 8 * GB * bound.permille // WHOLE
        assert held <= room


def test_only_places_that_hold_something_take_memory() -> None:
    use = HostUse((100, 7), (4, 2))
    assert use.total_bytes == 414
    use.moved([TierMove(0, 9, 2, True), TierMove(0, 9, 2, True), TierMove(1, 3, 0, True), TierMove(0, 1, 3, False)])
    assert use.held_bytes == 107
    use.filled(0, 3)
    use.given_back(0, [2, 1])
    assert use.held_bytes == 107
    use.given_back(1, [0])
    assert use.held_bytes == 100


@pytest.mark.parametrize(
    ("number", "places", "fact"),
    [
        (2, (0,), "memory class 2"),
        (0, (4,), "host memory has 4 places"),
        (0, (), "they are 0"),
        (0, (0,) * 257, "they are 257"),
    ],
)
def test_places_that_the_stage_does_not_have_are_refused(number: int, places: tuple[int, ...], fact: str) -> None:
    check_places(0, (3, 0), (4, 2))
    with pytest.raises(RemoteProtocolError, match="places to give back are invalid") as refused:
        check_places(number, places, (4, 2))
    assert fact in refused.value.fact
