"""A gateway in front of a fake engine, as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    """One gateway for a whole file of tests that leave it as it was."""
    async with serving(FakeEngine()) as value:
        yield value


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A gateway over a fake engine that answers at once."""
    async with serving(FakeEngine()) as value:
        yield value
