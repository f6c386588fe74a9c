"""The KV pool: what a table gets, what is evicted for it, and how much work that is."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edgepipe.backend.types import BlockRun
from edgepipe.errors import KVCacheFull
from edgepipe.scheduler import KVPool, blocks, kv
from edgepipe.scheduler.kv import as_runs

Table = list[BlockRun]


def listed(table: Table | tuple[BlockRun, ...]) -> list[int]:
    return [block for run in table for block in range(run.start, run.start + run.count)]


def key(block: int) -> bytes:
    return block.to_bytes(16, "big")


def pool_of_pieces(num_blocks: int, piece: int, *, release: float = 1.0, contiguous: bool = True) -> KVPool:
    """A pool full of cached tables of ``piece`` blocks, this share of them idle, in random order of age."""
    pool = KVPool(num_blocks, contiguous=contiguous)
    tables = [pool.allocate(piece, room=piece) for _ in range(num_blocks // piece)]
    for block in itertools.chain.from_iterable(map(listed, tables)):
        pool.enter(key(block), block)
    released = tables[:: round(1 / release)]
    random.Random(1).shuffle(released)
    for table in released:
        pool.release(table)
    return pool


def test_a_long_prompt_into_a_full_pool_gets_one_run() -> None:
    count = 131_072 // 16
    pool = pool_of_pieces(4 * count, 64)
    cached = pool.cached_blocks
    assert len(pool.allocate(count, room=count)) == 1
    assert cached - pool.cached_blocks <= 1.1 * count


def test_a_long_prompt_that_fits_nowhere_gets_few_runs_and_evicts_what_it_takes() -> None:
    pool = pool_of_pieces(2048, 16, release=0.5)
    cached = pool.cached_blocks
    first, second = (pool.allocate(500, room=500) for _ in range(2))
    assert [sorted(run.count for run in table) for table in (first, second)] == [[4] + [16] * 31] * 2
    assert cached - pool.cached_blocks == 1000


def test_of_places_of_one_length_those_of_old_chats_are_taken() -> None:
    pool = KVPool(64, contiguous=True)
    tables = [pool.allocate(4, room=4) for _ in range(16)]
    for block in range(64):
        pool.enter(key(block), block)
    for index in (9, 1, 15, 5, 11, 7, 13, 3):
        pool.release(tables[index])
    assert {*listed(pool.allocate(14, room=14))} == {*range(36, 40), *range(4, 8), *range(60, 64), 22, 23}


def test_an_old_chat_makes_room_before_the_one_that_just_ended() -> None:
    pool = KVPool(30, contiguous=True)
    tables = [pool.allocate(9, room=9) for _ in range(3)]
    for table in tables:
        for block in listed(table):
            pool.enter(key(block), block)
    for index in (1, 2, 0):
        pool.release(tables[index])
    assert listed(pool.allocate(9, room=9)) == listed(tables[1]), "three free blocks behind the third count for less"


def test_a_new_chat_does_not_hinder_one_that_goes_on() -> None:
    pool = KVPool(1000, contiguous=True)
    going = list(pool.allocate(10, room=110))
    old = pool.allocate(990, room=990)
    for block in listed(old):
        pool.enter(key(block), block)
    for run in (BlockRun(start, 10) for start in range(10, 1000, 10)):
        pool.release((run,))
    new = pool.allocate(10, room=60)
    for room in range(100, 0, -1):
        going += pool.extend(going, room=room)
    assert as_runs(listed(going)) == (BlockRun(0, 110),)
    assert new == (BlockRun(110, 10),), "the oldest behind it"


def test_a_chat_that_reaches_another_goes_on_where_it_has_room() -> None:
    pool = KVPool(600, contiguous=True)
    going = list(pool.allocate(4, room=4))
    other = pool.allocate(4, room=4)
    old = pool.allocate(592, room=592)
    for block in listed(old):
        pool.enter(key(block), block)
    pool.release(old)
    for room in range(200, 100, -1):
        going += pool.extend(going, room=room)
    assert not {*listed(going)} & {*listed(other)}
    assert len(as_runs(listed(going))) == 2


def test_a_table_grows_by_many_blocks_over_idle_ones_in_place() -> None:
    pool = pool_of_pieces(64, 4)
    table = list(pool.allocate(4, room=4))
    start = table[0].start
    if start > 32:
        pytest.fail("the scenario needs room behind the table")
    table += pool.extend(table, 20, room=20)
    assert as_runs(listed(table)) == (BlockRun(start, 24),)


def test_blocks_that_two_copies_hold_are_idle_when_both_are_done() -> None:
    pool = KVPool(8, contiguous=True)
    table = pool.allocate(3, room=3)
    for block in listed(table):
        pool.enter(key(block), block)
    pool.release(table)
    pool.hold([0, 1, 2])
    pool.hold([0, 1])
    pool.release_references([0, 1, 2, 0, 1])
    assert (pool.free_blocks, pool.num_idle([0, 1, 2])) == (8, 3)
    assert listed(pool.allocate(6, room=6)) == [2, 3, 4, 5, 6, 7], "the end of what was held goes first"


def test_in_the_next_epoch_what_was_computed_last_goes_first() -> None:
    pool = KVPool(3, contiguous=False)
    first, second = pool.allocate(1, room=1), pool.allocate(1, room=1)
    pool.enter(key(0), 0)
    pool.enter(key(1), 1)
    pool.release(first)
    table = pool.allocate(2, room=2)
    assert not pool.find([key(0)])
    assert {*listed(table)} == {0, 2}
    pool.enter(key(0), 2)
    pool = pool.carry_over()
    assert pool.free_blocks == 3
    pool.allocate(2, room=2)
    assert (pool.find([key(0)]), pool.find([key(1)])) == ([], listed(second))


def least_loss(pool: KVPool, ages: list[int], available: set[int], count: int) -> int:
    """What the cheapest window loses, tried one by one."""
    value = {block: place for place, block in enumerate(ages, start=1)}
    windows = (range(start, start + count) for start in range(pool.num_blocks - count + 1))
    return min(sum(value.get(block, 0) for block in window) for window in windows if available.issuperset(window))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_all_windows_the_one_that_loses_least_goes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    pool = KVPool(sum(sizes), contiguous=True)
    tables = [pool.allocate(size, room=size) for size in sizes]
    for block in range(pool.num_blocks):
        if data.draw(st.booleans()):
            pool.enter(key(block), block)
    released = data.draw(st.permutations(tables))[: data.draw(st.integers(0, len(tables)))]
    for table in released:
        pool.release(table)
    available = {block for table in released for block in listed(table)}
    ages = [block for table in released for block in reversed(listed(table)) if pool.find([key(block)])]
    longest = max((run.count for run in as_runs(sorted(available))), default=0)
    if not longest:
        return
    count = data.draw(st.integers(1, longest))
    expected = least_loss(pool, ages, available, count)
    assert len(pool.allocate(count, room=count)) == 1
    assert sum(place for place, block in enumerate(ages, start=1) if not pool.find([key(block)])) == expected


NUM_TEXTS = 6
TEXTS = st.integers(0, NUM_TEXTS - 1)


class AnyUse(RuleBasedStateMachine):
    """Tables, copies and epochs in any order, against dictionaries and lists."""

    @initialize(contiguous=st.booleans(), num_blocks=st.integers(1, 30))
    def begin(self, contiguous: bool, num_blocks: int) -> None:
        self.contiguous = contiguous
        self.pool = KVPool(num_blocks, contiguous=contiguous)
        self.tables: list[tuple[Table, int]] = []  # with the text that it computes
        self.held: list[list[int]] = []
        self.references: Counter[int] = Counter()  # of tables and copies
        self.cached: dict[bytes, int] = {}  # in the order of entering
        self.idle: list[int] = []  # the longest idle first
        self.stale: set[int] = set()

    def key(self, text: int, index: int) -> bytes:
        return bytes([text, index])

    def free(self) -> set[int]:
        return {*range(self.pool.num_blocks)} - {*self.references} - {*self.cached.values()}

    def known(self, text: int) -> list[int]:
        keys = [self.key(text, index) for index in range(self.pool.num_blocks)]
        return [self.cached[key] for key in itertools.takewhile(self.cached.__contains__, keys)]

    def refer(self, taken: list[int]) -> None:
        self.references.update(taken)
        self.idle = [block for block in self.idle if block not in self.references]

    def release_references(self, given: list[int]) -> None:
        self.references -= Counter(given)
        cached = {*self.cached.values()}
        for block in reversed(list(dict.fromkeys(given))):
            if block in cached and block not in self.references and block not in self.idle:
                self.idle.append(block)

    def evict(self, gone: list[int]) -> None:
        self.cached = {key: block for key, block in self.cached.items() if block not in gone}
        self.idle = [block for block in self.idle if block not in gone]
        self.stale -= {*gone}

    def got(self, runs: tuple[BlockRun, ...], count: int, behind: int | None) -> None:
        """Check what a table got, and what was evicted for it."""
        taken, free = listed(runs), self.free()
        gone = [block for key, block in self.cached.items() if self.pool.find([key]) != [block]]
        assert len(taken) == len({*taken}) == count
        assert {*taken} <= free | {*self.idle}, "a block has two owners"
        if self.contiguous:
            assert {*gone} == {*taken} & {*self.idle}, "what is evicted is taken"
            self.few_runs(runs, count, free | {*self.idle}, behind)
        else:
            assert gone == [*self.cached_in(self.idle[: max(0, count - len(free))])]
        self.evict(gone)
        self.refer(taken)

    def cached_in(self, gone: list[int]) -> list[int]:
        return [block for block in self.cached.values() if block in gone]

    def few_runs(self, runs: tuple[BlockRun, ...], count: int, available: set[int], behind: int | None) -> None:
        grown = 0
        while behind is not None and grown < count and behind + grown in available:
            grown += 1
        if grown:
            assert runs[0] == BlockRun(behind or 0, grown)
            runs, count, available = runs[1:], count - grown, available - {*range(behind or 0, (behind or 0) + grown)}
        lengths = sorted((run.count for run in as_runs(sorted(available))), reverse=True)
        totals = itertools.accumulate(lengths, initial=0)
        assert len(runs) == next(num for num, total in enumerate(totals) if total >= count)

    @rule(count=st.integers(1, 12), growth=st.integers(0, 12), text=TEXTS)
    def allocate(self, count: int, growth: int, text: int) -> None:
        if count > len(self.free()) + len(self.idle):
            with pytest.raises(KVCacheFull):
                self.pool.allocate(count, room=count + growth)
            return
        runs = self.pool.allocate(count, room=count + growth)
        self.got(runs, count, None)
        self.tables.append(([*runs], text))

    @rule(count=st.integers(1, 12), text=TEXTS)
    def chat(self, count: int, text: int) -> None:
        before = len(self.tables)
        self.allocate(count, 0, text)
        if len(self.tables) > before:
            self.enter(-1, count)
            self.release(-1)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0), count=st.sampled_from([1, 1, 1, 2, 9]), growth=st.integers(0, 12))
    def extend(self, which: int, count: int, growth: int) -> None:
        table, _ = self.tables[which % len(self.tables)]
        if count > len(self.free()) + len(self.idle):
            with pytest.raises(KVCacheFull):
                self.pool.extend(table, count, room=count + growth)
            return
        runs = self.pool.extend(table, count, room=count + growth)
        self.got(runs, count, table[-1].start + table[-1].count)
        table += runs

    @rule(text=TEXTS, more=st.integers(1, 4))
    def adopt(self, text: int, more: int) -> None:
        known = self.known(text)
        if not known or more > len(self.free()) + len({*self.idle} - {*known}):
            return
        if self.contiguous and not self.pool.can_adopt(known, more=more):
            return
        self.pool.hold(known)
        self.refer(known)
        table = [*as_runs(known)]
        self.tables.append((table, text))
        runs = self.pool.extend(table, more, room=more)
        self.got(runs, more, known[-1] + 1)
        table += runs

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0), count=st.integers(0, 12))
    def enter(self, which: int, count: int) -> None:
        table, text = self.tables[which % len(self.tables)]
        for index, block in enumerate(listed(table)[:count]):
            key = self.key(text, index)
            known = self.cached.get(key)
            self.pool.enter(key, block)
            if known == block:
                self.stale.discard(block)
            elif known is None or known in self.stale:
                self.evict([] if known is None else [known])
                self.cached[key] = block

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0))
    def release(self, which: int) -> None:
        table, _ = self.tables.pop(which % len(self.tables))
        self.pool.release(table)
        self.release_references(listed(table))

    @rule(text=TEXTS, times=st.integers(1, 2))
    def hold(self, text: int, times: int) -> None:
        known = self.known(text)
        for _ in range(times if known else 0):
            self.pool.hold(known)
            self.refer(known)
        self.held += [known * times] if known else []

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0))
    def let_copies_go(self, which: int) -> None:
        held = self.held.pop(which % len(self.held))
        self.pool.release_references(held)
        self.release_references(held)

    @rule(lost=st.booleans())
    def next_epoch(self, lost: bool) -> None:
        self.pool = self.pool.carry_over()
        self.idle += [block for block in reversed(self.cached.values()) if block in self.references]
        self.tables, self.held, self.references = [], [], Counter()
        if lost:
            self.pool.lose(0)
            self.stale = {*self.cached.values()}

    @invariant()
    def counts_and_contents_are_right(self) -> None:
        assert self.pool.free_blocks == len(self.free()) + len(self.idle)
        assert self.pool.cached_blocks == len(self.cached)
        for text in range(NUM_TEXTS):
            known = self.known(text)
            assert self.pool.find([self.key(text, index) for index in range(self.pool.num_blocks)]) == known
            assert self.pool.num_idle(known) == len({*known} & {*self.idle})
            current = [*itertools.takewhile(lambda block: block not in self.stale, known)]
            assert self.pool.num_current(known) == len(current)


def test_every_block_has_one_owner_and_the_cache_tells_the_truth() -> None:
    run_state_machine_as_test(AnyUse, settings=settings(max_examples=50, stateful_step_count=30, deadline=None))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_block_has_one_owner_and_the_cache_tells_the_truth_for_long() -> None:
    run_state_machine_as_test(AnyUse, settings=settings(max_examples=3000, stateful_step_count=60, deadline=None))


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of the pool's Python a call runs; numpy's passes over the pool count as one."""
    files = {str(Path(module.__file__ or "")) for module in (blocks, kv)}
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("contiguous", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("release", [1.0, 0.5], ids=["all idle", "half idle"])
@pytest.mark.parametrize("piece", [1, 16])
def test_calls_do_not_walk_the_pool_block_by_block(piece: int, release: float, contiguous: bool) -> None:
    pool = pool_of_pieces(3072, piece, release=release, contiguous=contiguous)
    table: Table = []
    assert lines_run(lambda: table.extend(pool.allocate(768, room=768))) < 150
    assert lines_run(lambda: table.extend(pool.extend(table, 700, room=700))) < 150 + 4 * 700, "it looks what is behind"
    assert lines_run(lambda: pool.release(table)) < 50 + 3 * len(table), "it reads the runs"
    assert lines_run(pool.carry_over) < 100


def test_a_lost_block_is_current_again_once_its_own_table_has_computed_it() -> None:
    pool = KVPool(8, contiguous=False)
    cached, other = listed(pool.allocate(2, room=2))
    pool.enter(key(cached), cached)
    pool.lose(0)
    pool.refresh(key(cached), other)  # another table computed the same tokens into a block of its own
    assert pool.is_stale(cached)
    pool.refresh(key(cached), cached)
    assert not pool.is_stale(cached)
    assert not pool.any_stale
