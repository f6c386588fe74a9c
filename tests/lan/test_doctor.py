"""``edgepipe doctor`` on hosts of their own: one look at a network in which many things are wrong at once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.network.lan import LanHost, LanLab

pytestmark = pytest.mark.lan

PORT = 7117
NOBODY = "10.77.0.99"
SILENT = f"s = socket.create_server(('', {PORT})); print('up', flush=True)\nkept = [s.accept() for _ in range(99)]"
MAIL = (
    f"s = socket.create_server(('', {PORT})); print('up', flush=True)\nwhile True: s.accept()[0].sendall(b'220 mail')"
)
ANSWERS_MDNS6 = """
from zeroconf import IPVersion, ServiceInfo, Zeroconf
zeroconf = Zeroconf(ip_version=IPVersion.V6Only)
kind = "_printer._tcp.local."
zeroconf.register_service(ServiceInfo(kind, f"ink.{kind}", port=9, server="ink.local.", addresses=[bytes(15) + b"1"]))
print("up", flush=True)
time.sleep(60)
"""


def environment(folder: Path) -> dict[str, str]:
    """One without settings but how long to listen: on this network everybody answers in milliseconds."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
    return kept | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "80", "EDGEPIPE_LISTEN_S": "0.5"}


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


async def start_script(host: LanHost, script: str) -> None:
    """Returns when it has said that it is up."""
    command = [sys.executable, "-c", f"import socket, time\n{script}"]
    process = await host.spawn(command, stdout=-1)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"


async def use_ipv6(*hosts: LanHost) -> None:
    """A link-local address that needs no second to find out whether it is free."""
    for index, host in enumerate(hosts):
        done = await host.run(["ip", "addr", "add", f"fe80::77:{index}/64", "dev", "lan0", "nodad"])
        assert done.exit_code == 0, done.stderr


async def drop(host: LanHost, rule: str) -> None:
    """Let a host swallow what comes and matches."""
    rules = [
        ["nft", "add", "table", "inet", "t"],
        ["nft", "add", "chain", "inet", "t", "c", "{ type filter hook input priority 0 ; }"],
        ["nft", "add", "rule", "inet", "t", "c", *rule.split(), "drop"],
    ]
    for command in rules:
        done = await host.run(command)
        assert done.exit_code == 0, done.stderr


@pytest.mark.skipif(not shutil.which("nft"), reason="nft is not installed")
async def test_everything_in_the_way_of_a_peer_is_told_from_the_rest() -> None:
    names = ["here", "good", "range", "firewall", "nothing", "mail", "silent", "narrow"]
    async with LanLab(hosts=names) as lan:
        await use_ipv6(lan.host("here"), lan.host("nothing"))
        await asyncio.gather(
            start_node(lan.host("good")),
            start_node(lan.host("range")),
            start_script(lan.host("mail"), MAIL),
            start_script(lan.host("silent"), SILENT),
            start_script(lan.host("narrow"), SILENT),
            start_script(lan.host("nothing"), ANSWERS_MDNS6),
            lan.host("narrow").run(["ip", "link", "set", "lan0", "mtu", "1300"]),
            drop(lan.host("range"), f"tcp dport {PORT + 3}"),
            drop(lan.host("firewall"), f"tcp dport {PORT}"),
        )
        at = {host.name: host.address for host in lan.hosts} | {"nobody": NOBODY}
        peers = [part for name in at if name != "here" for part in ("--peer", at[name])]
        code, findings = await doctor(lan.host("here"), *peers)

    def facts_of(name: str, what: str) -> tuple[str, str, str]:
        finding = findings[f"peer.{at[name]}.{what}"]
        return finding["level"], finding["what"], finding["fact"]

    assert code == 8
    for what in ("tcp", "handshake", "ports"):
        assert facts_of("good", what)[0] == "ok"
    assert facts_of("range", "handshake")[0] == "ok"
    assert facts_of("range", "ports")[2] == f"no answer at {PORT + 3}"
    assert f"a firewall on {at['firewall']} drops" in facts_of("firewall", "tcp")[1]
    assert "no node runs" in facts_of("nothing", "tcp")[1]
    assert "client isolation" in facts_of("nobody", "tcp")[1]
    assert "no edgepipe node" in facts_of("mail", "handshake")[1]
    assert "sends no data" in facts_of("silent", "handshake")[1]
    assert facts_of("narrow", "mtu") == (
        "warning",
        f"{at['narrow']}: a device on the path allows only smaller packets",
        "1300 bytes instead of 1500",
    )
    assert f"peer.{at['good']}.mtu" not in findings
    assert findings["network.multicast4"]["level"] == "ok"
    assert findings["network.multicast6"]["what"] == "IPv6 multicast works"
    assert "10.77.0.1" in findings["network.interface"]["what"]


async def test_a_machine_s_own_network_is_told() -> None:
    async with LanLab(hosts=1) as lan:
        host = lan.host("a")
        await use_ipv6(host)
        _, findings = await doctor(host)
        assert findings["network.multicast4"]["level"] == "warning"
        assert "no machine answered mDNS over IPv6" in findings["network.multicast6"]["what"]
        await host.run(["ip", "link", "set", "lan0", "mtu", "1200"])  # below 1280 there is no IPv6, either
        await host.run(["ip", "-4", "addr", "flush", "scope", "global"])
        code, findings = await doctor(host)
        assert code == 8
        assert "no usable network" in findings["network.interface"]["what"]
        assert "network.multicast4" not in findings
