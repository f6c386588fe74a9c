"""A place has a key from the end of a write to the beginning of the next one, and never that of other bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.types import BlockRun, RowState, StateWrite, TierMove
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import EngineId, Epoch
from edgepipe.scheduler import PlaceKey, Tier
from edgepipe.stage.held_keys import BegunMove, HeldKeys
from edgepipe.wire.sizes import MAX_HELD
from edgepipe.wire.tiers import keys_of

EPOCH = Epoch(1, EngineId("e"))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def out(place: int, number: int, *, memory_class: int = 0) -> TierMove:
    return TierMove(memory_class, 0, place, out=True, key=key(number))


def tiers(keys: HeldKeys) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return place and number of each key, by class and tier."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for page in keys.pages(EPOCH):
        numbers = [int.from_bytes(each, "big") for each in keys_of(page.keys)]
        found.setdefault((page.memory_class, page.tier), []).extend(zip(page.places, numbers, strict=True))
    return found


def held(keys: HeldKeys) -> dict[tuple[int, bool], list[tuple[int, int]]]:
    """Return the same below the device, by class and whether it is on disk."""
    below = {at: found for at, found in tiers(keys).items() if at[1] != Tier.DEVICE}
    return {(number, tier == Tier.DISK): found for (number, tier), found in below.items()}


def on_device(keys: HeldKeys) -> list[tuple[int, int]]:
    """Return place and number of each key on the device, longest unused first, of the context."""
    return tiers(keys).get((0, Tier.DEVICE), [])


def test_a_move_counts_once_it_was_performed() -> None:
    keys = HeldKeys([9, 9])
    first = keys.begin([out(3, 1), out(4, 2, memory_class=1)])
    assert held(keys) == {}
    keys.end(first)
    assert held(keys) == {(0, False): [(3, 1)], (1, False): [(4, 2)]}
    second = keys.begin([out(3, 5)])
    assert held(keys) == {(1, False): [(4, 2)]}, "the place may be half written"
    keys.end(first)
    assert held(keys) == {(1, False): [(4, 2)]}, "another write has begun"
    keys.end(second)
    assert held(keys)[0, False] == [(3, 5)]


def test_uses_say_which_place_is_the_longest_unused() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(place, place) for place in range(3)]))
    keys.end(keys.begin([TierMove(0, 8, 0, out=False)]))
    assert held(keys)[0, False] == [(1, 1), (2, 2), (0, 0)]


def test_a_key_is_in_its_newest_place_only() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(1, 7), out(2, 7)]))
    assert held(keys)[0, False] == [(2, 7)]
    keys.end(keys.begin([out(1, 8)]))
    assert held(keys)[0, False] == [(2, 7), (1, 8)]


def test_a_copy_to_disk_has_the_key_of_what_was_copied() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(1, 7), out(2, 8)]))
    copied = keys.begin_write(0, 1, 5)
    keys.end_write(0, 1, 5, copied)
    torn = keys.begin_write(0, 2, 6)
    keys.begin([out(2, 9)])
    keys.end_write(0, 2, 6, torn)
    unknown = keys.begin_write(0, 3, 7)
    keys.end_write(0, 3, 7, unknown)
    assert held(keys) == {(0, False): [(1, 7)], (0, True): [(5, 7)]}
    keys.copied_back(0, 4, 5)
    keys.copied_back(0, 1, 6)
    assert held(keys) == {(0, False): [(4, 7)], (0, True): [(5, 7)]}
    keys.lose(0, 5)
    assert held(keys) == {(0, False): [(4, 7)]}


def test_what_the_system_gets_back_is_forgotten() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(1, 7), out(2, 8)]))
    keys.end_write(0, 1, 1, keys.begin_write(0, 1, 1))
    keys.give_back(0, [2])
    assert held(keys) == {(0, False): [(1, 7)], (0, True): [(1, 7)]}
    keys.lose_disk()
    assert held(keys) == {(0, False): [(1, 7)]}
    keys.forget_all()
    assert held(keys) == {}


def test_large_reports_come_in_messages_of_bounded_size() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(place, place) for place in range(2 * MAX_HELD + 5)]))
    assert [len(page.places) for page in keys.pages(EPOCH)] == [MAX_HELD, MAX_HELD, 5]
    assert held(keys)[0, False] == [(place, place) for place in range(2 * MAX_HELD + 5)]


def name(keys: HeldKeys, *named: tuple[int, int], memory_class: int = 0) -> None:
    keys.name([PlaceKey(memory_class, place, key(number)) for place, number in named])


def test_a_block_on_the_device_keeps_its_key_until_a_plan_writes_it() -> None:
    keys = HeldKeys([9])
    name(keys, (2, 7), (3, 8), (4, 9))
    keys.append(0, BlockRun(2, 2), shared=1)
    assert on_device(keys) == [(2, 7), (4, 9)], "the first block of the run is shared, not written"
    keys.append(0, BlockRun(4, 1), shared=1)
    assert on_device(keys) == [(2, 7), (4, 9)]
    name(keys, (5, 7))
    assert on_device(keys) == [(4, 9), (5, 7)], "the newest place of a key"


def test_a_state_that_a_row_writes_has_no_key() -> None:
    keys = HeldKeys([9, 5])
    name(keys, (1, 7), (2, 8), memory_class=1)
    keys.write_states(RowState(1, (StateWrite(3, 2), StateWrite(5, 4))))
    assert tiers(keys) == {(1, Tier.DEVICE): [(1, 7)]}
    keys.write_states(RowState(1, (StateWrite(3, 99),)))


def test_what_comes_back_has_the_key_of_its_copy_once_it_is_there() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(1, 7)]))
    name(keys, (5, 6))
    back = keys.begin([TierMove(0, 5, 1, out=False)])
    assert on_device(keys) == [], "it may be half written"
    name(keys, (5, 7))
    assert on_device(keys) == [], "the engine may say so while this stage has the move before it"
    keys.end(back)
    assert on_device(keys) == [(5, 7)]
    unknown = keys.begin([TierMove(0, 6, 2, out=False)])
    keys.end(unknown)
    assert on_device(keys) == [(5, 7)], "this stage does not know what the place held"


def test_a_move_that_ends_late_does_not_name_what_a_later_step_writes() -> None:
    keys = HeldKeys([9])
    keys.end(keys.begin([out(1, 7)]))
    back = keys.begin([TierMove(0, 5, 1, out=False)])
    keys.append(0, BlockRun(4, 3))
    keys.end(back)
    assert on_device(keys) == []


def test_a_chat_that_has_left_goes_from_its_end() -> None:
    keys = HeldKeys([9])
    name(keys, (1, 1), (2, 2), (3, 3), (7, 4))
    name(keys, (8, 5))
    keys.release([[BlockRun(1, 3), BlockRun(6, 2)]])
    assert on_device(keys) == [(8, 5), (7, 4), (3, 3), (2, 2), (1, 1)]


@pytest.mark.parametrize(("memory_class", "place"), [(0, 9), (1, 0)])
def test_a_place_that_is_not_there_is_refused(memory_class: int, place: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"place {place} of memory class {memory_class}"):
        name(HeldKeys([9]), (place, 1), memory_class=memory_class)


places, numbers = st.integers(0, 3), st.integers(1, 6)
steps = st.lists(st.tuples(st.sampled_from("bbbeeexwwrg"), places, places, numbers), max_size=60)


@given(steps)
def test_a_key_is_that_of_the_bytes_whatever_breaks_off(steps: list[tuple[str, int, int, int]]) -> None:
    """Host memory and disk are lists of what was written; 0: nothing. No disk uses a place that steps in flight use."""
    keys, host, disk = HeldKeys([9]), [0] * 4, [0] * 4
    begun = list[tuple[int, int, Sequence[BegunMove]]]()
    for kind, place, other, number in steps:
        if kind in "rg" and any(place == at for at, _, _ in begun):
            continue
        if kind == "b":
            begun.append((place, number, keys.begin([out(place, number)])))
        elif kind == "e" and begun:  # in the order of their beginning
            at, written, moves = begun.pop(0)
            host[at] = written
            keys.end(moves)
        elif kind == "x" and begun:  # the step was dropped
            begun.pop(0)
        elif kind == "w":
            copied = keys.begin_write(0, place, other)
            disk[other] = host[place]
            keys.end_write(0, place, other, copied)
        elif kind == "r":
            host[place] = disk[other]
            keys.copied_back(0, place, other)
        elif kind == "g":
            host[place] = 0
            keys.give_back(0, [place])
        found = held(keys)
        assert all(host[at] == number for at, number in found.get((0, False), []))
        assert all(disk[at] == number for at, number in found.get((0, True), []))
