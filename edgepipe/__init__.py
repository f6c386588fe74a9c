"""edgepipe: one language model over the machines you already own."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 6  # incremented by every change of the wire format that an older node would misread
