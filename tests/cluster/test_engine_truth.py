"""Under load, every token is right, and every block comes back."""

from __future__ import annotations

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.spec.memory_classes import memory_classes
from tests.support.engine.lab import CONFIG
from tests.support.engine.load import run_load

WINDOWS = emulated_model_config(num_layers=6, context_length=512, windows=(16, 24, None))
STATES = emulated_model_config(num_layers=6, context_length=512, attention_every=3)
EXPERTS = emulated_model_config(num_layers=6, context_length=512, experts=(16, 4))
BOTH = (
    pytest.param(False, id="shared"),
    pytest.param(True, id="copied", marks=pytest.mark.long),
)


@pytest.mark.parametrize("contiguous_kv", BOTH)
async def test_every_token_is_right_and_every_block_comes_back(contiguous_kv: bool) -> None:
    load = await run_load(seed=1, tokens=1_100, contiguous_kv=contiguous_kv, num_gateways=3, max_blocks=40, longest=100)
    assert load.cached_tokens > 0.1 * load.num_tokens
    assert load.preemptions > 0


async def test_every_token_of_experts_is_right_though_stages_are_lost() -> None:
    load = await run_load(
        seed=3,
        tokens=700,
        contiguous_kv=False,
        num_gateways=2,
        max_blocks=26,
        longest=70,
        config=EXPERTS,
        losses=2,
    )
    assert load.preemptions > 0


@pytest.mark.parametrize("contiguous_kv", BOTH)
async def test_every_token_of_windowed_layers_is_right_though_stages_are_lost(contiguous_kv: bool) -> None:
    await run_load(
        seed=5,
        tokens=500,
        contiguous_kv=contiguous_kv,
        num_gateways=2,
        max_blocks=160,
        longest=70,
        config=WINDOWS,
        losses=2,
    )
    assert memory_classes(WINDOWS).pools(num_blocks=160, block_size=16)[0].num_blocks == 30


@pytest.mark.parametrize("contiguous_kv", BOTH)
async def test_every_token_of_recurrent_layers_is_right_though_stages_are_lost(contiguous_kv: bool) -> None:
    load = await run_load(
        seed=7,
        tokens=1_800,
        contiguous_kv=contiguous_kv,
        num_gateways=2,
        max_blocks=160,
        longest=70,
        config=STATES,
        losses=3,
        num_openings=3,
    )
    assert load.cached_tokens > 0


TIERS = {"context": (CONFIG, ""), "windows": (WINDOWS, ""), "states": (STATES, ""), "4 bits": (CONFIG, "4bit")}


@pytest.mark.parametrize("contiguous_kv", BOTH)
@pytest.mark.parametrize("name", ["context", "states", "4 bits", pytest.param("windows", marks=pytest.mark.long)])
async def test_every_token_is_right_though_prompts_come_back_from_host_memory(name: str, contiguous_kv: bool) -> None:
    config, kv = TIERS[name]
    load = await run_load(
        seed=9,
        tokens=500,
        contiguous_kv=contiguous_kv,
        num_gateways=2,
        max_blocks=44,
        max_host_blocks=400,
        longest=60,
        config=config,
        kv=kv,
        losses=2,
    )
    assert load.restored_tokens > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("name", TIERS)
async def test_two_hundred_thousand_tokens_over_host_memory_are_right(name: str, contiguous_kv: bool) -> None:
    config, kv = TIERS[name]
    load = await run_load(
        seed=10,
        tokens=200_000,
        contiguous_kv=contiguous_kv,
        num_gateways=8,
        max_blocks=120,
        max_host_blocks=600,
        config=config,
        kv=kv,
        losses=16,
    )
    assert load.restored_tokens > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("name", TIERS)
async def test_two_hundred_thousand_tokens_over_host_memory_and_disk_are_right(name: str, contiguous_kv: bool) -> None:
    load = await run_load(
        seed=12,
        tokens=200_000,
        contiguous_kv=contiguous_kv,
        num_gateways=8,
        max_blocks=100,
        max_host_blocks=60,
        max_disk_blocks=800,
        config=TIERS[name][0],
        kv=TIERS[name][1],
        losses=16,
    )
    assert load.fetched_tokens > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
async def test_a_quarter_of_a_million_tokens_of_recurrent_layers_are_right(contiguous_kv: bool) -> None:
    load = await run_load(
        seed=8,
        tokens=250_000,
        contiguous_kv=contiguous_kv,
        num_gateways=8,
        max_blocks=280,
        config=STATES,
        losses=20,
    )
    assert load.cached_tokens > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
async def test_a_hundred_thousand_tokens_of_windowed_layers_are_right(contiguous_kv: bool) -> None:
    load = await run_load(
        seed=6,
        tokens=100_000,
        contiguous_kv=contiguous_kv,
        num_gateways=8,
        max_blocks=280,
        config=WINDOWS,
        losses=10,
    )
    assert load.cached_tokens > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
async def test_two_hundred_thousand_tokens_are_right(contiguous_kv: bool) -> None:
    load = await run_load(seed=2, tokens=200_000, contiguous_kv=contiguous_kv, num_gateways=8, max_blocks=280)
    assert load.cached_tokens > 0.1 * load.num_tokens
    assert load.preemptions > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_half_a_million_tokens_of_experts_are_right_though_stages_are_lost() -> None:
    load = await run_load(
        seed=4,
        tokens=500_000,
        contiguous_kv=False,
        num_gateways=8,
        max_blocks=280,
        config=EXPERTS,
        losses=40,
    )
    assert load.preemptions > 0
