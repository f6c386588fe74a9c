"""What is believed of an announcement, and what becomes of a false one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf.asyncio import AsyncServiceInfo

from edgepipe.cluster.discovery import SERVICE_TYPE, Announcement, _service_info, read_announcement, read_texts

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
