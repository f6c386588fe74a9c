"""``edgepipe doctor``: looks at the machine, the network and the peers, and says for each finding what to do."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe import __version__
from edgepipe.cli.findings import (
    Finding,
    Level,
    NetworkFacts,
    Ports,
    clock_finding,
    descriptor_finding,
    disk_finding,
    link_finding,
    mtu_finding,
    multicast_findings,
    network_findings,
    range_finding,
    reach_finding,
    rights_finding,
    worst,
)
from edgepipe.cli.options import DataDir, Json
from edgepipe.cli.output import make_console, print_json, printable
from edgepipe.cli.wizard.links import Link, links_of
from edgepipe.errors import ConfigInvalid, EdgepipeError

if TYPE_CHECKING:
    from edgepipe.cluster.probes import MulticastProbe
    from edgepipe.config import Config
    from edgepipe.wire.v1 import node_pb2 as pb

_DEGRADED_EXIT = 8  # warnings or problems were found
_TCP_S = 3.0
_PORT_S = 2.0
_LISTEN_S = 3.0  # answers come within a second; a sleeping Wi-Fi card takes longer
_AUDIT_LINES = 200
_RECENT_S = 24 * 3600.0
_MARKS = {
    Level.OK: ("✓", "green"),
    Level.NOTE: ("·", "dim"),
    Level.WARNING: ("!", "yellow"),
    Level.PROBLEM: ("✗", "red"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Somebody to look at."""

    name: str
    host: str
    port: int
    node_id: str = ""  # empty: not known
    member: pb.MemberState | None = None


def doctor(
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="HOST or HOST:PORT of a machine to look at; repeatable.")
    ] = None,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Find out what is in the way: machine, network, peers. Exit code 8 if something is."""
    from edgepipe.config import load_config

    config = load_config({"data_dir": data_dir}).values
    findings = asyncio.run(examine(config, peer or [], say=_nothing if as_json else _print_finding))
    level = worst(findings)
    if as_json:
        print_json({"level": level, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_end(findings)
    if level in (Level.WARNING, Level.PROBLEM):
        raise typer.Exit(_DEGRADED_EXIT)


async def examine(config: Config, peers: Sequence[str], *, say: Callable[[Finding], None]) -> list[Finding]:
    """All findings in the order in which they were made, each told to ``say`` at once. Raises ConfigInvalid."""
    ports = Ports(node=config.port or 7117, http=config.http_port or 8117)
    named = [_named_peer(text, ports) for text in peers]
    status = await _status(config)
    found: list[Finding] = []

    def tell(*findings: Finding | None) -> None:
        for finding in findings:
            if finding is not None:
                found.append(finding)
                say(finding)

    tell(*machine_findings(config), *_node_findings(status))
    facts = network_facts(config)
    tell(*network_findings(facts, ports))
    others = [*named, *_known_peers(status, named)]
    if facts.address:
        for finding in await _multicast(facts, len(others)):
            tell(finding)
    links = await _links(config, status)
    for one in others:
        tell(*await _examine_peer(one, facts, ports, links.get(one.node_id)))
    tell(*_trust_findings(config, status))
    return found


def machine_findings(config: Config) -> Iterator[Finding]:
    """Program, backends, disk, rights, descriptors."""
    yield Finding(
        id="machine.version",
        level=Level.OK,
        what=f"edgepipe {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    )
    yield backend_finding()
    folder = next(path for path in (config.models_dir, *config.models_dir.parents) if path.exists())
    yield disk_finding(str(folder), free_bytes=shutil.disk_usage(folder).free)
    key = config.data_dir / "identity" / "key.pem"
    if key.exists():
        yield rights_finding(str(key), mode=key.stat().st_mode)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (finding := descriptor_finding(soft=soft)) is not None:
        yield finding


def backend_finding() -> Finding:
    """Whether something here can compute."""
    mac = platform.system() == "Darwin" and platform.machine() == "arm64"
    gpu = shutil.which("nvidia-smi") is not None
    have = [name for name in ("torch", "mlx") if importlib.util.find_spec(name)]
    if not have:
        extra = "mlx" if mac else "torch"
        return Finding(
            id="machine.backend",
            level=Level.WARNING,
            what="this machine can chat and watch, but hold no part of a model",
            fact="neither torch nor mlx is installed",
            remedy=f"pip install 'edgepipe[{extra}]'",
        )
    if mac and "mlx" not in have:
        return Finding(
            id="machine.backend",
            level=Level.WARNING,
            what="this Mac computes with torch only, several times slower than with MLX",
            remedy="pip install 'edgepipe[mlx]'",
        )
    return Finding(
        id="machine.backend",
        level=Level.OK,
        what=f"backends: {', '.join(have)}",
        fact="an NVIDIA driver is installed" if gpu else "",
    )


def network_facts(config: Config) -> NetworkFacts:
    """What this machine's own system says of its network."""
    from edgepipe.cluster.interfaces import interfaces, is_wireless, lan_interfaces, routed_address

    available = interfaces()
    usable = lan_interfaces(available)
    routed = routed_address()
    chosen = next((one for one in usable if config.interface in (one.name, one.address)), None) or next(
        (one for one in usable if one.address == routed), usable[0] if usable else None
    )
    ignored = tuple(sorted({one.name for one in available if one not in usable and not one.address.startswith("127.")}))
    name = chosen.name if chosen else ""
    release = platform.release().lower()
    return NetworkFacts(
        interface=name,
        address=chosen.address if chosen else "",
        wireless=bool(chosen) and is_wireless(chosen.address, available),
        speed_bits_per_s=max(0, _number(Path(f"/sys/class/net/{name}/speed"))) * 1e6 if name else 0,
        mtu_bytes=max(0, _number(Path(f"/sys/class/net/{name}/mtu"))) if name else 0,
        ignored=ignored,
        wsl="microsoft" in release and bool(chosen) and chosen.address.startswith("172."),
        mac=sys.platform == "darwin",
        firewall=_firewall(),
    )


