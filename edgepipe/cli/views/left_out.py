"""What an engine avoids for a while, as people read it in the status and from doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgepipe.wire.v1 import engine_pb2


def left_out_text(entry: engine_pb2.LeftOut) -> str:
    """``mac is left out for 28 s more: a step could not be computed``, or the same of a link."""
    subject = f"the way from {entry.node_name} to {entry.other_name}" if entry.other_id else entry.node_name
    return f"{subject} is left out for {entry.seconds:.0f} s more: {entry.reason}"
