"""The kinds of processes that may call a method. Unlisted ones are denied: Admin and Children use a Unix socket."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ProcessKind(StrEnum):
    """The kind of a process."""

    NODE = "node"
    GATEWAY = "gateway"
    ENGINE = "engine"
    STAGE = "stage"


_PREFIX = "/edgepipe.wire.v1."

# A stage accepts only its own engine as an engine, and only its predecessor as a stage (``Security``, ``Stage``).
ALLOWED: Mapping[str, frozenset[ProcessKind]] = {
    "Node/Heartbeat": frozenset({ProcessKind.NODE}),
    "Node/Prepare": frozenset({ProcessKind.ENGINE}),
    "Node/Release": frozenset({ProcessKind.ENGINE, ProcessKind.NODE}),
    "Node/StartEngine": frozenset({ProcessKind.NODE}),
    "Node/StopEngine": frozenset({ProcessKind.NODE}),
    "Node/StandBy": frozenset({ProcessKind.NODE}),
    "Node/Vouch": frozenset({ProcessKind.NODE}),
    "Node/ProfileLayer": frozenset({ProcessKind.NODE}),
    "Node/ProfileLinks": frozenset({ProcessKind.NODE}),
    "Probes/Echo": frozenset({ProcessKind.NODE}),
    "Node/Rebalance": frozenset({ProcessKind.NODE}),
    "Node/KeepCopy": frozenset({ProcessKind.NODE}),
    "Node/ReadBatch": frozenset({ProcessKind.GATEWAY}),
    "Weights/GetManifest": frozenset({ProcessKind.NODE}),
    "Weights/ReadTensor": frozenset({ProcessKind.NODE}),
    "Weights/ReadFile": frozenset({ProcessKind.NODE}),
    "Engine/Generate": frozenset({ProcessKind.GATEWAY}),
    "Engine/Describe": frozenset({ProcessKind.GATEWAY, ProcessKind.NODE}),
    "Engine/Trace": frozenset({ProcessKind.GATEWAY}),
    "Stage/Control": frozenset({ProcessKind.ENGINE}),
    "Stage/Ring": frozenset({ProcessKind.STAGE}),
}


def allowed(method: str) -> frozenset[ProcessKind]:
    """Return the kinds that may call a method (``/package.Service/Method``); empty if it is not listed."""
    return ALLOWED.get(method.removeprefix(_PREFIX), frozenset())
