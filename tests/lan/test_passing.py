"""A decode passes a prompt's chunk on a real link: past the buffers of gRPC, of the system and of the network."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.support.network.lan import LanLab
from tests.support.network.link_load import Load, measure

pytestmark = [pytest.mark.lan, pytest.mark.timeout(120)]
RATE = 25e6  # 200 Mbit/s: a chunk of 16 MB takes 0.64 s


async def test_decodes_do_not_wait_for_a_chunk() -> None:
    async with LanLab(hosts=["studio", "attic"], mtu=9000) as lan:
        studio, attic = lan.hosts
        lan.shape(delay_s=0.001)
        lan.link("studio", "attic").change(bytes_per_s=RATE, queue_bytes=1_000_000)
        run = partial(
            measure,
            Load(bytes_per_s=RATE, num_chunks=3),
            address=f"{attic.address}:5077",
            receiving=attic.command([]),
            sending=studio.command([]),
        )
        ways = await asyncio.to_thread(run)
    assert len(ways.decodes_s) == 14
    assert ways.passing >= 14, "in order, none passes"
