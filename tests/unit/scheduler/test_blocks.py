"""The block allocator: ownership exactly, contiguity as far as possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.types import BlockRun
from edgepipe.errors import KVCacheFull
from edgepipe.scheduler import BlockAllocator


def blocks_of(runs: tuple[BlockRun, ...] | list[BlockRun]) -> list[int]:
    return [block for run in runs for block in range(run.start, run.start + run.count)]


def test_a_table_is_one_run_and_grows_in_place() -> None:
    pool = BlockAllocator(16)
    table = list(pool.allocate(3, room=8))
    other = pool.allocate(2, room=4)
    for room in (5, 4, 3):
        table += pool.extend(table, 1, room=room)
    assert blocks_of(table) == list(range(6))
    assert min(blocks_of(other)) >= 8


def test_room_is_shared_when_all_want_more_than_there_is() -> None:
    pool = BlockAllocator(100)
    tables = [list(pool.allocate(1, room=100)) for _ in range(4)]
    for _ in range(20):
        for table in tables:
            table += pool.extend(table, 1, room=50)
    assert all(table[-1].start + table[-1].count - table[0].start == len(blocks_of(table)) for table in tables)


def test_a_short_extent_that_fits_is_preferred_to_a_long_one() -> None:
    pool = BlockAllocator(64)
    first = pool.allocate(4, room=4)
    pool.allocate(1, room=1)
    pool.release(first)
    assert pool.allocate(4, room=4) == (BlockRun(0, 4),)


def test_broken_runs_are_given_when_nothing_else_is_left() -> None:
    pool = BlockAllocator(8)
    singles = [pool.allocate(1, room=1) for _ in range(8)]
    for index in (1, 2, 5):
        pool.release(singles[index])
    assert pool.allocate(3, room=3) == (BlockRun(1, 2), BlockRun(5, 1))


def test_too_many_blocks_take_none() -> None:
    pool = BlockAllocator(4)
    pool.allocate(3, room=3)
    with pytest.raises(KVCacheFull, match="1 of 4"):
        pool.allocate(2, room=2)
    assert pool.free_blocks == 1


def test_a_shared_block_is_free_when_both_have_let_go() -> None:
    pool = BlockAllocator(8)
    table = pool.allocate(4, room=4)
    pool.retain(np.array([table[0].start, table[0].start + 1]))
    pool.release(table)
    assert pool.free_blocks == 6
    pool.release([BlockRun(table[0].start, 2)])
    assert pool.free_blocks == 8


def test_giving_back_twice_is_a_bug() -> None:
    pool = BlockAllocator(4)
    table = pool.allocate(2, room=2)
    pool.release(table)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(table)
    with pytest.raises(RuntimeError, match="shared"):
        pool.retain(np.array(blocks_of(table)))


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(1, 60),
    actions=st.lists(st.tuples(st.sampled_from("aaeefs"), st.integers(0, 20), st.integers(1, 9), st.integers(0, 30))),
)
def test_no_block_is_owned_twice_and_all_come_back(num_blocks: int, actions: list[tuple[str, int, int, int]]) -> None:
    pool = BlockAllocator(num_blocks)
    tables: list[list[BlockRun]] = []
    references = [0] * num_blocks
    for kind, which, count, more in actions:
        table = tables[which % len(tables)] if tables else None
        free = references.count(0)
        if kind == "f" and table is not None:
            tables.remove(table)
            pool.release(table)
            for block in blocks_of(table):
                references[block] -= 1
        elif kind == "s" and table is not None:
            pool.retain(np.array(blocks_of(table[:1])))
            tables.append(table[:1])
            for block in blocks_of(table[:1]):
                references[block] += 1
        elif count > free:
            with pytest.raises(KVCacheFull):
                pool.allocate(count, room=count)
        elif kind in "ae":
            grow = kind == "e" and table is not None
            runs = pool.extend(table, count, room=count + more) if grow and table else pool.allocate(count, room=more)
            assert len(blocks_of(runs)) == count
            for block in blocks_of(runs):
                assert references[block] == 0
                references[block] = 1
            if grow and table:
                table += runs
            else:
                tables.append(list(runs))
        assert pool.free_blocks == references.count(0)
    for table in tables:
        pool.release(table)
    assert pool.free_blocks == num_blocks
    assert pool.allocate(num_blocks, room=num_blocks) == (BlockRun(0, num_blocks),)


def test_a_run_is_roomy_if_both_tables_beside_it_can_grow() -> None:
    pool = BlockAllocator(16)
    assert pool.has_roomy_run(4, room=16)
    assert not pool.has_roomy_run(4, room=17)  # no table is in front of it; behind it a block is missing
    pool.allocate(1, room=8)
    assert pool.has_roomy_run(4, room=8)
    assert not pool.has_roomy_run(9, room=9)  # it needs no more behind it, but blocks that the table in front claims
