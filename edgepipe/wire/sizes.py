"""Size limits of messages between processes, which each sender keeps; docs/architecture.md has the table."""

from __future__ import annotations

PACKED_BYTES = 1 << 20  # a message that packs many items: a quarter of gRPC's limit (edgepipe.link.channels)
MAX_END_IDS = 256  # per sequence: stop ids and the model's end ids
ID_BYTES = 5  # maximum size of a token id
MAX_ERROR_BYTES = 1000  # each of an error's three texts
MAX_ERROR_NAME_BYTES = 256  # each of an error's names
HEAD_BYTES = 512  # overhead of a column: names and numbers, including a request's id
ENDING_BYTES = HEAD_BYTES + 3 * (MAX_ERROR_BYTES + MAX_ERROR_NAME_BYTES)


def logprobs_bytes(num_top: int) -> int:
    """Return the size of one token's log-probabilities with ``num_top`` alternatives."""
    return 16 + (ID_BYTES + 4) * num_top
