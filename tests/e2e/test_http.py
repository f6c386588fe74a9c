"""HTTP in front of real nodes: keys beyond loopback, and keys of one's own."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from edgepipe.cli.find import find_target
from edgepipe.cluster.interfaces import interfaces
from tests.support.models.for_nodes import pull_emulated
from tests.support.processes.nodes import Node, Nodes, idle

KEY = "a-key-of-my-own"


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()


def _url(node: Node, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{node.http_port}"


async def _status_of(url: str, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=10, trust_env=False, verify=False) as client:
        return (await client.get(f"{url}/v1/models", headers=headers)).status_code


def _lan_address() -> str:
    found = [interface.address for interface in interfaces() if not ipaddress.ip_address(interface.address).is_loopback]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


async def test_beyond_this_machine_a_key_is_needed_and_was_made(nodes: Nodes) -> None:
    address = _lan_address()
    node = await nodes.start("a", backend="none", discovery=False, http_host=address)
    file = node.data_dir / "api-key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert len(key) > 40
    assert await _status_of(_url(node, address)) == 401
    assert await _status_of(_url(node, address), "ep-guess") == 401
    assert await _status_of(_url(node, address), key) == 200
    assert await _status_of(_url(node)) == 200  # this machine asks as before
    async with httpx.AsyncClient(timeout=10, trust_env=False, verify=False) as client:
        assert (await client.get(_url(node, address) + "/health")).status_code == 200
        foreign = await client.get(_url(node, address) + "/health", headers={"host": "evil.example"})
        assert foreign.status_code == 421


async def test_a_key_by_setting_is_asked_for_here_too_and_the_command_line_knows_it(nodes: Nodes) -> None:
    pull_emulated(nodes.folder / "a" / "models", nodes.folder / "tiny")
    node = await nodes.start("a", discovery=False, api_key=KEY)
    await node.until(lambda status: idle(status, 1))
    await node.serve("tiny")
    assert await _status_of(_url(node)) == 401
    assert await _status_of(_url(node), KEY) == 200
    target = await find_target(node.data_dir, "tiny")
    assert target.api_key == KEY
    assert KEY not in repr(target)
