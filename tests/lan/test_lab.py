"""The LAN lab itself: its links do what they are told, and nothing is left of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.network.lan import LanHost, LanLab
from tests.support.network.lan_namespace import remove_stale

pytestmark = pytest.mark.lan
HOSTS = 3

PORT = 5077
GROUP = "224.0.0.251"
DELAY_S = 0.05


def own_namespaces() -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"edgelan-{os.getpid()}-*")]


class Udp:
    """A UDP socket on a host, used from the test's loop."""

    def __init__(self, host: LanHost, sock: socket.socket) -> None:
        self.host = host
        self.sock = sock

    @classmethod
    async def on(cls, host: LanHost, *, group: str = "") -> Udp:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            sock.bind(("", PORT))
            if group:
                sock.setsockopt(
                    socket.IPPROTO_IP,
                    socket.IP_ADD_MEMBERSHIP,
                    socket.inet_aton(group) + socket.inet_aton(host.address),
                )
            return sock

        return cls(host, await host.call(make))

    async def send(self, address: str, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendto(self.sock, data, (address, PORT))

    async def receive(self, *, timeout_s: float = 10.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().sock_recv(self.sock, 65536)

    async def one_way_s(self, other: Udp) -> float:
        """How long the fastest of five datagrams to ``other`` takes."""
        took: list[float] = []
        for _ in range(5):
            started = time.monotonic()
            await self.send(other.host.address, b"x")
            await other.receive()
            took.append(time.monotonic() - started)
        return min(took)


@pytest.fixture
async def sockets(lan: LanLab) -> AsyncIterator[list[Udp]]:
    """One UDP socket per host; each pair has spoken, so that later datagrams wait for no address resolution."""
    made = [await Udp.on(host, group=GROUP) for host in lan.hosts]
    for source in made:
        for target in made:
            if source is not target:
                await source.send(target.host.address, b"hello")
                assert await target.receive() == b"hello"
    yield made
    for udp in made:
        udp.sock.close()


async def test_delay_belongs_to_one_direction_and_can_change(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, _c = sockets
    lan.link("a", "b").change(delay_s=DELAY_S)
    assert await a.one_way_s(b) >= DELAY_S
    assert await b.one_way_s(a) < DELAY_S
    lan.link("a", "b").change(delay_s=0.0)
    assert await a.one_way_s(b) < DELAY_S


async def test_frames_keep_their_order_under_jitter(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, _c = sockets
    lan.link("a", "b").change(delay_s=0.001, jitter_s=0.02)
    for i in range(50):
        await a.send(b.host.address, bytes([i]))
    assert [(await b.receive())[0] for _ in range(50)] == list(range(50))


async def test_rate_limits_what_passes(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, _c = sockets
    lan.link("a", "b").change(bytes_per_s=1e6)
    started = time.monotonic()
    for _ in range(200):
        await a.send(b.host.address, bytes(1000))
    for _ in range(200):
        await b.receive()
    assert time.monotonic() - started >= 0.2


async def test_a_full_queue_drops(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, c = sockets
    link = lan.link("a", "b")
    await a.send(b.host.address, b"first")
    assert await b.receive() == b"first"  # until addresses are resolved the host itself holds frames back
    link.change(bytes_per_s=1e4, queue_bytes=20_000)
    for _ in range(100):
        await a.send(b.host.address, bytes(1000))
    await a.send(c.host.address, b"last")
    assert await c.receive() == b"last"  # so the switch has taken what was sent before it
    assert link.frames_dropped > 50


async def test_loss_takes_its_share(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, _c = sockets
    lan.link("a", "b").change(loss=0.3)
    numbers: list[int] = []

    async def receive() -> None:
        while not numbers or numbers[-1] < 1000:
            numbers.append(int(await b.receive()))

    receiver = asyncio.create_task(receive())
    for number in itertools.count():
        await a.send(b.host.address, str(number).encode())
        await asyncio.sleep(0)
        if receiver.done():
            break
    await receiver
    assert numbers == sorted(set(numbers))
    assert 600 < sum(number < 1000 for number in numbers) < 800


async def test_a_cut_is_complete_and_heals(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, c = sockets
    lan.link("a", "b").change(delay_s=DELAY_S)
    await a.send(b.host.address, b"under way")
    lan.cut("b")
    await a.send(b.host.address, b"lost")
    await b.send(c.host.address, b"lost")
    async with asyncio.timeout(10):
        while not (lan.link("a", "b").frames_dropped and lan.link("b", "c").frames_dropped):
            await a.one_way_s(c)  # others go on
    lan.heal("b")
    await a.send(b.host.address, b"back")
    await b.send(c.host.address, b"back")
    assert await b.receive() == b"back"
    assert await c.receive() == b"back"


async def test_a_cut_between_two_leaves_the_third_alone(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, c = sockets
    lan.cut("a", "b")
    await a.send(b.host.address, b"lost")
    await a.send(c.host.address, b"1")
    await c.send(b.host.address, b"2")
    assert (await c.receive(), await b.receive()) == (b"1", b"2")


async def test_multicast_reaches_everybody_else(lan: LanLab, sockets: list[Udp]) -> None:
    a, b, c = sockets
    a.sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    await a.send(GROUP, b"to all")
    assert (await b.receive(), await c.receive()) == (b"to all", b"to all")


async def test_hosts_do_not_share_loopback(lan: LanLab) -> None:
    def listener() -> socket.socket:
        return socket.create_server(("127.0.0.1", PORT))

    first = await lan.host("a").call(listener)
    second = await lan.host("b").call(listener)
    with first, second:
        with pytest.raises(OSError, match="in use"):
            await lan.host("a").call(listener)


ANNOUNCE = """
import socket, sys
from zeroconf import IPVersion, ServiceInfo, Zeroconf
info = ServiceInfo("_edgelab._tcp.local.", "b._edgelab._tcp.local.", port=7, parsed_addresses=[sys.argv[1]])
with Zeroconf(interfaces=[sys.argv[1]], ip_version=IPVersion.V4Only) as zeroconf:
    zeroconf.register_service(info)
    print("announced", flush=True)
    sys.stdin.read()
"""

BROWSE = """
import queue, sys
from zeroconf import IPVersion, ServiceBrowser, ServiceListener, Zeroconf
found = queue.Queue()
class Listener(ServiceListener):
    def add_service(self, zc, kind, name): found.put(name)
    def remove_service(self, zc, kind, name): pass
    def update_service(self, zc, kind, name): pass
with Zeroconf(interfaces=[sys.argv[1]], ip_version=IPVersion.V4Only) as zeroconf:
    ServiceBrowser(zeroconf, "_edgelab._tcp.local.", Listener())
    print(zeroconf.get_service_info("_edgelab._tcp.local.", found.get(timeout=20)).parsed_addresses()[0])
"""


async def test_services_are_discovered_between_hosts(lan: LanLab) -> None:
    a, b = lan.host("a"), lan.host("b")
    announcer = b.popen([sys.executable, "-c", ANNOUNCE, b.address], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    browser = await a.run([sys.executable, "-c", BROWSE, a.address], timeout_s=40)
    assert (browser.stdout.strip(), browser.stderr) == (b.address, "")
    assert announcer.poll() is None


async def test_a_command_gives_its_output_and_exit_code(lan: LanLab) -> None:
    done = await lan.host("c").run(["sh", "-c", "ip -4 -o addr show lan0; exit 3"])
    assert done.exit_code == 3
    assert lan.host("c").address in done.stdout


async def test_a_command_that_takes_too_long_is_killed(lan: LanLab) -> None:
    with pytest.raises(TimeoutError):
        await lan.host("a").run(["sleep", "60"], timeout_s=0.1)


async def test_nothing_is_left_of_a_lab() -> None:
    async with LanLab(hosts=("left", "right")) as lab:
        assert len(own_namespaces()) == 2
        folder = lab.host("left").folder
        (folder / "file").write_text("x")
        shell = await lab.host("left").spawn(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=asyncio.subprocess.PIPE)
        assert shell.stdout is not None
        grandchild = int(await shell.stdout.readline())
    assert own_namespaces() == []
    assert not folder.parent.exists()
    assert shell.returncode is not None
    assert not running(grandchild)


async def test_a_process_whose_output_nobody_reads_ends_with_the_lab() -> None:
    async with LanLab(hosts=1) as lab:
        talker = await lab.host("a").spawn(["yes"], stdout=asyncio.subprocess.PIPE)
        assert talker.stdout is not None
        assert await talker.stdout.readline() == b"y\n"
    assert talker.returncode is not None


async def test_nothing_is_left_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        async with LanLab(hosts=2):
            _ = 1 / 0
    assert own_namespaces() == []


async def test_nothing_is_left_of_a_lab_that_could_not_be_built() -> None:
    with pytest.raises(RuntimeError, match="mtu"):
        async with LanLab(hosts=2, mtu=10**6):
            pass
    assert own_namespaces() == []


@pytest.fixture
def stale_namespace() -> str:
    """What a killed run leaves."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    name = f"edgelan-{ended.pid}-1-a"
    subprocess.run(["ip", "netns", "add", name], check=True)
    return name


async def test_namespaces_of_dead_runs_are_removed(stale_namespace: str) -> None:
    async with LanLab(hosts=1) as lab:
        assert stale_namespace not in remove_stale()
        assert not os.path.exists(f"/run/netns/{stale_namespace}")  # noqa: ASYNC240 - does not block
        assert lab.host("a").namespace in own_namespaces()


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
