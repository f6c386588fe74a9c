"""What a flood of mDNS costs a node: a thousand names a second, and packets made to keep a parser busy."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator

import psutil
from bench_foundation import stored_demo
from figures import Row, below
from local_nodes import Node, running_nodes

from edgepipe import PROTOCOL_VERSION
from edgepipe.cluster.discovery import SERVICE_TYPE

FLOOD_S = 10.0
NAMES_PER_S = 1000
_GROUP = ("224.0.0.251", 5353)
_RESPONSE, _TRUNCATED, _IN, _TTL_S = 0x8400, 0x0200, 1, 4500
_PTR, _A, _TXT, _SRV = 12, 1, 16, 33


def flood_rows() -> list[Row]:
    """The daemon's CPU and memory while it is flooded, beside the same time without; what it knew stays."""
    with running_nodes(2, models_dir=stored_demo().path.parent, threads=1, backends=("emulated",)) as nodes:
        daemon = psutil.Process(nodes[0].pid)
        quiet = _share(daemon, ())
        before = daemon.memory_info().rss
        packets = list(_packets(int(FLOOD_S * NAMES_PER_S), nodes[0].status()["cluster_id"]))
        flooded = _share(daemon, packets)
        grown = daemon.memory_info().rss - before
        alive = _alive(nodes[0])
    return [
        below(f"CPU of a daemon, {NAMES_PER_S} false mDNS names a second", flooded * 100, "%", 20.0),
        Row("  without", quiet * 100, "%"),
        below(f"  memory grown by {len(packets)} names", grown / 2**20, "MB", 32.0),
        below("  nodes of the cluster that were lost", 2 - alive, "", 0),
    ]


def _share(process: psutil.Process, packets: tuple[bytes, ...] | list[bytes]) -> float:
    """The share of one core that a process takes while packets go out evenly over ``FLOOD_S``."""
    before, began = process.cpu_times(), time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        for index, packet in enumerate(packets):
            wait_s = began + FLOOD_S * index / len(packets) - time.monotonic()
            if wait_s > 0.005:
                time.sleep(wait_s)
            sock.sendto(packet, _GROUP)
    time.sleep(max(0.0, began + FLOOD_S - time.monotonic()))
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began)


def _packets(count: int, cluster_id: str) -> Iterator[bytes]:
    """Whole announcements of ever new nodes of the cluster; every fifth is one that no honest machine sends."""
    rng = random.Random(7)
    for index in range(count):
        packet = _announcement(f"{rng.getrandbits(128):x}-{index}", cluster_id, rng)
        if index % 10 == 0:
            packet = _pointer_chain()
        elif index % 10 == 1:
            packet = packet[:2] + struct.pack("!H", _RESPONSE | _TRUNCATED) + packet[4:]
        yield packet


def _announcement(name: str, cluster_id: str, rng: random.Random) -> bytes:
    """Return a packet like a node's announcement: PTR, SRV, TXT and A in one."""
    instance, server = f"{name}.{SERVICE_TYPE}", f"{name}.local."
    texts = {"cluster_id": cluster_id, "cluster": "home", "node_id": name, "name": name[:20], "version": "1"}
    texts["protocol"] = str(PROTOCOL_VERSION)
    text = b"".join(bytes([len(part)]) + part for part in (f"{key}={value}".encode() for key, value in texts.items()))
    address = bytes([10, 77, rng.randrange(256), rng.randrange(1, 255)])
    records = (
        _record(SERVICE_TYPE, _PTR, _name(instance)),
        _record(instance, _SRV, struct.pack("!3H", 0, 0, 7117) + _name(server)),
        _record(instance, _TXT, text),
        _record(server, _A, address),
    )
    return struct.pack("!6H", 0, _RESPONSE, 0, len(records), 0, 0) + b"".join(records)


def _record(name: str, kind: int, data: bytes) -> bytes:
    return _name(name) + struct.pack("!2HIH", kind, _IN, _TTL_S, len(data)) + data


def _name(text: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in text.rstrip(".").split(".")) + b"\0"


def _pointer_chain() -> bytes:
    """A name whose every label points to the one before: long to follow, and at its end at itself."""
    chain = b"".join(struct.pack("!H", 0xC000 | (12 + 2 * max(0, link - 1))) for link in range(200))
    return struct.pack("!6H", 0, _RESPONSE, 0, 100, 0, 0) + chain


def _alive(node: Node) -> int:
    return sum(member["state"] == "alive" for member in node.status()["members"])
