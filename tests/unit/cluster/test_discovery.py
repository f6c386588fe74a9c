"""What is believed of an announcement, and what becomes of a false one."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf.asyncio import AsyncServiceInfo

from edgepipe.cluster.discovery import (
    SERVICE_TYPE,
    Announcement,
    Discovery,
    _service_info,
    read_announcement,
    read_texts,
)
from tests.support.processes.waiting import until

OWN = Announcement(
    cluster_id="c" * 26,
    cluster_name="attic",
    node_id="n" * 52,
    node_name="gamer",
    host="192.168.1.20",
    port=7117,
    incarnation=1_790_000_000_000,
    pairing_port=7133,
)


def record(**changes: bytes | None) -> AsyncServiceInfo:
    texts = {key: value for key, value in _service_info(OWN).properties.items() if value is not None}
    for key, value in changes.items():
        texts.pop(key.encode(), None)
        if value is not None:
            texts[key.encode()] = value
    properties: dict[str | bytes, str | bytes | None] = {**texts}
    name = f"x.{SERVICE_TYPE}"
    return AsyncServiceInfo(SERVICE_TYPE, name, port=7117, parsed_addresses=["192.168.1.20"], properties=properties)


def test_what_a_node_says_of_itself_is_read_back() -> None:
    read = read_announcement(_service_info(OWN))
    assert read is not None
    assert (read.address, read.node_id, read.cluster_name, read.pairing_port) == (
        OWN.address,
        OWN.node_id,
        OWN.cluster_name,
        OWN.pairing_port,
    )


def test_the_name_of_the_record_is_one_dns_label() -> None:
    assert len(_service_info(OWN).name.removesuffix(f".{SERVICE_TYPE}")) <= 63


@pytest.mark.parametrize(
    "changes",
    [
        {"name": b"\x1b[2Jroot"},
        {"name": b"\xff\xfe"},
        {
            "name": b"x" * 240,
            "cluster": b"x" * 240,
            "node_id": b"x" * 240,
            "cluster_id": b"x" * 240,
            "more": b"x" * 240,
        },
        {"node_id": None},
        {"protocol": None},
        {"protocol": b"-1"},
        {"protocol": b"1e3"},
        {"protocol": "１".encode()},
        {"protocol": b"99999999999999999999"},
        {"pairing": b"x"},
    ],
)
def test_a_record_that_is_not_ours_to_the_last_character_is_dropped(changes: dict[str, bytes | None]) -> None:
    assert read_announcement(record()) is not None
    assert read_announcement(record(**changes)) is None


@given(st.dictionaries(st.binary(max_size=40), st.one_of(st.none(), st.binary(max_size=300)), max_size=8))
def test_no_bytes_break_the_reader_and_nothing_unprintable_comes_out(properties: dict[bytes, bytes | None]) -> None:
    texts = read_texts(properties)
    assert texts is None or all(text.isprintable() for pair in texts.items() for text in pair)


class Multicast:
    """In place of zeroconf: the network of a machine whose adapter comes and goes."""

    def __init__(self) -> None:
        self.away = False
        self.open: list[Any] = []  # sockets with a membership, newest last
        self.announced: list[str] = []  # pairing ports

    def join(self, **_: Any) -> Any:
        """As ``AsyncZeroconf``."""
        if self.away:
            raise OSError(errno.ENODEV, "No such device")
        return _Zeroconf(self)


class _Zeroconf:
    def __init__(self, multicast: Multicast) -> None:
        self.zeroconf = self
        self._multicast = multicast
        multicast.open.append(self)

    async def async_register_service(self, info: AsyncServiceInfo, **_: Any) -> None:
        self._multicast.announced.append((info.properties[b"pairing"] or b"").decode())

    async def async_update_service(self, info: AsyncServiceInfo) -> None:
        await self.async_register_service(info)

    async def async_unregister_service(self, info: AsyncServiceInfo) -> asyncio.Future[None]:
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        said.set_result(None)
        return said

    async def async_close(self) -> None:
        self._multicast.open.remove(self)

    async def async_cancel(self) -> None: ...


@pytest.fixture
def multicast(monkeypatch: pytest.MonkeyPatch) -> Multicast:
    made = Multicast()
    monkeypatch.setattr("edgepipe.cluster.discovery.AsyncZeroconf", made.join)
    monkeypatch.setattr("edgepipe.cluster.discovery.AsyncServiceBrowser", lambda zeroconf, *_, **__: zeroconf)
    return made


async def test_an_adapter_that_was_unplugged_is_announced_on_again(multicast: Multicast) -> None:
    """Its sockets have lost their multicast group then, and hear nothing for ever: only new ones help."""
    discovery = Discovery(OWN, lambda _: None)
    await discovery.start()
    await discovery.announce_pairing(7199)
    (deaf,) = multicast.open
    running = asyncio.ensure_future(discovery.run(renew_s=0.01, again_s=0.01))
    await until(lambda: multicast.open not in ([], [deaf]), timeout_s=30)
    running.cancel()
    await discovery.stop()
    assert multicast.open == []
    assert multicast.announced[:3] == ["7133", "7199", "7199"], "an invitation stays open meanwhile"


async def test_a_node_that_starts_before_its_network_is_found_later(multicast: Multicast) -> None:
    multicast.away = True
    discovery = Discovery(OWN, lambda _: None)
    await discovery.start()
    assert "no such device" in discovery.problem
    running = asyncio.ensure_future(discovery.run(renew_s=60, again_s=0.01))
    await asyncio.sleep(0.05)
    assert discovery.problem
    multicast.away = False
    await until(lambda: multicast.announced, timeout_s=30)
    assert discovery.problem == ""
    running.cancel()
    await discovery.stop()
