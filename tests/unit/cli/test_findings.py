"""Each thing that can be in the way is told apart from the others, with its remedy."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from edgepipe.cli.doctor import examining
from edgepipe.cli.doctor.findings import (
    Finding,
    Level,
    NetworkFacts,
    Ports,
    clock_finding,
    descriptor_finding,
    disk_finding,
    handshake_finding,
    link_finding,
    mtu_finding,
    multicast_findings,
    network_findings,
    range_finding,
    reach_finding,
    rights_finding,
    worst,
)
from edgepipe.cluster.probes import MulticastProbe, Reach, TcpProbe, TlsProbe, neighbour_is_known, probe_tcp, reach_of
from edgepipe.config import load_config
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import AbsentNode, ClusterStatus, MemberState, NodeState
from edgepipe.wire.trust import ListPeersReply, PeerState
from tests.support.daemon.admin_server import FakeNode, answering

PORTS = Ports(node=7117, http=8117)
FACTS = NetworkFacts(interface="enp5s0", address="192.168.1.20", wireless=False, speed_bits_per_s=1e9, mtu_bytes=1500)


def reach(found: Reach, *, host: str = "192.168.1.31", number: int = 0, error: str = "") -> TcpProbe:
    """A connection that came to this."""
    return TcpProbe(host=host, port=7117, reach=found, took_ms=3000.0, errno=number, error=error)


@pytest.mark.parametrize(
    ("probe", "facts", "known", "words", "remedy"),
    [
        (reach(Reach.REFUSED), FACTS, True, "no node runs", "edgepipe node start"),
        (reach(Reach.TIMEOUT), FACTS, True, "a firewall on 192.168.1.31 drops", "ufw allow from 192.168.1.0/24"),
        (reach(Reach.TIMEOUT), FACTS, None, "a firewall on 192.168.1.31 drops", "7117:7133"),
        (reach(Reach.TIMEOUT), FACTS, False, "the link beyond this machine is dead", "cables"),
        (reach(Reach.NO_ROUTE, host="10.0.0.9"), FACTS, None, "another network", "192.168.1.20"),
        (reach(Reach.BLOCKED), FACTS, None, "this machine's own firewall", "TCP 7117-7133"),
        (
            reach(Reach.NO_ROUTE, number=65, error="No route to host"),
            replace(FACTS, mac=True),
            None,
            "macOS keeps this program off",
            "Local Network",
        ),
    ],
)
def test_what_is_in_the_way_of_a_peer(
    probe: TcpProbe, facts: NetworkFacts, known: bool | None, words: str, remedy: str
) -> None:
    finding = reach_finding(probe, "studio", facts, PORTS, neighbour_known=known)
    assert finding.level is Level.PROBLEM
    assert words in finding.what
    assert remedy in finding.remedy


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
async def test_a_name_that_nobody_knows_is_told(host: str) -> None:
    probe = await probe_tcp(host, 7117, timeout_s=10)
    finding = reach_finding(probe, host, FACTS, PORTS, neighbour_known=None)
    assert finding.level is Level.PROBLEM
    assert "this machine finds no address for that name" in finding.what


def test_an_open_port_is_no_problem() -> None:
    finding = reach_finding(reach(Reach.OPEN), "studio", FACTS, PORTS, neighbour_known=None)
    assert (finding.level, finding.remedy) == (Level.OK, "")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ECONNREFUSED, Reach.REFUSED),
        (errno.EPERM, Reach.BLOCKED),
        (errno.ETIMEDOUT, Reach.TIMEOUT),
        (errno.EHOSTUNREACH, Reach.NO_ROUTE),
        (errno.ENETUNREACH, Reach.NO_ROUTE),
    ],
)
def test_errors_of_connect(number: int, expected: Reach) -> None:
    assert reach_of(number) is expected


@pytest.mark.parametrize(
    ("probe", "facts", "peers", "level", "words"),
    [
        (MulticastProbe(address="a", sent=True, others=("192.168.1.9",)), FACTS, 0, Level.OK, "1 other machine"),
        (MulticastProbe(address="a", sent=True), FACTS, 0, Level.WARNING, "client isolation"),
        (MulticastProbe(address="a", sent=True), FACTS, 2, Level.NOTE, "2 peers"),
        (MulticastProbe(address="a", sent=False, error="Network is unreachable"), FACTS, 0, Level.PROBLEM, "--peer"),
        (
            MulticastProbe(address="a", sent=False, error="No route to host", errno=65),
            replace(FACTS, mac=True),
            0,
            Level.PROBLEM,
            "Local Network",
        ),
    ],
)
def test_multicast(probe: MulticastProbe, facts: NetworkFacts, peers: int, level: Level, words: str) -> None:
    finding = multicast_findings(probe, facts, known_peers=peers, family="IPv4")
    assert finding.level is level
    assert words in f"{finding.what} {finding.fact} {finding.remedy}"


def test_ipv6_is_never_needed() -> None:
    probe = MulticastProbe(address="a", sent=False, error="no")
    assert multicast_findings(probe, FACTS, known_peers=0, family="IPv6").level is Level.NOTE


def ids(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


def test_the_machine_s_own_network() -> None:
    fine = ids(network_findings(FACTS, PORTS))
    assert "enp5s0 192.168.1.20, wired 1.0 Gbit/s" in fine["network.interface"].what
    assert list(fine) == ["network.interface"]
    none = ids(network_findings(replace(FACTS, address="", interface="", ignored=("docker0",)), PORTS))
    assert none["network.interface"].level is Level.PROBLEM
    assert "docker0" in none["network.interface"].fact
    bad = ids(network_findings(replace(FACTS, wsl=True, mtu_bytes=576, firewall="ufw", wireless=True), PORTS))
    assert "networkingMode=mirrored" in bad["network.wsl"].remedy
    assert "mtu 1500" in bad["network.mtu"].remedy
    assert "7117:7133 proto tcp" in bad["network.firewall"].remedy
    assert "Wi-Fi" in bad["network.interface"].what
    fire = ids(network_findings(replace(FACTS, firewall="firewalld"), PORTS))
    assert "firewall-cmd" in fire["network.firewall"].remedy


def test_the_whole_port_range_must_pass() -> None:
    probes = [replace(reach(Reach.REFUSED), port=7117 + index) for index in range(17)]
    assert range_finding(probes, "studio", PORTS).level is Level.OK
    probes[3] = replace(probes[3], reach=Reach.TIMEOUT)
    finding = range_finding(probes, "studio", PORTS)
    assert finding.level is Level.PROBLEM
    assert finding.fact == "no answer at 7120"


def test_whose_key_an_address_shows() -> None:
    def finding_of(probe: TlsProbe, seen: str, expected: str = "") -> tuple[Level, str]:
        finding = handshake_finding(probe, "studio", FACTS, where="10.0.0.9:7117", seen=seen, expected=expected)
        return finding.level, f"{finding.what} {finding.fact} {finding.remedy}"

    assert finding_of(TlsProbe(certificate_pem=b"x"), "mine", "mine") == (Level.OK, "studio: its key is mine  ")
    assert finding_of(TlsProbe(certificate_pem=b"x"), "mine")[0] is Level.OK
    for probe, seen, words in (
        (TlsProbe(silent=True), "", "sudo ip link set enp5s0 mtu 1280"),
        (TlsProbe(error="wrong version number"), "", "no edgepipe node wrong version number"),
        (TlsProbe(certificate_pem=b"x"), "", "not an edgepipe certificate"),
        (TlsProbe(certificate_pem=b"x"), "theirs", "expected the key mine, seen theirs"),
    ):
        level, text = finding_of(probe, seen, "mine")
        assert level is Level.PROBLEM
        assert words in text


async def test_a_member_that_is_named_is_looked_at_once_where_its_node_is(tmp_path: Path) -> None:
    own = MemberState(node=NodeState(node_id=NodeId("a")), self=True)
    studio = MemberState(node=NodeState(name="studio", node_id=NodeId("b"), address="127.0.0.1:9"))

    status = ClusterStatus(node_id=own.node.node_id, members=(own, studio))
    asked: list[str] = []

    async def look(peer: examining.ExaminedMachine, *_: object) -> list[Finding]:
        asked.append(f"{peer.name} at {peer.host}")
        return []

    config = load_config({"data_dir": tmp_path}, environ={}).values
    with answering(tmp_path, FakeNode(status=status)):
        await examining.examine(
            config,
            ["studio", "10.0.0.7"],
            say=lambda finding: None,
            facts=replace(FACTS, address=""),
            examine_peer=look,
        )
    assert asked == ["10.0.0.7 at 10.0.0.7", "studio at 127.0.0.1"]


async def test_a_member_that_is_gone_is_looked_at_where_it_was(tmp_path: Path) -> None:
    """And other networks of this machine are named where no member answers."""
    own = MemberState(node=NodeState(node_id=NodeId("a"), address="10.77.0.1:7117"), self=True)
    gone = tuple(AbsentNode(node_id=NodeId(name), state=state) for name, state in (("b", "dead"), ("c", "left")))
    status = ClusterStatus(node_id=NodeId("a"), members=(own,), absent=gone)
    peers = (
        PeerState(node_id=NodeId("b"), name="studio", state="dead", address="10.77.0.2:7117"),
        PeerState(node_id=NodeId("c"), name="attic", state="left", address="10.77.0.3:7117"),
    )
    asked: list[str] = []

    async def look(peer: examining.ExaminedMachine, *_: object) -> list[Finding]:
        asked.append(f"{peer.name} at {peer.host}")
        return []

    config = load_config({"data_dir": tmp_path}, environ={}).values
    facts = replace(FACTS, address="", live=("lan0 10.77.0.1", "eth1 10.91.0.1"))
    node = FakeNode(status=status, peers=ListPeersReply(node_id=NodeId("a"), peers=peers))
    with answering(tmp_path, node):
        found = ids(await examining.examine(config, [], say=lambda finding: None, facts=facts, examine_peer=look))
    assert asked == ["studio at 10.77.0.2"]
    assert found["node.alone"].what == "no other machine answers on the node's network (10.77.0.1)"
    assert found["node.alone"].fact.endswith("also has eth1 10.91.0.1")
    assert found["node.alone"].remedy.endswith("edgepipe node start --interface eth1")


def test_smaller_packets_on_the_way() -> None:
    assert mtu_finding(replace(reach(Reach.OPEN), path_mtu_bytes=1500), "studio", FACTS) is None
    finding = mtu_finding(replace(reach(Reach.OPEN), path_mtu_bytes=1400), "studio", FACTS)
    assert finding is not None
    assert "1400 bytes instead of 1500" in finding.fact


def test_links_clocks_disks_rights_descriptors() -> None:
    assert link_finding("s", rtt_ms=0.4, bytes_per_s=117e6, wireless=False).level is Level.OK
    wifi = link_finding("s", rtt_ms=7.8, bytes_per_s=18e6, wireless=True)
    assert (wifi.level, wifi.fact) == (Level.WARNING, "round trip 7.8 ms, 144 Mbit/s")
    assert "instead of Wi-Fi" in wifi.remedy
    assert clock_finding("s", skew_ms=900).level is Level.OK
    assert "by 1 d 0 h" in clock_finding("s", skew_ms=-86_400_000).fact
    assert disk_finding("/x", free_bytes=int(5e9)).level is Level.WARNING
    assert rights_finding("/k", mode=0o100644).remedy == "chmod go-rwx /k"
    assert rights_finding("/k", mode=0o100600).level is Level.OK
    assert descriptor_finding(soft=256) is not None
    assert descriptor_finding(soft=65536) is None


def test_the_worst_level_counts() -> None:
    levels = [Finding(id="a", level=level, what="") for level in (Level.OK, Level.WARNING, Level.NOTE)]
    assert worst(levels) is Level.WARNING
    assert worst([]) is Level.OK


def test_the_neighbour_table(tmp_path: Path) -> None:
    table = tmp_path / "arp"
    table.write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "192.168.1.31     0x1         0x2         aa:bb:cc:dd:ee:ff     *        enp5s0\n"
        "192.168.1.32     0x1         0x0         00:00:00:00:00:00     *        enp5s0\n"
    )
    assert neighbour_is_known("192.168.1.31", table=table) is True
    assert neighbour_is_known("192.168.1.32", table=table) is False
    assert neighbour_is_known("192.168.1.33", table=table) is None
    assert neighbour_is_known("192.168.1.31", table=tmp_path / "none") is None
