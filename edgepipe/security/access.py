"""Which kind of process may call what. Whatever is not listed is denied: Admin and Children answer on a Unix socket."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Kind(StrEnum):
    """What a process is to others."""

    NODE = "node"
    GATEWAY = "gateway"
    ENGINE = "engine"
    STAGE = "stage"


_PREFIX = "/edgepipe.wire.v1."

# A stage takes its own engine alone for an engine, and its predecessor alone for a stage (``Security``, ``Stage``).
ALLOWED: Mapping[str, frozenset[Kind]] = {
    "Node/Heartbeat": frozenset({Kind.NODE}),
    "Node/Prepare": frozenset({Kind.ENGINE}),
    "Node/Release": frozenset({Kind.ENGINE, Kind.NODE}),
    "Node/StartEngine": frozenset({Kind.NODE}),
    "Node/StopEngine": frozenset({Kind.NODE}),
    "Node/StandBy": frozenset({Kind.NODE}),
    "Node/Vouch": frozenset({Kind.NODE}),
    "Node/ProfileLayer": frozenset({Kind.NODE}),
    "Node/ProfileLinks": frozenset({Kind.NODE}),
    "Probes/Echo": frozenset({Kind.NODE}),
    "Node/Rebalance": frozenset({Kind.NODE}),
    "Node/KeepCopy": frozenset({Kind.NODE}),
    "Weights/GetManifest": frozenset({Kind.NODE}),
    "Weights/ReadTensor": frozenset({Kind.NODE}),
    "Weights/ReadFile": frozenset({Kind.NODE}),
    "Engine/Generate": frozenset({Kind.GATEWAY}),
    "Engine/Describe": frozenset({Kind.GATEWAY, Kind.NODE}),
    "Engine/Trace": frozenset({Kind.GATEWAY}),
    "Stage/Control": frozenset({Kind.ENGINE}),
    "Stage/Ring": frozenset({Kind.STAGE}),
}


def allowed(method: str) -> frozenset[Kind]:
    """Who may call a method (``/package.Service/Method``); nobody if it is not listed."""
    return ALLOWED.get(method.removeprefix(_PREFIX), frozenset())
