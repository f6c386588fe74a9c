"""Text for people about machines that are away."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import AbsentNode

_WORDS = {"asleep": "asleep", "dead": "gone", "left": "stopped", "unseen": "not seen"}
_ON_PURPOSE = ("left", "unseen")  # no faults: a person stopped the node, or has not started it
_MOST_NAMED = 3


def absence_text(absent: Sequence[AbsentNode], *, now_s: float) -> str:
    """Return ``macbook asleep since 21:14, studio gone since Tue 08:02``; empty if no node is away. Local time."""
    newest = sorted(absent, key=lambda node: -node.since_us)
    named = [f"{node.name} {since_text(node, now_s=now_s)}" for node in newest[:_MOST_NAMED]]
    more = len(newest) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more > 0 else [])])


def since_text(node: AbsentNode, *, now_s: float) -> str:
    """Return ``stopped since 21:14``."""
    return f"{_WORDS.get(node.state, node.state)} since {_time(node.since_us / 1e6, now_s=now_s)}"


def missed(absent: Sequence[AbsentNode]) -> list[AbsentNode]:
    """Return the nodes that went without a goodbye."""
    return [node for node in absent if node.state not in _ON_PURPOSE]


def stopped(absent: Sequence[AbsentNode]) -> list[AbsentNode]:
    """Return the nodes that a person stopped, or has not started."""
    return [node for node in absent if node.state in _ON_PURPOSE]


def continuing_text(engine: EngineState) -> str:
    """Return ``continuing on 2 machines`` for an engine that works after a recovery; else empty."""
    if engine.state != "ready" or not engine.recoveries:
        return ""
    machines = len({stage.node_id for stage in engine.stages})
    return f"continuing on {machines} machine{'s' * (machines != 1)}"


def joined(*texts: str) -> str:
    """Join texts: ``macbook asleep since 21:14; continuing on 2 machines``."""
    return "; ".join(text for text in texts if text)


def _time(wall_s: float, *, now_s: float) -> str:
    form = "%H:%M" if abs(now_s - wall_s) < 20 * 3600 else "%a %H:%M"
    return datetime.fromtimestamp(wall_s).strftime(form)
