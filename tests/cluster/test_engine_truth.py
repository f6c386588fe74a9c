"""Under load, every token is right, and every block comes back."""

from __future__ import annotations

import pytest

from tests.support.engine_load import run_load


@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
async def test_every_token_is_right_and_every_block_comes_back(contiguous_kv: bool) -> None:
    stats = await run_load(
        seed=1, tokens=2_500, contiguous_kv=contiguous_kv, num_gateways=3, max_blocks=40, longest=100
    )
    assert stats.cached_tokens > 0.1 * stats.admitted_tokens
    assert stats.preemptions > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
async def test_two_hundred_thousand_tokens_are_right(contiguous_kv: bool) -> None:
    stats = await run_load(seed=2, tokens=200_000, contiguous_kv=contiguous_kv, num_gateways=8, max_blocks=280)
    assert stats.cached_tokens > 0.1 * stats.admitted_tokens
    assert stats.preemptions > 0
