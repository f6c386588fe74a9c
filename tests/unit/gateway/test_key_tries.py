"""Wrong keys: who counts as one address, and how many addresses are remembered."""

from __future__ import annotations

import pytest

from edgepipe.gateway.key_tries import MOST_TRIES, WINDOW_S, KeyTries
from edgepipe.testing.clock import START_S


@pytest.mark.parametrize(
    ("other", "waits"),
    [
        ("address:2001:db8:0:1:ffff::1", True),
        ("address:2001:db8::1", False),
        ("address:2001:db8:0:2::1", False),
    ],
    ids=["of the same network", "of the network before", "of the next one"],
)
def test_addresses_of_one_ipv6_network_count_as_one(other: str, waits: bool) -> None:
    tries = KeyTries(now_s=lambda: START_S)
    for _ in range(MOST_TRIES):
        tries.failed("address:2001:db8:0:1::1")
    assert tries.wait_s(other) == (WINDOW_S if waits else 0)


def test_of_4096_addresses_the_one_that_tried_longest_ago_is_forgotten() -> None:
    tries = KeyTries(now_s=lambda: START_S)
    for address in ("10.1.0.1", "10.1.0.2"):
        for _ in range(MOST_TRIES):
            tries.failed(address)
    for number in range(4096 - 1):
        tries.failed(f"10.2.{number >> 8}.{number & 255}")
    assert tries.wait_s("10.1.0.1") == 0
    assert tries.wait_s("10.1.0.2") == WINDOW_S
