"""Checks of ``edgepipe doctor``, layer by layer: machine, network, every peer, trust."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgepipe.addresses import host_and_port, host_maybe_port, with_port
from edgepipe.cli.doctor.findings import (
    Finding,
    NetworkFacts,
    Ports,
    alone_finding,
    handshake_finding,
    link_finding,
    mtu_finding,
    multicast_findings,
    network_findings,
    note,
    range_finding,
    reach_finding,
)
from edgepipe.cli.doctor.machine_findings import check_multicast, machine_findings, network_facts
from edgepipe.cli.doctor.node_findings import member_findings, node_findings, trust_findings
from edgepipe.cli.wizard.links import MachineLink, links_of
from edgepipe.config import HTTP_PORT, NODE_PORT
from edgepipe.errors import ConfigInvalid, EdgepipeError

if TYPE_CHECKING:
    from edgepipe.config import Config
    from edgepipe.wire.nodes import ClusterStatus, MemberState

_TCP_S = 3.0
_PORT_S = 2.0
Links = asyncio.Task[dict[str, MachineLink]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedMachine:
    """A machine to examine."""

    name: str
    host: str
    port: int
    node_id: str = ""  # empty: not known
    member: MemberState | None = None


ExaminePeer = Callable[[ExaminedMachine, NetworkFacts, Ports, Links], Coroutine[None, None, list[Finding]]]


async def examine(
    config: Config,
    peers: Sequence[str],
    *,
    say: Callable[[Finding], None],
    facts: NetworkFacts | None = None,
    examine_peer: ExaminePeer | None = None,
) -> list[Finding]:
    """Return all findings, always in the same order; pass each to ``say`` as soon as its turn comes.

    Checks that wait for the network run concurrently. ``facts`` and ``examine_peer`` replace what the machine says and
    the check of a peer. Raises ConfigInvalid.
    """
    from edgepipe.cli.admin import status_if_running

    ports = Ports(node=config.port or NODE_PORT, http=config.http_port or HTTP_PORT)
    status = await status_if_running(config.data_dir)
    members = {member.node.name for member in status.members} if status is not None else set[str]()
    named = [_named_peer(text, ports) for text in peers if text not in members]
    found: list[Finding] = []

    def tell(*findings: Finding) -> None:
        for finding in findings:
            found.append(finding)
            say(finding)

    tell(*machine_findings(config), *node_findings(status))
    facts, examine_peer = facts or network_facts(config), examine_peer or _examine_peer
    tell(*network_findings(facts, ports))
    gone = await _gone_peers(config, status)
    others = [*named, *_known_peers(status, named), *(one for one in gone if not _is_named(one.host, one.port, named))]
    async with asyncio.TaskGroup() as tasks:
        multicast = tasks.create_task(_multicast(config, facts, len(others)), name="multicast")
        links = tasks.create_task(_links(config, status), name="links")
        looks = [
            tasks.create_task(examine_peer(machine, facts, ports, links), name=f"peer:{machine.name}")
            for machine in others
        ]
        for look in (multicast, *looks):
            tell(*await look)
    if status is not None and gone and len(status.members) == 1:
        tell(alone_finding(host_and_port(status.members[0].node.address)[0], facts))
    tell(*trust_findings(config, status))
    return found


async def _examine_peer(peer: ExaminedMachine, facts: NetworkFacts, ports: Ports, links: Links) -> list[Finding]:
    from edgepipe.cluster.probes import Reach, neighbour_is_known, probe_ports, probe_tcp

    tcp = await probe_tcp(peer.host, peer.port, timeout_s=_TCP_S)
    found = [reach_finding(tcp, peer.name, facts, ports, neighbour_known=neighbour_is_known(peer.host))]
    if tcp.reach is not Reach.OPEN:
        return found
    found.append(await _handshake(peer, facts))
    peer_ports = Ports(node=peer.port, http=ports.http)
    all_ports = await probe_ports(peer.host, range(peer.port, peer_ports.last + 1), timeout_s=_PORT_S)
    found.append(range_finding(all_ports, peer.name, peer_ports))
    if (finding := mtu_finding(tcp, peer.name, facts)) is not None:
        found.append(finding)
    if peer.member is not None:
        found += member_findings(peer.name, peer.member)
        measured = (await links).get(peer.node_id) or MachineLink(rtt_ms=peer.member.rtt_ms)
        rtt_ms, rate = measured.rtt_ms, measured.bytes_per_s
        found.append(link_finding(peer.name, rtt_ms=rtt_ms, bytes_per_s=rate, wireless=facts.wireless))
    return found


async def _handshake(peer: ExaminedMachine, facts: NetworkFacts) -> Finding:
    """Check which node's certificate the address shows."""
    from edgepipe.cluster.probes import probe_tls
    from edgepipe.security.certificates import peek_fingerprint

    shown = await probe_tls(peer.host, peer.port, timeout_s=_TCP_S)
    try:
        seen = peek_fingerprint(shown.certificate_pem) if shown.certificate_pem else ""
    except EdgepipeError:
        seen = ""
    where = with_port(peer.host, peer.port)
    return handshake_finding(shown, peer.name, facts, where=where, seen=seen, expected=peer.node_id)


