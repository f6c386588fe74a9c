"""Findings of ``edgepipe doctor`` from the running node's status: itself, members, engines, trust."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgepipe import __version__
from edgepipe.cli.doctor.findings import Finding, Level, clock_finding, note, ok, problem, warning
from edgepipe.cli.views.left_out import left_out_text
from edgepipe.errors import EdgepipeError, VersionMismatch
from edgepipe.versions import are_near, is_behind

if TYPE_CHECKING:
    from edgepipe.backend.types import PackedProducts
    from edgepipe.config import Config
    from edgepipe.wire.nodes import ClusterStatus, DeviceState, MemberState, NodeState

_AUDIT_LINES = 200
_RECENT_S = 24 * 3600.0
_MANY_PROBES = 20  # connections without an identity within that time; fewer are no news


def member_findings(name: str, member: MemberState) -> Iterator[Finding]:
    """Report what the running node knows of a member."""
    version = member.node.edgepipe_version
    if version != __version__:
        yield warning(
            id=f"peer.{name}.version",
            what=f"{name} runs edgepipe {version}, this machine {__version__}",
            fact="" if are_near(version, __version__) else "only versions at most one minor apart are tested together",
            remedy=f"on {name if is_behind(version, __version__) else 'this machine'}: edgepipe update",
        )
    yield clock_finding(name, skew_ms=member.clock_skew_ms)
    for device in member.node.devices:
        if device.state == "failed":
            yield _device_finding(name, device)
    yield from engine_findings(member.node)


def engine_findings(node: NodeState) -> Iterator[Finding]:
    """Report of a node's engines: what they avoid, why a model is not served, what computes it, and what is slow."""
    for engine in node.engines:
        name = f"{engine.model}.{engine.replica}" if engine.replica else engine.model
        for stage in engine.stages:
            for products in stage.products:
                yield _products_finding(engine.model, stage.node_name, products)
            for path in stage.slow_paths:
                yield warning(
                    id=f"engine.{engine.model}.slow",
                    what=f"{engine.model} on {stage.node_name}: {path.what}",
                    fact=f"{path.reason}; {path.cost}",
                    remedy=f"on {stage.node_name}: {path.remedy}" if path.remedy else "",
                )
        for entry in engine.left_out:
            yield problem(
                id=f"engine.{name}.left_out",
                what=f"{engine.title}: {left_out_text(entry)}",
                remedy=f"see 'edgepipe logs' on {entry.node_name}; if this comes back, restart that machine",
            )
        if engine.state == "waiting":
            error = engine.error or EdgepipeError("no reason is known")
            yield problem(
                id=f"engine.{name}.waiting",
                what=f"{engine.title} is not served now: {error.what}",
                fact=error.fact,
                remedy=error.next_step,
            )


def _products_finding(model: str, node_name: str, products: PackedProducts) -> Finding:
    """Report what multiplies with a stage's packed weights: a warning if a command makes a faster way available."""
    level = Level.WARNING if products.remedy else Level.NOTE if products.reason else Level.OK
    return Finding(
        id=f"engine.{model}.products",
        level=level,
        what=f"{model} on {node_name}: packed weights are multiplied by {products.by}",
        fact=products.reason,
        remedy=f"on {node_name}: {products.remedy}" if products.remedy else "",
    )


def _device_finding(name: str, device: DeviceState) -> Finding:
    error = device.error or EdgepipeError("its device cannot be used")
    return problem(
        id=f"peer.{name}.device",
        what=f"{name}: {error.what}",
        fact=error.fact,
        remedy=error.next_step or "edgepipe logs on that machine",
    )


def node_findings(status: ClusterStatus | None) -> Iterator[Finding]:
    """Report the status of this machine's node."""
    if status is None:
        yield note(
            id="node.running",
            what="no node runs on this machine; doctor checked only what it can without one",
            remedy="edgepipe node start",
        )
        return
    own = next(member.node for member in status.members if member.self)
    yield ok(
        id="node.running",
        what=f"node '{own.name}' of cluster '{status.cluster_name}' runs",
        fact=f"{len(status.members)} node{'s' * (len(status.members) != 1)}, at {own.address}",
    )
    for device in own.devices:
        if device.state == "failed":
            yield _device_finding(own.name, device)
    yield from engine_findings(own)
    for record in status.unwritten:
        yield problem(
            id="node.disk",
            what="the node cannot write to its disk",
            fact=record,
            remedy=f"make room on the disk of {status.data_dir}",
        )
    if status.discovery_problem:
        yield warning(
            id="node.discovery",
            what="the node finds others only by remembered and named addresses",
            fact=status.discovery_problem,
            remedy="edgepipe node start --peer HOST:7117    (or --interface NAME)",
        )
    names = {member.node.node_id: member.node.name for member in status.members}
    for link in status.broken_links:
        node, other = names.get(link.node_id, link.node_id), names.get(link.other_id, link.other_id)
        yield problem(
            id="node.links",
            what=f"{node} and {other} do not reach each other, but both reach this node",
            remedy=f"on {node}: edgepipe doctor",
        )
    for refused in status.refused:
        version = isinstance(refused.error, VersionMismatch)
        yield (warning if version else note)(
            id="node.refused",
            what=f"{refused.peer}: {refused.error.what}",
            fact=refused.error.fact,
            remedy=refused.error.next_step,
        )


def trust_findings(config: Config, status: ClusterStatus | None) -> Iterator[Finding]:
    """Report damage of the trust store, and recent refusals."""
    from edgepipe.cli.peers import strangers_text
    from edgepipe.cluster.founding import TrustFolders
    from edgepipe.telemetry.audit import AuditKind, read_audit

    if status is not None and status.trust_damage:
        yield problem(
            id="trust.store",
            what="the trust store was damaged; no machine can join until another member has repaired it",
            fact=status.trust_damage,
            remedy="start another machine of the cluster; or pair again: edgepipe node join CODE",
        )
    if status is not None and status.removed:
        yield problem(
            id="trust.removed",
            what="this node was removed from its cluster",
            remedy="pair it again: edgepipe node invite on a member, then edgepipe node join on this machine",
        )
    bad = (AuditKind.DENIED, AuditKind.HANDSHAKE_REFUSED, AuditKind.PAIRING_FAILED, AuditKind.BAD_STATEMENT)
    since_s = time.time() - _RECENT_S
    recent = [
        entry
        for entry in read_audit(TrustFolders(config.data_dir).audit, last=_AUDIT_LINES)
        if entry.kind in bad and entry.at_s >= since_s
    ]
    probes = [entry for entry in recent if entry.kind == AuditKind.HANDSHAKE_REFUSED]
    if (
        sum(entry.times * int(entry.detail.split()[0]) for entry in probes) < _MANY_PROBES
    ):  # a scan of the LAN, 'doctor' on another machine
        recent = [entry for entry in recent if entry not in probes]
    if recent:
        count, last = sum(entry.times for entry in recent), recent[-1]
        strangers = last.kind == AuditKind.HANDSHAKE_REFUSED
        event = strangers_text(last) if strangers else f"{last.kind}, {last.who} {last.detail}".rstrip()
        yield note(
            id="trust.audit",
            what=f"{count} attempt{'s were' if count != 1 else ' was'} refused within a day",
            fact=f"the last: {event}",
            remedy="edgepipe peers log",
        )
