"""Processor time that calls of the KV pool take in a pool of 32,768 blocks, by how fragmented it is."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence

from figures import Row, below

from edgepipe.backend.types import BlockRun
from edgepipe.scheduler import KVPool

NUM_BLOCKS = 32_768
PROMPT = 8_192  # blocks: 131,072 tokens
PIECES = (1, 2, 4, 16, 64)  # blocks of each old table
LIMIT_MS = 5.0
REPEATS = 5

Table = Sequence[BlockRun]


def kv_rows() -> list[Row]:
    """Each call for each fragmentation, median of five pools; then what is done per token, in us."""
    rows = [row for piece in PIECES for row in _calls(piece)]
    kinds = ((contiguous, full) for contiguous in (False, True) for full in (False, True))
    return rows + [_growth(contiguous=contiguous, full=full) for contiguous, full in kinds]


def _calls(piece: int) -> list[Row]:
    taken = [_measured(piece) for _ in range(REPEATS)]
    return [
        below(f"KV pool, pieces of {piece}: {name}", statistics.median(one[name] for one in taken), "ms", LIMIT_MS)
        for name in taken[0]
    ]


def _measured(piece: int) -> dict[str, float]:
    ms: dict[str, float] = {}
    table: list[BlockRun] = []
    pool, _ = _old_chats(piece)
    ms["allocate 8192, all idle"] = _ms(lambda: table.extend(pool.allocate(PROMPT, room=PROMPT)))
    ms["carry_over"] = _ms(pool.carry_over)
    ms |= _fragmented(piece)
    paged, _ = _old_chats(piece, contiguous=False)
    ms["allocate 8192, shared blocks"] = _ms(lambda: paged.allocate(PROMPT, room=PROMPT))
    return ms


def _fragmented(piece: int) -> dict[str, float]:
    """Every second piece is in use: no run is longer than a piece."""
    ms: dict[str, float] = {}
    table: list[BlockRun] = []
    pool, used = _old_chats(piece, share=2)
    ms["allocate 8192, half in use"] = _ms(lambda: table.extend(pool.allocate(PROMPT, room=PROMPT)))
    ms["release them"] = _ms(lambda: pool.release(table))
    other, used = _old_chats(piece, share=2)
    grown = other.extend(used, piece, room=2 * PROMPT)
    ms["extend by 1, behind it a table"] = _ms(lambda: table.extend(other.extend(grown, room=PROMPT)))
    ms["extend by 8192, half in use"] = _ms(lambda: other.extend(table, PROMPT, room=PROMPT))
    return ms


def _growth(*, contiguous: bool, full: bool) -> Row:
    """Sixteen tables grow by a block in turn."""
    pool = _old_chats(64, contiguous=contiguous)[0] if full else KVPool(NUM_BLOCKS, contiguous=contiguous)
    tables = [pool.allocate(1, room=512) for _ in range(16)]
    begun_s = time.thread_time()
    for room in range(511, 311, -1):
        tables = [pool.extend(table, room=room) for table in tables]
    us = (time.thread_time() - begun_s) * 1e6 / (16 * 200)
    kind = f"{'runs' if contiguous else 'shared blocks'}, {'full' if full else 'empty'} pool"
    return Row(f"KV pool, extend by 1, mean: {kind}", us, "us")


def _old_chats(piece: int, *, share: int = 1, contiguous: bool = True) -> tuple[KVPool, Table]:
    """A pool full of cached tables, one of ``share`` idle; and one that is not, if any."""
    pool = KVPool(NUM_BLOCKS, contiguous=contiguous)
    tables = [pool.allocate(piece, room=piece) for _ in range(NUM_BLOCKS // piece)]
    for block in range(NUM_BLOCKS):
        pool.enter(block.to_bytes(16, "big"), block)
    released = tables[::share]
    random.Random(1).shuffle(released)
    for table in released:
        pool.release(table)
    gc.collect()
    gc.freeze()  # the engine has no such list of tables, which Python would look through
    return pool, tables[share - 1]


def _ms(call: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    call()
    return (time.thread_time() - begun_s) * 1e3
