"""Size limits of messages between processes, which each sender keeps; docs/architecture/wire.md has the table."""

from __future__ import annotations

from google.protobuf.message import Message

PACKED_BYTES = 1 << 20  # a message that packs many items: a quarter of gRPC's limit (edgepipe.link.channels)
MAX_PLANS = 16  # plans in one message: the first one, and those of steps planned ahead
KEY_BYTES = 16  # key of a block or snapshot, see ``scheduler.kv.Key``
MAX_HELD = 4096  # places in one message: 90 KB
MAX_END_IDS = 256  # ids per sequence: stop ids and the model's end ids
ID_BYTES = 5  # maximum size of a token id
MAX_ERROR_BYTES = 1000  # length of each of an error's three texts
MAX_ERROR_NAME_BYTES = 256  # length of each of an error's names
HEAD_BYTES = 512  # overhead of a column: names and numbers, including a request's id
ENDING_BYTES = HEAD_BYTES + 3 * (MAX_ERROR_BYTES + MAX_ERROR_NAME_BYTES)


def logprobs_bytes(num_top: int) -> int:
    """Return the size of one token's log-probabilities with ``num_top`` alternatives."""
    return 16 + (ID_BYTES + 4) * num_top


def count_entries(message: Message, *, most: int) -> int:
    """Count the entries of all lists in a message, at any depth; stop just beyond ``most``."""
    found = 0
    for field, value in message.ListFields():
        if field.is_repeated:
            found += len(value)
        if found > most:
            return found
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                found += count_entries(part, most=most - found)
                if found > most:
                    return found
    return found