async def _examine_peer(peer: Peer, facts: NetworkFacts, ports: Ports, link: Link | None) -> list[Finding]:
    from edgepipe.cluster.probes import Reach, neighbour_is_known, probe_ports, probe_tcp

    tcp = await probe_tcp(peer.host, peer.port, timeout_s=_TCP_S)
    found = [reach_finding(tcp, peer.name, facts, ports, neighbour_known=neighbour_is_known(peer.host))]
    if tcp.reach is not Reach.OPEN:
        return found
    found.append(await _handshake(peer))
    there = Ports(node=peer.port, http=ports.http)
    all_ports = await probe_ports(peer.host, range(peer.port, there.last + 1), timeout_s=_PORT_S)
    found.append(range_finding(all_ports, peer.name, there))
    if (finding := mtu_finding(tcp, peer.name, facts)) is not None:
        found.append(finding)
    if peer.member is not None:
        found += _member_findings(peer.name, peer.member)
        measured = link or Link(rtt_ms=peer.member.rtt_ms)
        rtt_ms, rate = measured.rtt_ms, measured.bytes_per_s
        found.append(link_finding(peer.name, rtt_ms=rtt_ms, bytes_per_s=rate, wireless=facts.wireless))
    return found


async def _links(config: Config, status: pb.ClusterStatus | None) -> dict[str, Link]:
    """What passes between this machine and members, at the sizes of activations; by node id."""
    from edgepipe.cli.admin import connect

    if status is None or len(status.members) < 2:
        return {}
    try:
        async with connect(config.data_dir) as admin:
            return links_of(status.node_id, await admin.measure_links())
    except EdgepipeError:
        return {}


