"""Limits on the state that a member reports of itself. PURE.

Each node of the cluster holds, copies, compares and scans a state on every change. So one member's state has limits:
bytes, entries of all its lists together, and entries of the costliest lists.
"""

from __future__ import annotations

import re

from google.protobuf.message import Message

from edgepipe.wire.v1 import node_pb2 as pb

MAX_BEAT_BYTES = 1 << 20  # a state, a piece of the trust store (256 KB) and the keys of a full store (100 KB)
MAX_STATE_BYTES = 512 << 10  # a node that serves has 5 KB, one with a thousand models 200 KB
MAX_ENTRIES = 4096  # of all lists together: a thousand models with their parts
MAX_KNOWN = 512  # introductions in one beat; a home has a few dozen machines
_MOST = {"devices": 16, "engines": 64, "gateways": 32, "serves": 256}
_ADDRESS = re.compile(r"[0-9A-Za-z.:\-\[\]%]{1,255}:[0-9]{1,5}")


def is_address(text: str) -> bool:
    """Return whether the text is HOST:PORT. gRPC would accept paths and other schemes, too."""
    return _ADDRESS.fullmatch(text) is not None and "//" not in text and int(text.rpartition(":")[2]) < 1 << 16


def refusal(state: pb.NodeState) -> str:
    """Return why a state is refused; empty if it is accepted."""
    if state.ByteSize() > MAX_STATE_BYTES:
        return f"it has {state.ByteSize()} bytes, at most {MAX_STATE_BYTES} are taken"
    for field, most in _MOST.items():
        if len(getattr(state, field)) > most:
            return f"it has {len(getattr(state, field))} {field}, at most {most} are taken"
    if _entries(state, MAX_ENTRIES) > MAX_ENTRIES:
        return f"its lists have more than {MAX_ENTRIES} entries"
    return "" if is_address(state.address) else "its address is not HOST:PORT"


def _entries(message: Message, most: int) -> int:
    """Count the entries of all lists in a message, at any depth; stop just beyond ``most``."""
    found = 0
    for field, value in message.ListFields():
        if field.is_repeated:
            found += len(value)
        if found > most:
            return found
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                found += _entries(part, most - found)
                if found > most:
                    return found
    return found
