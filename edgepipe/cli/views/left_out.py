"""What an engine avoids for a while, as people read it in the status and from doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgepipe.wire.v1 import engine_pb2


def left_out_text(one: engine_pb2.LeftOut) -> str:
    """``mac is left out for 28 s more: a step could not be computed``, or the same of a link."""
    what = f"the way from {one.node_name} to {one.other_name}" if one.other_id else one.node_name
    return f"{what} is left out for {one.seconds:.0f} s more: {one.reason}"