async def _handshake(peer: Peer) -> Finding:
    """Whose certificate the address shows."""
    from edgepipe.cluster.probes import probe_tls
    from edgepipe.link.certificates import peek_fingerprint

    shown = await probe_tls(peer.host, peer.port, timeout_s=_TCP_S)
    name = f"peer.{peer.name}.handshake"
    where = f"{peer.host}:{peer.port}"
    try:
        node_id = peek_fingerprint(shown.certificate_pem) if shown.certificate_pem else ""
    except EdgepipeError:
        node_id = ""
    if not node_id:
        return Finding(
            id=name,
            level=Level.PROBLEM,
            what=f"{peer.name}: what listens at {where} is no edgepipe node",
            fact=shown.error or "its certificate is not one of edgepipe's",
            remedy="another program may have the port: edgepipe node start --port PORT on that machine",
        )
    if peer.node_id and node_id != peer.node_id:
        return Finding(
            id=name,
            level=Level.PROBLEM,
            what=f"{peer.name}: another machine answers at its address, or somebody stands between",
            fact=f"expected the key {peer.node_id[:12]}, seen {node_id[:12]}",
            remedy="restart both nodes; if it stays, ask who owns that address: edgepipe peers log",
        )
    return Finding(id=name, level=Level.OK, what=f"{peer.name}: its key is {node_id[:12]}")


def _member_findings(name: str, member: pb.MemberState) -> Iterator[Finding]:
    """What the running node knows of a member."""
    version = member.node.edgepipe_version
    if version != __version__:
        yield Finding(
            id=f"peer.{name}.version",
            level=Level.WARNING,
            what=f"{name} runs edgepipe {version}, this machine {__version__}",
            remedy="upgrade the older one: pip install --upgrade edgepipe",
        )
    yield clock_finding(name, skew_ms=member.clock_skew_ms)
    for device in member.node.devices:
        if device.state == "failed":
            yield _device_finding(name, device)


def _device_finding(name: str, device: pb.DeviceState) -> Finding:
    return Finding(
        id=f"peer.{name}.device",
        level=Level.PROBLEM,
        what=f"{name}: {device.error.what or 'its device cannot be used'}",
        fact=device.error.fact,
        remedy=device.error.next_step or "edgepipe logs on that machine",
    )


def _node_findings(status: pb.ClusterStatus | None) -> Iterator[Finding]:
    """What this machine's node says of itself."""
    if status is None:
        yield Finding(
            id="node.running",
            level=Level.NOTE,
            what="no node runs on this machine; looked at what can be seen without one",
            remedy="edgepipe node start",
        )
        return
    own = next(member.node for member in status.members if member.self)
    yield Finding(
        id="node.running",
        level=Level.OK,
        what=f"node '{own.name}' of cluster '{status.cluster_name}' runs",
        fact=f"{len(status.members)} node{'s' * (len(status.members) != 1)}, at {own.address}",
    )
    for device in own.devices:
        if device.state == "failed":
            yield _device_finding(own.name, device)
    if status.discovery_problem:
        yield Finding(
            id="node.discovery",
            level=Level.WARNING,
            what="the node finds others by remembered and named addresses only",
            fact=status.discovery_problem,
            remedy="edgepipe node start --peer HOST:7117    (or --interface NAME)",
        )
    names = {member.node.node_id: member.node.name for member in status.members}
    for link in status.broken_links:
        one, other = names.get(link.node_id, link.node_id), names.get(link.other_id, link.other_id)
        yield Finding(
            id="node.links",
            level=Level.PROBLEM,
            what=f"{one} and {other} do not hear each other, though both hear this node",
            remedy=f"on {one}: edgepipe doctor",
        )
    for refused in status.refused:
        yield Finding(
            id="node.refused",
            level=Level.NOTE,
            what=f"{refused.peer}: {refused.error.what}",
            fact=refused.error.fact,
            remedy=refused.error.next_step,
        )


