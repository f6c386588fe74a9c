"""A node that starts anew at another address, while the network is still changing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from edgepipe.cluster.interfaces import Interface
from edgepipe.config import Config
from edgepipe.daemon import node as node_module
from edgepipe.daemon.machine.data_dir import DataDir
from edgepipe.errors import ConfigInvalid, PortInUse

ETH = Interface(name="eth0", address="10.0.0.5")


class Lives:
    """In place of ``NodeDaemon``: what each node of the process meets when it runs."""

    def __init__(self, *lives: Callable[[], bool]) -> None:
        self.hosts: list[str] = []
        self._lives = list(lives)

    def __call__(self, *, host: str, **_: Any) -> Any:
        self.hosts.append(host)
        return _Node(self._lives.pop(0))


class _Node:
    identity_taken = False
    moves_to = ""

    def __init__(self, live: Callable[[], bool]) -> None:
        self._live = live
        self.begins_anew = False

    async def run(self) -> None:
        self.begins_anew = self._live()

    def stop(self) -> None: ...

    def will_sleep(self) -> None: ...


def moves() -> bool:
    return True


def stops() -> bool:
    return False


def finds_no_port() -> bool:
    raise PortInUse("port 7117 on 10.0.0.5 cannot be used")


async def run(folder: Path, lives: Lives, found: list[list[Interface]], monkeypatch: pytest.MonkeyPatch) -> None:
    """``found``: the machine's addresses at each look; the last ones stay."""
    monkeypatch.setattr(node_module, "NodeDaemon", lives)
    monkeypatch.setattr(node_module, "interfaces", lambda: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(node_module, "_AGAIN_S", 0.01)
    config = Config(name="a", data_dir=folder, interface="eth0")
    data_dir = DataDir(folder)
    try:
        async with asyncio.timeout(30):
            await node_module._run_until_stopped(  # pyright: ignore[reportPrivateUsage]
                config, data_dir, cast("Any", None), None, None
            )
    finally:
        data_dir.close()


async def test_a_node_that_moves_waits_for_a_network_that_is_away_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(moves, stops)
    await run(tmp_path, lives, [[ETH], [], [], [Interface(name="eth0", address="10.0.0.9")]], monkeypatch)
    assert lives.hosts == ["10.0.0.5", "10.0.0.9"]


async def test_a_node_that_moves_to_an_address_that_has_gone_again_tries_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(moves, finds_no_port, finds_no_port, stops)
    await run(tmp_path, lives, [[ETH]], monkeypatch)
    assert len(lives.hosts) == 4


async def test_a_first_start_says_at_once_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigInvalid, match="no interface"):
        await run(tmp_path, Lives(stops), [[]], monkeypatch)
    with pytest.raises(PortInUse):
        await run(tmp_path, Lives(finds_no_port), [[ETH]], monkeypatch)
