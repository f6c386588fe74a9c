"""What the hosts of a ring add to a token's turn, beside devices computing and links carrying. PURE.

Each node measures what one small message costs it (see ``Links.host_s``). What a stage or the engine does around a
message takes some of that: a plan, activations and an answer pass through event loops, threads and copies on their way
to and from the device. How many was taken from the legs of running rings, which ``scripts/bench planner right`` prints.
"""

from __future__ import annotations

HOST_S = 0.00025
"""Of one small message, where nobody measured it: a quarter of an encrypted call on loopback, between slow cores."""
_HOP_MESSAGES = 1.6  # from one stage's device to the next one's, beside the message itself
_TURN_MESSAGES = 4.4  # from the last device to the first one's next step: sampling, scheduling, two messages
_ROW_MESSAGES = 0.08  # and for each sequence: it is sampled, told of and scheduled
_MESSAGE_BYTES = 60_000  # that are encrypted, copied and converted in the time of a small message
_CHUNK_BYTES = 512 << 10  # of a large frame; chunks follow one another


def hop_host_s(host_s: float, num_bytes: float) -> float:
    """Seconds that the receiving host adds to a hop with so many bytes."""
    return host_s * (_HOP_MESSAGES + min(num_bytes, _CHUNK_BYTES) / _MESSAGE_BYTES)


def turn_host_s(host_s: float, rows: float) -> float:
    """Seconds between the logits of so many sequences and their next step's beginning, without links."""
    return host_s * (_TURN_MESSAGES + rows * _ROW_MESSAGES)
