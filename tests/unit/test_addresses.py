"""Hosts and ports as one text."""

from __future__ import annotations

import pytest

from edgepipe.addresses import host_and_port, host_maybe_port, is_loopback, with_port


@pytest.mark.parametrize("host", ["192.168.1.20", "attic.local", "fd00:77::11"])
def test_an_address_is_split_as_it_was_joined(host: str) -> None:
    assert host_and_port(with_port(host, 7117)) == (host, "7117")
    assert host_maybe_port(with_port(host, 7117)) == (host, "7117")
    assert host_maybe_port(host) == (host, "")


def test_an_address_of_ipv6_has_brackets_before_its_port() -> None:
    assert with_port("fd00:77::11", 7117) == "[fd00:77::11]:7117"
    assert host_maybe_port("[fd00:77::11]") == ("fd00:77::11", "")


@pytest.mark.parametrize(
    ("host", "only_here"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("fd00::1", False), ("127.example", False), ("", False)],
)
def test_an_address_that_only_this_machine_reaches(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here
