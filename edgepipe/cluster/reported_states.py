"""Limits on the state that a member reports of itself. PURE.

Each node of the cluster holds, copies, compares and scans a state on every change. So one member's state has limits:
bytes, entries of all its lists together, and entries of the costliest lists.
"""

from __future__ import annotations

import re

from edgepipe.errors import RemoteProtocolError
from edgepipe.wire.nodes import NodeState

MAX_BEAT_BYTES = 1 << 20  # a state, a piece of the trust store (256 KB) and the keys of a full store (100 KB)
MAX_STATE_BYTES = 512 << 10  # a node that serves has 5 KB, one with a thousand models 200 KB
MAX_ENTRIES = 4096  # entries of all lists together: a thousand models with their parts
MAX_KNOWN = 512  # introductions in one beat; a home has a few dozen machines
_MOST = {"devices": 16, "engines": 64, "gateways": 32, "serves": 256}
_ADDRESS = re.compile(r"[0-9A-Za-z.:\-\[\]%]{1,255}:[0-9]{1,5}")


def is_address(text: str) -> bool:
    """Return whether the text is HOST:PORT. gRPC would accept paths and other schemes, too."""
    return _ADDRESS.fullmatch(text) is not None and "//" not in text and int(text.rpartition(":")[2]) < 1 << 16


def check_size(*, num_bytes: int, num_entries: int) -> None:
    """Check a state's size before it is read. Raises RemoteProtocolError."""
    if num_bytes > MAX_STATE_BYTES:
        raise RemoteProtocolError(f"it has {num_bytes} bytes, at most {MAX_STATE_BYTES} are taken")
    if num_entries > MAX_ENTRIES:
        raise RemoteProtocolError(f"its lists have more than {MAX_ENTRIES} entries")


def check_state(state: NodeState) -> None:
    """Check a state's lists and address. Raises RemoteProtocolError."""
    for field, most in _MOST.items():
        if len(getattr(state, field)) > most:
            raise RemoteProtocolError(f"it has {len(getattr(state, field))} {field}, at most {most} are taken")
    if not is_address(state.address):
        raise RemoteProtocolError("its address is not HOST:PORT")
