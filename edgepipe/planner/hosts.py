"""Time that the hosts of a ring add to a token's turn, besides devices and links. PURE.

Each node measures the cost of one small message (see ``Links.host_s``). Plans, activations and answers also pass
through event loops, threads and copies, whose cost is counted in small messages. The factors were fitted to running
rings, whose legs ``scripts/bench planner right`` prints.
"""

from __future__ import annotations

HOST_S = 0.00025
"""Default cost of one small message in seconds: a quarter of an encrypted loopback call between slow cores."""
_HOP_MESSAGES = 1.6  # cost of a hop between two devices in small messages, besides the message itself
# Cost from the last device to the first one's next step in small messages: sampling, scheduling, two messages.
_TURN_MESSAGES = 4.4
_ROW_MESSAGES = 0.08  # messages per sequence, in addition: sampling, reporting, scheduling
_MESSAGE_BYTES = 60_000  # small messages per sequence, in addition: sampling, reporting, scheduling
_CHUNK_BYTES = 512 << 10  # part of a large frame; parts are pipelined


def hop_host_s(host_s: float, num_bytes: float) -> float:
    """Return the seconds that the receiving host adds to a hop with ``num_bytes``."""
    return host_s * (_HOP_MESSAGES + min(num_bytes, _CHUNK_BYTES) / _MESSAGE_BYTES)


def turn_host_s(host_s: float, rows: float) -> float:
    """Return the seconds from the logits of ``rows`` sequences to the start of their next step, without links."""
    return host_s * (_TURN_MESSAGES + rows * _ROW_MESSAGES)
