"""Tests on the LAN lab skip where it cannot run, except where it must: as root in continuous integration."""

from __future__ import annotations

import os

import pytest

from tests.support.network.lan import LanAvailability, lan_available


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