async def _links(config: Config, status: ClusterStatus | None) -> dict[str, MachineLink]:
    """Measure links between this machine and members, with messages as large as activations. Return them by node id."""
    from edgepipe.cli.admin import connect

    if status is None or len(status.members) < 2:
        return {}
    try:
        async with connect(config.data_dir) as admin:
            return links_of(status.node_id, (await admin.measure_links()).links)
    except EdgepipeError:
        return {}


async def _multicast(config: Config, facts: NetworkFacts, known_peers: int) -> list[Finding]:
    """Probe multicast over IPv4 and IPv6 concurrently. No findings without a network."""
    if not facts.address:
        return []
    if ":" in facts.address:
        return [await _multicast6(config, facts)]
    four, six = await asyncio.gather(check_multicast(facts, listen_s=config.listen_s), _multicast6(config, facts))
    return [multicast_findings(four, facts, known_peers=known_peers, family="IPv4"), six]


async def _multicast6(config: Config, facts: NetworkFacts) -> Finding:
    from edgepipe.cluster.interfaces import link_local6, own_addresses
    from edgepipe.cluster.probes import probe_multicast6

    own = link_local6(facts.interface)
    if own is None:
        problem = f"{facts.interface} has no IPv6; IPv4 is enough"
        return note(id="network.multicast6", what=problem)
    heard = await probe_multicast6(own.address, own.index, own=own_addresses(), listen_s=config.listen_s)
    return multicast_findings(heard, facts, known_peers=0, family="IPv6")


def _named_peer(text: str, ports: Ports) -> ExaminedMachine:
    host, port = host_maybe_port(text)
    if not host or text.endswith(":") or (port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536)):
        raise ConfigInvalid(
            f"--peer cannot be '{text}'",
            fact="it is no member's name, and no HOST or HOST:PORT",
            next_step="edgepipe doctor --peer 192.168.1.20",
        )
    return ExaminedMachine(name=host, host=host, port=int(port) if port else ports.node)


def _known_peers(status: ClusterStatus | None, named: Sequence[ExaminedMachine]) -> list[ExaminedMachine]:
    """Return the other members, except those whose address the user named."""
    found: list[ExaminedMachine] = []
    for member in status.members if status is not None else ():
        host, port = host_and_port(member.node.address)
        if member.self or not port.isdecimal() or _is_named(host, int(port), named):
            continue
        found.append(
            ExaminedMachine(
                name=member.node.name, host=host, port=int(port), node_id=member.node.node_id, member=member
            )
        )
    return found


def _is_named(host: str, port: int, named: Sequence[ExaminedMachine]) -> bool:
    return any((machine.host, machine.port) == (host, port) for machine in named)


async def _gone_peers(config: Config, status: ClusterStatus | None) -> list[ExaminedMachine]:
    """Return the members that went without a goodbye, at their last addresses."""
    from edgepipe.cli.admin import connect
    from edgepipe.cluster.absence import missed

    gone = {node.node_id for node in missed(status.absent)} if status is not None else set[str]()
    if not gone:
        return []
    try:
        async with connect(config.data_dir) as admin:
            peers = (await admin.peers()).peers
    except EdgepipeError:
        return []
    found: list[ExaminedMachine] = []
    for peer in peers:
        host, port = host_and_port(peer.address)
        if peer.node_id in gone and port.isdecimal():
            found.append(ExaminedMachine(name=peer.name, host=host, port=int(port), node_id=peer.node_id))
    return found