def _trust_findings(config: Config, status: pb.ClusterStatus | None) -> Iterator[Finding]:
    """Damage, and what was refused of late."""
    from edgepipe.cluster.founding import TrustFolders
    from edgepipe.telemetry.audit import AuditKind, read_audit

    if status is not None and status.trust_damage:
        yield Finding(
            id="trust.store",
            level=Level.PROBLEM,
            what="the trust store was damaged; nobody is let in until another member has mended it",
            fact=status.trust_damage,
            remedy="start another machine of the cluster; or pair anew: edgepipe node join",
        )
    if status is not None and status.removed:
        yield Finding(
            id="trust.removed",
            level=Level.PROBLEM,
            what="this node was removed from its cluster",
            remedy="pair it again: edgepipe node invite on a member, edgepipe node join here",
        )
    bad = (AuditKind.DENIED, AuditKind.HANDSHAKE_REFUSED, AuditKind.PAIRING_FAILED, AuditKind.BAD_STATEMENT)
    since_s = time.time() - _RECENT_S
    recent = [
        entry
        for entry in read_audit(TrustFolders(config.data_dir).audit, last=_AUDIT_LINES)
        if entry.kind in bad and entry.at_s >= since_s
    ]
    if recent:
        count = sum(entry.times for entry in recent)
        yield Finding(
            id="trust.audit",
            level=Level.NOTE,
            what=f"{count} attempt{'s were' if count != 1 else ' was'} refused within a day",
            fact=f"the last: {recent[-1].kind}, {recent[-1].who} {recent[-1].detail}".rstrip(),
            remedy="edgepipe peers log",
        )


async def look_at_multicast(facts: NetworkFacts) -> MulticastProbe:
    """Whether other machines answer a question to everybody over IPv4."""
    from edgepipe.cluster.interfaces import interfaces
    from edgepipe.cluster.probes import probe_multicast

    return await probe_multicast(facts.address, own=[one.address for one in interfaces()], listen_s=_LISTEN_S)


async def _multicast(facts: NetworkFacts, known_peers: int) -> list[Finding]:
    from edgepipe.cluster.interfaces import interfaces, link_local6
    from edgepipe.cluster.probes import probe_multicast6

    own = [one.address for one in interfaces()]
    six = link_local6(facts.interface)
    probes = [look_at_multicast(facts)]
    if six is not None:
        probes.append(probe_multicast6(six.address, six.index, own=[*own, six.address], listen_s=_LISTEN_S))
    results = await asyncio.gather(*probes)
    families = ("IPv4", "IPv6")
    return [
        multicast_findings(result, facts, known_peers=known_peers, family=family)
        for result, family in zip(results, families, strict=False)
    ]


def _named_peer(text: str, ports: Ports) -> Peer:
    host, _, port = text.partition(":")
    if not host or (port and not port.isdecimal()):
        raise ConfigInvalid(f"--peer cannot be '{text}'", next_step="give HOST or HOST:PORT, such as 192.168.1.20")
    return Peer(name=host, host=host, port=int(port) if port else ports.node)


def _known_peers(status: pb.ClusterStatus | None, named: Sequence[Peer]) -> list[Peer]:
    """Other members, but those that were named."""
    found: list[Peer] = []
    for member in status.members if status is not None else ():
        host, _, port = member.node.address.rpartition(":")
        if member.self or any((one.host, one.port) == (host, int(port)) for one in named):
            continue
        found.append(Peer(name=member.node.name, host=host, port=int(port), node_id=member.node.node_id, member=member))
    return found


async def _status(config: Config) -> pb.ClusterStatus | None:
    from edgepipe.cli.admin import connect

    try:
        async with connect(config.data_dir) as admin:
            return await admin.status()
    except EdgepipeError:
        return None


def _firewall() -> str:
    """The one that is on, as far as an ordinary user can see."""
    try:
        if "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text(encoding="utf-8"):
            return "ufw"
    except OSError:
        pass
    return "firewalld" if Path("/run/firewalld").exists() else ""


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _print_finding(finding: Finding) -> None:
    mark, style = _MARKS[finding.level]
    console = make_console()
    console.print(f"[{style}]{mark}[/{style}] ", end="")
    console.print(printable(finding.what), markup=False, soft_wrap=True)
    for line in (finding.fact, f"→ {finding.remedy}" if finding.remedy else ""):
        if line:
            console.print("    " + printable(line), style="dim", markup=False, soft_wrap=True)


def _print_end(findings: Sequence[Finding]) -> None:
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if not problems and not warnings:
        print("\nnothing is in the way")
        return
    counts = ((problems, "problem"), (warnings, "warning"))
    parts = [f"{count} {word}{'s' * (count != 1)}" for count, word in counts if count]
    print(f"\n{', '.join(parts)}; each line after → says what to do")


def _nothing(finding: Finding) -> None:
    """Say nothing."""
