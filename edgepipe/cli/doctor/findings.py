"""Turns measurements into findings for people, each with its fact and its remedy. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from edgepipe.cluster.probes import MulticastProbe, Reach, TcpProbe, TlsProbe
from edgepipe.config import PAIRING_OFFSET
from edgepipe.units import format_bytes, format_duration_s, format_rate

_MDNS = "UDP 5353"
_LITTLE_DISK_BYTES = 10e9
_FEW_DESCRIPTORS = 1024
_SKEW_MS = 120_000.0
_MAC_NO_ROUTE = 65  # EHOSTUNREACH on macOS: the error of Local Network privacy
_SLOW_RTT_MS, _SLOW_BYTES_PER_S = 5.0, 300e6 / 8
_SMALL_MTU_BYTES = 1280


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"  # no problem; information
    WARNING = "warning"  # works, but worse than possible
    PROBLEM = "problem"  # does not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    id: str  # stable, for scripts
    level: Level
    what: str
    fact: str = ""
    remedy: str = ""


ok = partial(Finding, level=Level.OK)
note = partial(Finding, level=Level.NOTE)
warning = partial(Finding, level=Level.WARNING)
problem = partial(Finding, level=Level.PROBLEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of this cluster's nodes."""

    node: int
    http: int

    @property
    def last(self) -> int:
        """The pairing port, the highest port."""
        return self.node + PAIRING_OFFSET

    @property
    def text(self) -> str:
        """The ports as people and firewalls write them."""
        return f"TCP {self.node}-{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """Facts about this machine's network interface."""

    interface: str
    address: str  # IPv4, or IPv6 on a network without IPv4; empty: none
    wireless: bool
    speed_bits_per_s: float  # speed of the interface; 0: unknown
    mtu_bytes: int  # 0: unknown
    ignored: tuple[str, ...] = ()  # interfaces of containers and tunnels
    link_local: str = ""  # an address of IPv6 that needs a scope, on a machine that has no other; empty: none
    live: tuple[str, ...] = ()  # names and addresses of interfaces that lead to other machines
    dead: tuple[str, ...] = ()  # the same of those without a cable or a radio network
    wsl: bool = False
    mac: bool = False
    firewall: str = ""  # "ufw", "firewalld", ...; empty: none seen


def subnet_of(address: str) -> str:
    """Return an address's network of the size that homes usually have, in the notation of firewalls."""
    return str(ipaddress.ip_network(f"{address}/{64 if ':' in address else 24}", strict=False))


def firewall_remedy(firewall: str, address: str, ports: Ports) -> str:
    """Return the commands that open a firewall for edgepipe."""
    if firewall == "firewalld":
        return (
            f"sudo firewall-cmd --permanent --add-port={ports.node}-{ports.last}/tcp --add-service=mdns "
            "&& sudo firewall-cmd --reload"
        )
    subnet = subnet_of(address) if address else "192.168.0.0/16"
    if firewall == "nftables":
        rule = f"ip saddr {subnet}"
        return (
            f"accept these in its input chain (sudo nft list ruleset): {rule} tcp dport {ports.node}-{ports.last} "
            f"accept; {rule} udp dport 5353 accept"
        )
    if firewall == "macos":
        return "System Settings > Network > Firewall > Options: allow incoming connections for python"
    return (
        f"sudo ufw allow from {subnet} to any port {ports.node}:{ports.last} proto tcp "
        f"&& sudo ufw allow from {subnet} to any port 5353 proto udp"
    )


