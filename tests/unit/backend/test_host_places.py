"""Host memory in places: the system gets whole places back, unless they are used again, and the others keep theirs."""

from __future__ import annotations

import mmap
import sys
import threading

import pytest

from edgepipe.backend.host_places import HostPlaces, PinningFailed

SIZES, COUNTS = (3 * mmap.PAGESIZE + 100, 40), (8, 2)


class Pinned:
    """Remembers which memory is pinned, by its first byte; ``room`` more places can be."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.held: list[bytes] = []
        self.released: list[bytes] = []

    def pin(self, memory: memoryview) -> None:
        """See ``Pins``."""
        if not self.room:
            raise PinningFailed("no more than that")
        self.room -= 1
        assert len(memory) % mmap.PAGESIZE == 0
        self.held.append(bytes(memory[:1]))

    def unpin(self, memory: memoryview) -> None:
        """See ``Pins``."""
        self.held.remove(bytes(memory[:1]))
        self.released.append(bytes(memory[:1]))


def filled(pins: Pinned | None = None) -> HostPlaces:
    """Places whose bytes are their numbers, counted from 1."""
    places = HostPlaces(SIZES, COUNTS, pins)
    for number, count in enumerate(COUNTS):
        for place in range(count):
            places.place(number, place)[:] = bytes([place + 1]) * SIZES[number]
    return places


def first_bytes(places: HostPlaces, number: int = 0) -> list[int]:
    return [places.place(number, place)[0] for place in range(COUNTS[number])]


def test_other_places_keep_what_they_hold() -> None:
    places = filled()
    places.give_back(0, [6, 2, 3])
    places.close()
    kept = [bytes(places.place(0, place)) for place in (0, 1, 4, 5, 7)]
    assert kept == [bytes([place + 1]) * SIZES[0] for place in (0, 1, 4, 5, 7)]
    assert first_bytes(places, 1) == [1, 2]
    places.place(0, 3)[:] = b"x" * SIZES[0]
    assert bytes(places.place(0, 3)) == b"x" * SIZES[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux frees the pages at once")
def test_the_system_has_the_whole_of_a_place() -> None:
    places = filled()
    places.give_back(0, [2, 4])
    places.close()
    assert [bytes(places.place(0, place)) for place in (2, 4)] == [bytes(SIZES[0])] * 2
    assert first_bytes(places) == [1, 2, 0, 4, 0, 6, 7, 8]


def test_a_place_that_is_used_again_before_it_is_freed_keeps_what_is_written() -> None:
    """The thread is held up; meanwhile a disk fills one of the places, and a step another."""
    places, go_on = filled(), threading.Event()
    places.give_back(0, [0])
    places._jobs.put((0, _Blocked(go_on)))  # pyright: ignore
    places.give_back(0, [3, 4, 5])
    places.place(0, 3)[:] = b"d" * SIZES[0]
    assert not places.prepare(0, 5)
    places.place(0, 5)[:] = b"s" * SIZES[0]
    go_on.set()
    places.close()
    assert (bytes(places.place(0, 3)), bytes(places.place(0, 5))) == (b"d" * SIZES[0], b"s" * SIZES[0])
    assert sys.platform != "linux" or first_bytes(places) == [0, 2, 3, ord("d"), 0, ord("s"), 7, 8]


class _Blocked(list[int]):
    """Places that the thread waits for."""

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__()
        self._go_on = go_on

    def __iter__(self):
        self._go_on.wait()
        return super().__iter__()


def test_a_place_is_pinned_by_its_first_use_until_the_system_gets_it_back() -> None:
    pins = Pinned()
    places = filled(pins)
    assert [places.prepare(0, place) for place in (2, 2, 6, 0)] == [True] * 4
    assert pins.held == [b"\3", b"\7", b"\1"]
    places.give_back(0, [2, 3])
    places.close()
    assert sorted(pins.released) == [b"\1", b"\3", b"\7"]
    assert pins.held == []
    places.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pins = Pinned(room=1)
    places = filled(pins)
    assert [places.prepare(0, place) for place in (2, 3, 4, 2)] == [True, False, False, True]
    assert caplog.text.count("more slowly: no more than that") == 1
    places.give_back(0, [3])
    places.close()
    assert pins.released == [b"\3"]


def test_a_class_without_places_takes_nothing() -> None:
    places = HostPlaces((100, 0), (0, 3))
    places.give_back(0, [])
    places.give_back(1, [0, 2])
    places.close()
    assert bytes(places.place(1, 2)) == b""
