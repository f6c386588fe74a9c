"""A place has a key from the end of a write to the beginning of the next one, and never that of other bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.types import TierMove
from edgepipe.ids import EngineId, Epoch
from edgepipe.stage.held_keys import BegunMove, HeldKeys
from edgepipe.wire.plans import keys_of
from edgepipe.wire.sizes import MAX_HELD

EPOCH = Epoch(1, EngineId("e"))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def out(place: int, number: int, *, memory_class: int = 0) -> TierMove:
    return TierMove(memory_class, 0, place, out=True, key=key(number))


def held(keys: HeldKeys) -> dict[tuple[int, bool], list[tuple[int, int]]]:
    """Return place and number of each key, by class and tier."""
    found: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for page in keys.pages(EPOCH):
        numbers = [int.from_bytes(each, "big") for each in keys_of(page.keys)]
        found.setdefault((page.memory_class, page.on_disk), []).extend(zip(page.places, numbers, strict=True))
    return found


def test_a_move_counts_once_it_was_performed() -> None:
    keys = HeldKeys(2)
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
    keys = HeldKeys(1)
    keys.end(keys.begin([out(place, place) for place in range(3)]))
    keys.end(keys.begin([TierMove(0, 9, 0, out=False)]))
    assert held(keys)[0, False] == [(1, 1), (2, 2), (0, 0)]


def test_a_key_is_in_its_newest_place_only() -> None:
    keys = HeldKeys(1)
    keys.end(keys.begin([out(1, 7), out(2, 7)]))
    assert held(keys)[0, False] == [(2, 7)]
    keys.end(keys.begin([out(1, 8)]))
    assert held(keys)[0, False] == [(2, 7), (1, 8)]


def test_a_copy_to_disk_has_the_key_of_what_was_copied() -> None:
    keys = HeldKeys(1)
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
    keys = HeldKeys(1)
    keys.end(keys.begin([out(1, 7), out(2, 8)]))
    keys.end_write(0, 1, 1, keys.begin_write(0, 1, 1))
    keys.give_back(0, [2])
    assert held(keys) == {(0, False): [(1, 7)], (0, True): [(1, 7)]}
    keys.lose_disk()
    assert held(keys) == {(0, False): [(1, 7)]}
    keys.forget_all()
    assert held(keys) == {}


def test_large_reports_come_in_messages_of_bounded_size() -> None:
    keys = HeldKeys(1)
    keys.end(keys.begin([out(place, place) for place in range(2 * MAX_HELD + 5)]))
    assert [len(page.places) for page in keys.pages(EPOCH)] == [MAX_HELD, MAX_HELD, 5]
    assert held(keys)[0, False] == [(place, place) for place in range(2 * MAX_HELD + 5)]


places, numbers = st.integers(0, 3), st.integers(1, 6)
steps = st.lists(st.tuples(st.sampled_from("bbbeeexwwrg"), places, places, numbers), max_size=60)


@given(steps)
def test_a_key_is_that_of_the_bytes_whatever_breaks_off(steps: list[tuple[str, int, int, int]]) -> None:
    """Host memory and disk are lists of what was written; 0: nothing. No disk uses a place that steps in flight use."""
    keys, host, disk = HeldKeys(1), [0] * 4, [0] * 4
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