def network_findings(facts: NetworkFacts, ports: Ports) -> list[Finding]:
    """Check the interface, WSL2, the MTU and this machine's firewall."""
    if not facts.address and facts.link_local:
        return [
            problem(
                id="network.interface",
                what="this machine has no address that other machines can use",
                fact=f"only {facts.link_local}, which is valid on one link; edgepipe needs IPv4, or IPv6 from a router",
                remedy="switch on DHCP in the router; or give this network addresses of IPv6 that begin with fd",
            )
        ]
    if not facts.address:
        return [
            problem(
                id="network.interface",
                what="no usable network connection",
                fact=f"ignored: {', '.join(facts.ignored)}" if facts.ignored else "",
                remedy="plug in a cable or switch Wi-Fi on; or name an interface: edgepipe node start --interface NAME",
            )
        ]
    kind = "Wi-Fi" if facts.wireless else "wired"
    speed = f" {format_rate(facts.speed_bits_per_s / 8)}" if facts.speed_bits_per_s else ""
    ignored = f"ignored: {', '.join(facts.ignored)}" if facts.ignored else ""
    found = [
        ok(id="network.interface", what=f"network: {facts.interface} {facts.address}, {kind}{speed}", fact=ignored)
    ]
    found += [_dead_link(dead, facts) for dead in facts.dead]
    if facts.wsl:
        found.append(
            problem(
                id="network.wsl",
                what="this Linux runs inside WSL2 behind NAT: the network cannot reach it",
                fact=f"its address is {facts.address}",
                remedy="in %UserProfile%\\.wslconfig: [wsl2] networkingMode=mirrored; then: wsl --shutdown",
            )
        )
    if 0 < facts.mtu_bytes < _SMALL_MTU_BYTES:
        found.append(
            warning(
                id="network.mtu",
                what=f"{facts.interface} sends very small packets",
                fact=f"its MTU is {facts.mtu_bytes} bytes, 1500 is usual",
                remedy=f"sudo ip link set {facts.interface} mtu 1500",
            )
        )
    if facts.firewall:
        found.append(
            note(
                id="network.firewall",
                what=f"a firewall is on ({facts.firewall}); edgepipe needs {ports.text} and {_MDNS} from your network",
                remedy=firewall_remedy(facts.firewall, facts.address, ports),
            )
        )
    return found


def _dead_link(dead: str, facts: NetworkFacts) -> Finding:
    """Name an interface that has an address and leads nowhere."""
    name, _, address = dead.partition(" ")
    only = name == facts.interface
    return Finding(
        id=f"network.link.{name}",
        level=Level.PROBLEM if only else Level.WARNING,
        what=f"{name} keeps its address {address}, but its link is dead",
        fact="no cable is plugged in, no radio network is joined, or it is switched off"
        + ("" if only else f"; the node uses {facts.interface}"),
        remedy=f"plug in the cable of {name} at both ends, or join its network again",
    )


def multicast_findings(probe: MulticastProbe, facts: NetworkFacts, *, known_peers: int, family: str) -> Finding:
    """Check whether discovery can work. ``family``: IPv4 or IPv6; nodes announce themselves over IPv4."""
    name = f"network.multicast{family[-1]}"
    if not probe.sent:
        if facts.mac and probe.errno == _MAC_NO_ROUTE:
            return problem(
                id=name,
                what="macOS keeps this program off the local network",
                fact=f"multicast: {probe.error} ({probe.errno})",
                remedy="System Settings > Privacy & Security > Local Network: switch on the app you started this from "
                "(if it is on: off, and on again)",
            )
        if family == "IPv6":
            return note(id=name, what="no IPv6 multicast on this network; IPv4 is enough", fact=probe.error)
        return problem(
            id=name,
            what="this machine cannot send multicast, so it cannot find other nodes",
            fact=f"{probe.error} on {probe.address}",
            remedy="name the others: edgepipe node start --peer HOST:7117    (or --interface NAME)",
        )
    if probe.others:
        return ok(
            id=name,
            what=f"{family} multicast works",
            fact=f"{len(probe.others)} other machine{'s' * (len(probe.others) != 1)} answered mDNS",
        )
    quiet = f"no machine answered mDNS over {family} within {round(probe.waited_s, 1):g} s"
    if family == "IPv6":
        return note(id=name, what=quiet, fact="nodes need IPv4 only")
    if known_peers:
        known = f"{known_peers} peer{'s are' if known_peers != 1 else ' is'} known anyway"
        return note(id=name, what=quiet, fact=known)
    return warning(
        id=name,
        what=quiet,
        fact="printers and televisions usually do; guest Wi-Fi, client isolation and firewalls swallow multicast",
        remedy="join by address: edgepipe node join --host ADDRESS CODE; it does not need multicast",
    )


