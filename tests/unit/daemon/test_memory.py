"""Reservations of a device's memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.daemon.device.memory import MemoryLedger, headroom_bytes
from edgepipe.errors import NoFeasiblePlacement

GB = 10**9


def ledger(free_bytes: int = 16 * GB, *, on_host: bool = False, limit_bytes: int = 0) -> MemoryLedger:
    return MemoryLedger(node="a", free_bytes=free_bytes, total_bytes=24 * GB, on_host=on_host, limit_bytes=limit_bytes)


def test_what_is_reserved_is_gone_until_it_is_released() -> None:
    memory = ledger()
    before = memory.free_bytes
    held = memory.reserve("p", weight_bytes=4 * GB, kv_token_bytes=1000, kv_tokens=1000)
    assert held.kv_bytes == 10**6
    assert memory.free_bytes == before - 4 * GB - 10**6
    memory.release("p")
    assert memory.free_bytes == before


def test_refusal_says_what_is_missing_and_changes_nothing() -> None:
    memory = ledger()
    before = memory.free_bytes
    with pytest.raises(NoFeasiblePlacement) as error:
        memory.reserve("p", weight_bytes=20 * GB, kv_token_bytes=1000, kv_tokens=1000)
    assert "lacks" in error.value.what
    assert error.value.node == "a"
    assert memory.free_bytes == before


def test_weights_that_took_more_than_was_told_take_it_from_the_kv_cache() -> None:
    memory = ledger()
    held = memory.reserve("p", weight_bytes=4 * GB, kv_token_bytes=10**6, kv_tokens=5000)
    before = memory.free_bytes
    assert memory.loaded("p", weight_bytes=3 * GB) == held  # others may have been promised the rest
    more = memory.loaded("p", weight_bytes=6 * GB)
    assert (more.weight_bytes, more.kv_bytes) == (6 * GB, held.kv_bytes - 2 * GB)
    assert memory.free_bytes == before
    assert memory.loaded("p", weight_bytes=20 * GB).kv_bytes == 0
    memory.release("p")
    assert memory.loaded("p", weight_bytes=GB).kv_bytes == 0  # released while it was loading
    assert "p" not in memory.held


def test_kv_is_cut_to_what_fits() -> None:
    memory = ledger(7 * GB)
    held = memory.reserve("p", weight_bytes=4 * GB, kv_token_bytes=10**6, kv_tokens=10**6)
    assert 512 * 10**6 <= held.kv_bytes < 2 * GB


def test_host_memory_is_shared_with_everything_else() -> None:
    held = ledger(20 * GB, on_host=True).reserve("p", weight_bytes=GB, kv_token_bytes=10**6, kv_tokens=10**6)
    assert held.kv_bytes < 5 * GB


def test_a_limit_bounds_all_reservations_together() -> None:
    memory = ledger(limit_bytes=3 * GB)
    memory.reserve("p", weight_bytes=2 * GB, kv_token_bytes=1, kv_tokens=1)
    with pytest.raises(NoFeasiblePlacement):
        memory.reserve("q", weight_bytes=2 * GB, kv_token_bytes=1, kv_tokens=1)


@given(
    asks=st.lists(
        st.tuples(st.sampled_from("pqr"), st.integers(0, 12 * GB), st.integers(0, 10**6), st.integers(1, 10**5)),
        max_size=12,
    ),
    free=st.integers(0, 24 * GB),
    on_host=st.booleans(),
)
def test_no_order_of_reservations_takes_more_than_there_is(
    asks: list[tuple[str, int, int, int]], free: int, on_host: bool
) -> None:
    memory = ledger(free, on_host=on_host)
    for holder, weight_bytes, token_bytes, tokens in asks:
        try:
            memory.reserve(holder, weight_bytes=weight_bytes, kv_token_bytes=token_bytes, kv_tokens=tokens)
        except NoFeasiblePlacement:
            memory.release(holder)
        most = max(0, free - headroom_bytes(total_bytes=24 * GB, on_host=on_host))
        assert memory.reserved_bytes <= most
