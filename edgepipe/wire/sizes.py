"""How large messages between processes become. Each sender keeps to its bound; docs/architecture.md has the table."""

from __future__ import annotations

PACKED_BYTES = 1 << 20  # of a message that packs many things: a quarter of what gRPC takes (edgepipe.link.channels)
MAX_END_IDS = 256  # of a sequence: stop ids, and the model's own
ID_BYTES = 5  # a token id takes at most so many

MAX_ERROR_BYTES = 1000  # of each of the three texts of an error
MAX_ERROR_NAME_BYTES = 256  # of each of its names
HEAD_BYTES = 512  # around a column: names and numbers, a request's id among them
ENDING_BYTES = HEAD_BYTES + 3 * (MAX_ERROR_BYTES + MAX_ERROR_NAME_BYTES)


def logprobs_bytes(num_top: int) -> int:
    """Of one token and so many alternatives."""
    return 16 + (ID_BYTES + 4) * num_top
