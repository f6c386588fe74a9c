"""``edgepipe doctor`` on hosts of their own: it tells a firewall from a dead machine from a node that is not there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edgepipe.testing.lan import LanHost, LanLab

pytestmark = pytest.mark.lan

PORT = 7117


@pytest.fixture
async def lan() -> AsyncIterator[LanLab]:
    async with LanLab(hosts=2) as lab:
        yield lab


def environment(folder: Path) -> dict[str, str]:
    """One without settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
    return kept | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "80"}


async def doctor(host: LanHost, *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and findings by id."""
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "doctor", "--json", "--data-dir", str(host.folder), *args]
    done = await host.run(command, timeout_s=60, env=environment(host.folder))
    assert done.stderr == ""
    return done.exit_code, {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}


async def start_node(host: LanHost) -> None:
    """A node without a device; returns when it is ready."""
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "node", "start", "--json", "--backend", "none"]
    command += ["--name", host.name, "--data-dir", str(host.folder / "node"), "--interface", host.address]
    process = await host.spawn(command, env=environment(host.folder), stdout=-1)
    assert process.stdout is not None
    await process.stdout.readuntil(b"}\n")


async def test_multicast_is_heard_from_another_machine(lan: LanLab) -> None:
    await start_node(lan.host("b"))
    _, findings = await doctor(lan.host("a"))
    assert findings["network.multicast4"]["level"] == "ok"
    assert findings["network.interface"]["what"].startswith("network: ")
    assert "10.77.0.1" in findings["network.interface"]["what"]


async def test_a_node_that_is_not_there_is_told_from_a_machine_that_is_not(lan: LanLab) -> None:
    code, findings = await doctor(lan.host("a"), "--peer", lan.host("b").address)
    assert code == 8
    assert "no node runs" in findings["peer.10.77.0.2.tcp"]["what"]
    lan.cut("b")
    _, findings = await doctor(lan.host("a"), "--peer", "10.77.0.9")
    assert "client isolation" in findings["peer.10.77.0.9.tcp"]["what"]
    _, findings = await doctor(lan.host("a"))
    assert findings["network.multicast4"]["level"] == "warning"


@pytest.mark.skipif(not shutil.which("nft"), reason="nft is not installed")
async def test_a_firewall_and_a_half_open_range_are_told(lan: LanLab) -> None:
    await start_node(lan.host("b"))
    _, findings = await doctor(lan.host("a"), "--peer", lan.host("b").address)
    assert findings["peer.10.77.0.2.tcp"]["level"] == "ok"
    assert findings["peer.10.77.0.2.handshake"]["level"] == "ok"
    assert findings["peer.10.77.0.2.ports"]["level"] == "ok"
    await drop(lan.host("b"), PORT + 3)
    _, findings = await doctor(lan.host("a"), "--peer", lan.host("b").address)
    assert findings["peer.10.77.0.2.ports"]["fact"] == f"no answer at {PORT + 3}"
    await drop(lan.host("b"), PORT)
    _, findings = await doctor(lan.host("a"), "--peer", lan.host("b").address)
    assert "a firewall on 10.77.0.2 drops" in findings["peer.10.77.0.2.tcp"]["what"]


async def drop(host: LanHost, port: int) -> None:
    """Let a host swallow what comes to a port."""
    rules = [
        ["nft", "add", "table", "inet", "t"],
        ["nft", "add", "chain", "inet", "t", "c", "{ type filter hook input priority 0 ; }"],
        ["nft", "add", "rule", "inet", "t", "c", "tcp", "dport", str(port), "drop"],
    ]
    for rule in rules:
        done = await host.run(rule)
        assert done.exit_code == 0, done.stderr


async def test_something_else_at_the_port_is_no_node(lan: LanLab) -> None:
    script = f"import socket; s = socket.create_server(('', {PORT})); print('up', flush=True)\nwhile True: s.accept()"
    process = await lan.host("b").spawn([sys.executable, "-c", script], stdout=-1)
    assert process.stdout is not None
    await process.stdout.readline()
    _, findings = await doctor(lan.host("a"), "--peer", lan.host("b").address)
    assert "no edgepipe node" in findings["peer.10.77.0.2.handshake"]["what"]


async def test_a_machine_without_a_network_is_told(lan: LanLab) -> None:
    await lan.host("a").run(["ip", "-4", "addr", "flush", "scope", "global"])
    code, findings = await doctor(lan.host("a"))
    assert code == 8
    assert "on no network" in findings["network.interface"]["what"]
