"""The rules by which a node accepts a signed record about a served model instead of the record it holds.

An owner of the cluster may say anything. A plain member may have an unserved model served, and stop the models that it
had served. It may report where its own engine's stages are, and hand its engine over. A node believes a new engine only
if it knows by itself that the recorded engine's node is gone, or that this node has long reported no engine. So no
member takes over requests by claiming a higher version. Where two sides of a partition believed different engines, an
owner's node says which one it holds; without an owner the newer claim yields (``engine_keeper``).

A model may have several pipelines (replicas), each with a record. Only those count that the record of the first one
names (``lead``). So no member adds a pipeline to a model of another node, to which gateways would then send prompts.
``docs/adr/serving.md`` has the reasons.

PURE: no clock, no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgepipe.daemon.serving.replica_facts import with_facts_of
from edgepipe.security.trust_view import Role
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeBody

MAX_VERSION_STEP = 1 << 20  # a partition makes few changes, and the highest version must stay out of reach
MAX_RUNNING_PER_MEMBER = 8  # pipelines that one plain member may have served at once
MAX_BODY_BYTES = 8 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Knowledge of the node that judges a record, from other sources than that record."""

    role: Role | None  # role of the new record's signer; None: no member of the cluster
    lost: Callable[[ServeBody], bool]  # whether an engine's node is away, hands engines over, or long had no engine
    running: int  # other records that run because the signer asked
    runs: Callable[[ServeBody], bool]  # whether a recorded engine has answered or its node reports it


Place = tuple[str, int]  # a model and the number of its replica: one record each


def place_of(spec: ServeSpec) -> Place:
    """Return which of the records a spec belongs to. The only pipeline of a model has that of its first replica."""
    return spec.model, max(1, spec.replica)


def order(body: ServeBody) -> tuple[int, bool, str, str, tuple[str, ...]]:
    """Return the sort key of the records of one place: the greatest counts.

    After a partition, or if two people change the replicas at once, versions may be equal: a stop wins, then any order
    that is the same on all nodes.
    """
    return body.version, body.stopped, body.pipeline_id, body.engine_node, body.spec.replica_pipelines


def same_engine(record: ServeBody, other: ServeBody) -> bool:
    """Return whether both records name the same engine with the same content."""
    return (record.pipeline_id, record.engine_node, record.asker, record.stopped, record.spec.manifest_hash) == (
        other.pipeline_id,
        other.engine_node,
        other.asker,
        other.stopped,
        other.spec.manifest_hash,
    )


def lead(bodies: Iterable[ServeBody]) -> ServeBody | None:
    """Return the record that decides which pipelines of a model count: that of the first place; None if none is served.

    ``bodies`` are of one model. The rules below protect the record of each place, whatever other places say.
    """
    return min((body for body in bodies if not body.stopped), key=lambda body: place_of(body.spec), default=None)


def counts_beside(body: ServeBody, first: ServeBody | None) -> bool:
    """Return whether a pipeline counts beside the one that ``lead`` returned."""
    if body.stopped or first is None or body.pipeline_id == first.pipeline_id:
        return True
    return body.pipeline_id in first.spec.replica_pipelines and body.spec.manifest_hash == first.spec.manifest_hash


def is_far_ahead(held: ServeBody | None, new: ServeBody) -> bool:
    """Return whether the version is so high that only an owner may use it."""
    return new.version > (held.version if held is not None else 0) + MAX_VERSION_STEP


def refusal(held: ServeBody | None, new: ServeBody, facts: Facts) -> str:
    """Return why ``new`` does not replace ``held``; empty if it does. Both are of one place; ``new`` is well signed."""
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
    if (new.pipeline_id, new.spec.manifest_hash, new.asker) != (
        held.pipeline_id,
        held.spec.manifest_hash,
        held.asker,
    ):
        return "the model is served already"
    if new.signer == held.engine_node or (same_engine(held, new) and new.spec == held.spec):
        return ""
    if new.signer == held.asker and same_engine(held, new) and with_facts_of(new.spec, held.spec) == held.spec:
        return ""  # who may stop the model may change the number of its pipelines
    if new.stopped and new.engine_node == held.engine_node:
        return "" if new.signer == held.asker else "only its asker, its engine's node or an owner may stop it"
    if new.signer == new.engine_node and facts.lost(held):
        return ""
    return "its engine's node is not gone"


def _refusal_to_begin(new: ServeBody, facts: Facts) -> str:
    if new.stopped:
        return "nothing is served"
    if new.asker != new.signer and new.engine_node != new.signer:
        return "its signer neither asked for it nor runs it"
    return "" if facts.running < MAX_RUNNING_PER_MEMBER else "its asker has enough models served"
