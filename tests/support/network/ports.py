"""Ports for tests."""

from __future__ import annotations

import socket


def free_port(host: str) -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
