"""Who may say what about what is served: the rules by which a node takes a signed record instead of the one it holds.

An owner of the cluster may say anything. A plain member may have a model served that is not, stop what it had served,
tell where the stages of its own engine are, and hand its engine over. Another engine than the recorded one is believed
only by who knows by itself that the recorded one's node is gone: nobody can take requests over by claiming a higher
number. Where two sides of a partition believed different engines, an owner's node says which it holds; without one the
newer claim yields (``engine_keeper``). ``docs/adr/serving.md`` has the reasons.

PURE: no clock, no keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgepipe.security.trust_view import Role
from edgepipe.wire.v1 import node_pb2 as pb

MAX_VERSION_STEP = 1 << 20  # a partition changes something a few times, and the highest version must stay far away
MAX_RUNNING_PER_MEMBER = 8  # models that one plain member may have served at once
MAX_BODY_BYTES = 8 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node knows by itself."""

    role: Role | None  # of the new record's signer; None: it does not belong to the cluster
    gone: Callable[[str], bool]  # whether a node is away for certain, or gives its engines away
    running: int  # records of other models that run because the signer asked
    runs: Callable[[pb.ServeBody], bool]  # whether a recorded engine has answered or is told of by its node


def order(body: pb.ServeBody) -> tuple[int, bool, str, str]:
    """Of two records of one model the greater counts. Two sides of a partition may count alike: a stop wins, then any
    order that is the same everywhere."""
    return body.version, body.stopped, body.pipeline_id, body.engine_node


def same_engine(one: pb.ServeBody, other: pb.ServeBody) -> bool:
    """Whether they tell of the same engine of the same content."""
    return (one.pipeline_id, one.engine_node, one.asker, one.stopped, one.spec.manifest_hash) == (
        other.pipeline_id,
        other.engine_node,
        other.asker,
        other.stopped,
        other.spec.manifest_hash,
    )


def is_far_ahead(held: pb.ServeBody | None, new: pb.ServeBody) -> bool:
    """Whether only an owner's word could have this version."""
    return new.version > (held.version if held is not None else 0) + MAX_VERSION_STEP


def refusal(held: pb.ServeBody | None, new: pb.ServeBody, facts: Facts) -> str:
    """Why ``new`` is not taken for ``held``; empty if it is. Both are of one model, and ``new`` is well signed."""
    if facts.role is None:
        return "its signer does not belong to the cluster"
    if held is not None and order(new) <= order(held):
        return "it is not newer"
    if facts.role is Role.OWNER:
        return ""
    if is_far_ahead(held, new):
        return "its version is too far ahead"
    if held is None or held.stopped or not facts.runs(held):
        return _refusal_to_begin(new, facts)
    if (
        not held.signer and new.engine_node == held.engine_node
    ):  # of the earlier form: its engine's node says it properly
        return _refusal_to_begin(new, facts)
    if (new.pipeline_id, new.spec.manifest_hash, new.asker) != (
        held.pipeline_id,
        held.spec.manifest_hash,
        held.asker,
    ):
        return "the model is served already"
    if new.signer == held.engine_node or (same_engine(held, new) and new.spec == held.spec):
        return ""
    if new.stopped and new.engine_node == held.engine_node:
        return "" if new.signer == held.asker else "only who had it served, its engine's node or an owner stops it"
    if new.signer == new.engine_node and facts.gone(held.engine_node):
        return ""
    return "its engine's node is not gone"


def _refusal_to_begin(new: pb.ServeBody, facts: Facts) -> str:
    if new.stopped:
        return "nothing is served"
    if new.asker != new.signer and new.engine_node != new.signer:
        return "its signer neither asked for it nor runs it"
    return "" if facts.running < MAX_RUNNING_PER_MEMBER else "its asker has enough models served"
