"""Text about nodes and links that an engine avoids for some time, for the status and doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgepipe.units import format_duration_s

if TYPE_CHECKING:
    from edgepipe.wire.engines import Quarantined


def left_out_text(entry: Quarantined) -> str:
    """Describe it: ``mac is left out for 28 s more: a step could not be computed``, or the same for a link."""
    subject = f"the link from {entry.node_name} to {entry.other_name}" if entry.other_id else entry.node_name
    time = f"{entry.seconds:.0f} s" if entry.seconds < 60 else format_duration_s(entry.seconds)
    return f"{subject} is left out for {time} more: {entry.reason}"