def reach_finding(
    probe: TcpProbe, name: str, facts: NetworkFacts, ports: Ports, *, neighbour_known: bool | None
) -> Finding:
    """Check whether a peer's daemon can be reached, and if not, find the cause."""
    where = f"{probe.host}:{probe.port}"
    base = f"peer.{name}.tcp"
    if probe.reach is Reach.OPEN:
        return ok(id=base, what=f"{name}: reached at {where}", fact=f"{probe.took_ms:.1f} ms")
    if probe.reach is Reach.REFUSED:
        return problem(
            id=base,
            what=f"{name}: the machine answers, but no node runs at {where}",
            fact="connection refused",
            remedy="on that machine: edgepipe node start    (or: edgepipe service status)",
        )
    if probe.reach is Reach.NO_NAME:
        return problem(
            id=base,
            what=f"{name}: this machine finds no address for that name",
            fact=probe.error,
            remedy="give its address: 'edgepipe peers' on that machine shows it",
        )
    if facts.mac and probe.errno == _MAC_NO_ROUTE:
        return problem(
            id=base,
            what=f"{name}: macOS keeps this program off the local network; the other machine is probably fine",
            fact=f"{where}: {probe.error} ({probe.errno})",
            remedy="System Settings > Privacy & Security > Local Network: switch on the app you started this from",
        )
    if probe.reach is Reach.BLOCKED:
        return problem(
            id=base,
            what=f"{name}: this machine's own firewall stops connections to it",
            fact=f"{where}: {probe.error}",
            remedy="allow outgoing connections to " + ports.text,
        )
    if probe.reach is Reach.NO_ROUTE or neighbour_known is False:
        same = _same_subnet(probe.host, facts.address)
        away = "it is off or asleep, the link beyond this machine is dead, or the Wi-Fi has client isolation"
        return problem(
            id=base,
            what=f"{name}: {where} cannot be reached: {away if same else 'it is on another network'}",
            fact=probe.error or f"no answer from {probe.host} within {probe.took_ms / 1e3:.0f} s, not even ARP",
            remedy="wake it; check the cables and the switch between, or switch client isolation off in the router"
            if same
            else f"connect both machines to one network; this one is at {facts.address}",
        )
    return problem(
        id=base,
        what=f"{name}: a firewall on {probe.host} drops connections to port {probe.port}",
        fact=f"no answer within {probe.took_ms / 1e3:.0f} s"
        + (", though the machine is on" if neighbour_known else ""),
        remedy="on that machine: " + firewall_remedy("ufw", probe.host, ports),
    )


def alone_finding(address: str, facts: NetworkFacts) -> Finding:
    """Say that no member answers on the network of this node's ``address``, and which other networks there are."""
    fact, remedy = "", "if the others run, check the cables and the switch between, and run edgepipe doctor on them"
    if others := [live for live in facts.live if live.partition(" ")[2] != address]:
        name = others[0].partition(" ")[0]
        fact = f"a node listens on one network; this machine also has {', '.join(others)}"
        remedy = f"if the others have it too, on each: edgepipe node stop; edgepipe node start --interface {name}"
    what = f"no other machine answers on the node's network ({address})"
    return problem(id="node.alone", what=what, fact=fact, remedy=remedy)


def handshake_finding(
    probe: TlsProbe, name: str, facts: NetworkFacts, *, where: str, seen: str, expected: str
) -> Finding:
    """Compare the key at an address with the expected one. ``seen``: empty for no node; ``expected``: empty for any."""
    base = f"peer.{name}.handshake"
    if probe.silent:
        return problem(
            id=base,
            what=f"{name}: {where} accepts connections but sends no data",
            fact="another program may use the port, or large packets get lost",
            remedy="on that machine: edgepipe node start --port PORT; or, on both: "
            f"sudo ip link set {facts.interface or 'INTERFACE'} mtu 1280",
        )
    if not seen:
        return problem(
            id=base,
            what=f"{name}: the program at {where} is no edgepipe node",
            fact=probe.error or "its certificate is not an edgepipe certificate",
            remedy="another program may use the port: edgepipe node start --port PORT on that machine",
        )
    if expected and seen != expected:
        return problem(
            id=base,
            what=f"{name}: another machine answers at its address, or intercepts the connection",
            fact=f"expected the key {expected[:12]}, seen {seen[:12]}",
            remedy="restart both nodes; if this comes back, find the owner of that address: edgepipe peers log",
        )
    return ok(id=base, what=f"{name}: its key is {seen[:12]}")


