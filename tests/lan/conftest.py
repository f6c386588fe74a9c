"""Tests on the LAN lab skip where it cannot run, except where it must: as root in continuous integration."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.network.lan import LanAvailability, LanLab, lan_available
from tests.support.processes.nodes import Nodes


@pytest.fixture(scope="session")
def lan_availability() -> LanAvailability:
    """Tried once per run."""
    return lan_available()


@pytest.fixture(autouse=True)
def needs_lan(lan_availability: LanAvailability) -> None:
    """Skip with the reason; fail instead where ``CI=true`` and root promise a lab."""
    if lan_availability:
        return
    if os.environ.get("CI") == "true" and os.geteuid() == 0:
        pytest.fail(f"{lan_availability.reason}, and in continuous integration as root it must run")
    pytest.skip(lan_availability.reason)


@pytest.fixture
async def lan(request: pytest.FixtureRequest) -> AsyncIterator[LanLab]:
    """A lab with the hosts that the test's module names in ``HOSTS``."""
    async with LanLab(hosts=request.module.HOSTS) as lab:
        yield lab


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """Nodes of one cluster, which end with the test."""
    made = Nodes(folder=tmp_path, cluster="lan-test")
    yield made
    await made.end()
