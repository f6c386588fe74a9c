"""How large messages between processes become. Each sender keeps to its bound; docs/architecture.md has the table."""

from __future__ import annotations

PACKED_BYTES = 1 << 20  # of a message that packs many things: a quarter of what gRPC takes (edgepipe.link.channels)
MAX_END_IDS = 256  # of a sequence: stop ids, and the model's own
ID_BYTES = 5  # a token id takes at most so many
