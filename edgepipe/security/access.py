"""The kinds of processes that may call a method. Unlisted ones are denied: Admin and Children use a Unix socket."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a process."""

    NODE = "node"
    GATEWAY = "gateway"
    ENGINE = "engine"
    STAGE = "stage"


_PREFIX = "/edgepipe.wire.v1."

# A stage accepts only its own engine as an engine, and only its predecessor as a stage (``Security``, ``Stage``).
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
    """Return the kinds that may call a method (``/package.Service/Method``); empty if it is not listed."""
    return ALLOWED.get(method.removeprefix(_PREFIX), frozenset())
