"""Faults that once lasted until a cluster was restarted by hand: after each a new client gets 20 tokens within 30 s."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgepipe.testing.chaos import lasting_faults
from edgepipe.testing.chaos.clients import Clients

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    async with lasting_faults.home(tmp_path_factory.mktemp("home")) as made:
        yield made


async def test_chats_are_answered_again_when_broken_devices_are_repaired(clients: Clients):
    await lasting_faults.broken_for_a_while(clients)