def range_finding(probes: Sequence[TcpProbe], name: str, ports: Ports) -> Finding:
    """Check that no firewall blocks the ports: an open or refusing port passes."""
    shut = [probe.port for probe in probes if probe.reach not in (Reach.OPEN, Reach.REFUSED)]
    if not shut:
        return ok(id=f"peer.{name}.ports", what=f"{name}: {ports.text} are reachable")
    return problem(
        id=f"peer.{name}.ports",
        what=f"{name}: some of {ports.text} are blocked: stages and pairing need all of them",
        fact=f"no answer at {', '.join(map(str, shut[:6]))}" + (" and more" if len(shut) > 6 else ""),
        remedy="on that machine: " + firewall_remedy("ufw", probes[0].host, ports),
    )


def mtu_finding(probe: TcpProbe, name: str, facts: NetworkFacts) -> Finding | None:
    """Report a path with a smaller MTU than its ends: it works, but slower."""
    if not 0 < probe.path_mtu_bytes < facts.mtu_bytes:
        return None
    return warning(
        id=f"peer.{name}.mtu",
        what=f"{name}: a device on the path allows only smaller packets",
        fact=f"{probe.path_mtu_bytes} bytes instead of {facts.mtu_bytes}",
        remedy=f"set the same MTU on both machines: sudo ip link set {facts.interface} mtu {probe.path_mtu_bytes}",
    )


def link_finding(name: str, *, rtt_ms: float, bytes_per_s: float, wireless: bool) -> Finding:
    """Rate a link for a pipeline. ``bytes_per_s`` 0: not measured."""
    rate = f", {format_rate(bytes_per_s)}" if bytes_per_s else ""
    slow = rtt_ms > _SLOW_RTT_MS or 0 < bytes_per_s < _SLOW_BYTES_PER_S
    fact = f"round trip {rtt_ms:.1f} ms{rate}"
    if not slow:
        return ok(id=f"peer.{name}.link", what=f"{name}: a good link", fact=fact)
    return warning(
        id=f"peer.{name}.link",
        what=f"{name}: a slow link; it slows a single chat, less so many chats at once",
        fact=fact,
        remedy=f"use a cable {'instead of Wi-Fi' if wireless else 'at the other end, too'}, then run this again",
    )


def clock_finding(name: str, *, skew_ms: float) -> Finding:
    """Compare clocks. Only the times in logs and in 'since' depend on them."""
    if abs(skew_ms) < _SKEW_MS:
        return ok(id=f"peer.{name}.clock", what=f"{name}: the clocks agree")
    return warning(
        id=f"peer.{name}.clock",
        what=f"{name}: its clock differs from this machine's",
        fact=f"by {format_duration_s(abs(skew_ms) / 1e3)}; the cluster works, but times in logs mislead",
        remedy="switch on automatic time on both    (Linux: sudo timedatectl set-ntp true)",
    )


def disk_finding(path: str, *, free_bytes: int) -> Finding:
    """Check the disk space for models."""
    fact = f"{format_bytes(free_bytes)} free at {path}"
    if free_bytes >= _LITTLE_DISK_BYTES:
        return ok(id="machine.disk", what="enough disk space for models", fact=fact)
    return warning(
        id="machine.disk",
        what="little disk space for models",
        fact=fact,
        remedy="edgepipe models rm MODEL, or another disk: models_dir in the settings file",
    )


def descriptor_finding(*, soft: int) -> Finding | None:
    """Check the limit of open files: many streams need many descriptors."""
    if soft > _FEW_DESCRIPTORS:
        return None
    return note(
        id="machine.descriptors",
        what="the limit of open files is low; the node raises its own limit as far as it may",
        fact=f"{soft}",
        remedy="ulimit -n 65536    (or run the node as a service: edgepipe service install)",
    )


def rights_finding(path: str, *, mode: int) -> Finding:
    """Check that only the owner can read the keys."""
    if mode & 0o077 == 0:
        return ok(id="machine.rights", what="only their owner can read the keys", fact=path)
    return problem(
        id="machine.rights",
        what="others on this machine can read this node's key",
        fact=f"{path} has mode {mode & 0o777:04o}",
        remedy=f"chmod go-rwx {path}",
    )


def _same_subnet(address: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(subnet_of(other))
    except ValueError:
        return True  # a host name: unknown


def worst(findings: Sequence[Finding]) -> Level:
    """Return the highest level of the findings."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
