"""Generated protobuf (``wire.v1``), and the only code that converts it to and from domain types."""
