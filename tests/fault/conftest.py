"""Nodes that tests break."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.processes.nodes import Nodes


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """They end with the test."""
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()
