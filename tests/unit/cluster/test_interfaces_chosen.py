"""Which address a node takes on machines with several networks, as a table: bridges go by members and routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cluster.interface_facts import BridgeMember, InterfaceFacts, parse_ifconfig, read_sysfs
from edgepipe.cluster.interfaces import Interface, choose_address, lan_interfaces

IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.1.31 netmask 0xffffff00 broadcast 192.168.1.255
\tmedia: autoselect (<unknown type>)
\tstatus: inactive
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 10 priority 0 path cost 0
\tmember: en3 flags=3<LEARNING,DISCOVER>
\tstatus: active
bridge100: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500
\tmember: vmenet0 flags=3<LEARNING,DISCOVER>
\tstatus: active
"""


def ports(*names: str) -> tuple[BridgeMember, ...]:
    """Members of a bridge; those of containers and virtual machines by their usual names."""
    return tuple(BridgeMember(name=name, virtual=name.startswith(("veth", "tap", "vnet", "vmenet"))) for name in names)


def interface(
    name: str, address: str, prefix: int = 24, *, members: tuple[BridgeMember, ...] | None = None, carrier: bool = True
) -> Interface:
    return Interface(name=name, address=address, prefix=prefix, members=members, carrier=carrier)


LO = interface("lo", "127.0.0.1", 8)
ETH = interface("eth0", "192.168.1.9")
CASES: dict[str, tuple[list[Interface], str, str]] = {
    "Mac: Wi-Fi and Thunderbolt": (
        [interface("en0", "192.168.1.31"), interface("bridge0", "10.25.0.1", members=ports("en2", "en3"))],
        "192.168.1.31",
        "192.168.1.31",
    ),
    "Mac: Thunderbolt alone": ([LO, interface("bridge0", "10.25.0.1", members=ports("en2", "en3"))], "", "10.25.0.1"),
    "Mac: Thunderbolt alone, self-assigned": (
        [LO, interface("bridge0", "169.254.10.1", 16, members=ports("en2"))],
        "",
        "169.254.10.1",
    ),
    "Mac: Thunderbolt unplugged, Wi-Fi": (
        [interface("bridge0", "10.25.0.1", members=ports("en2"), carrier=False), interface("en0", "192.168.1.31")],
        "",
        "192.168.1.31",
    ),
    "Mac: bridge of a virtual machine": (
        [LO, interface("bridge100", "192.168.64.1", members=ports("vmenet0"))],
        "",
        "127.0.0.1",
    ),
    "Mac: its ifconfig says nothing": ([LO, interface("bridge0", "10.25.0.1")], "", "10.25.0.1"),
    "Linux: a cable that is called bridge0": ([LO, interface("bridge0", "10.25.0.1")], "", "10.25.0.1"),
    "Linux: Thunderbolt beside Ethernet": ([interface("thunderbolt0", "169.254.205.206", 16), ETH], "", ETH.address),
    "Docker without and with containers": (
        [
            interface("docker0", "172.17.0.1", 16, members=()),
            interface("br-1a2b", "172.18.0.1", 16, members=ports("veth1")),
            ETH,
        ],
        "",
        ETH.address,
    ),
    "Docker alone": ([LO, interface("docker0", "172.17.0.1", 16, members=ports("veth1"))], "", "127.0.0.1"),
    "libvirt, LXD, podman, cni": (
        [
            LO,
            interface("virbr0", "192.168.122.1", members=ports("vnet0")),
            interface("lxdbr0", "10.8.0.1", members=ports("tap0", "veth1")),
            interface("podman0", "10.88.0.1", 16, members=()),
            interface("cni0", "10.244.0.1", members=ports("veth2")),
        ],
        "",
        "127.0.0.1",
    ),
    "VirtualBox and VMware": (
        [LO, interface("vboxnet0", "192.168.56.1"), interface("vmnet8", "192.168.23.1")],
        "",
        "127.0.0.1",
    ),
    "a virtual machine's host on its own bridge": (
        [LO, interface("br0", "192.168.1.9", members=ports("enp3s0", "vnet0"))],
        "",
        "192.168.1.9",
    ),
    "a home's bridge with a name like Docker's": (
        [LO, interface("br-lan", "192.168.1.9", members=ports("lan1", "lan2"))],
        "",
        "192.168.1.9",
    ),
    "a bridge of containers that carries the default route": (
        [LO, interface("br0", "192.168.1.9", members=ports("veth1"))],
        "192.168.1.9",
        "192.168.1.9",
    ),
    "a VPN with the default route": ([interface("tun0", "10.8.0.6"), ETH], "10.8.0.6", ETH.address),
    "Tailscale alone": ([LO, interface("tailscale0", "100.64.0.5", 32)], "", "127.0.0.1"),
    "USB tethering beside a self-assigned address": (
        [interface("enx02", "169.254.3.3", 16), interface("wlan0", "192.168.43.7")],
        "",
        "192.168.43.7",
    ),
    "a dead cable that has the route": (
        [interface("eth0", "192.168.1.9", carrier=False), interface("eth1", "10.91.0.1")],
        "192.168.1.9",
        "10.91.0.1",
    ),
    "a dead cable and nothing else": ([LO, interface("eth0", "192.168.1.9", carrier=False)], "", "192.168.1.9"),
    "IPv6 beside IPv4": ([interface("eth0", "fd00:77::11", 64), ETH], "", ETH.address),
    "IPv6 alone: the home's own network first": (
        [LO, interface("eth0", "2001:db8::5", 64), interface("eth0", "fd00:77::11", 64)],
        "",
        "fd00:77::11",
    ),
    "IPv6 of a VPN": ([LO, interface("wg0", "fd10::2", 64), interface("eth0", "fd11::2", 128)], "", "127.0.0.1"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_address_that_leads_to_other_machines_is_taken(case: str) -> None:
    available, routed, wanted = CASES[case]
    assert choose_address(interface="", available=available, routed=routed) == wanted


def test_a_named_interface_gives_its_ipv4_address_if_it_has_one() -> None:
    available = [interface("eth0", "fd00:77::11", 64), ETH]
    assert choose_address(interface="eth0", available=available, routed="") == ETH.address


def test_the_live_link_comes_first_and_the_dead_one_stays_listed() -> None:
    dead, live = interface("eth0", "192.168.1.9", carrier=False), interface("eth1", "10.91.0.1")
    assert lan_interfaces([dead, live]) == [live, dead]


def test_what_macos_says_of_its_bridges_and_cables() -> None:
    facts = parse_ifconfig(IFCONFIG)
    assert facts["bridge0"] == InterfaceFacts(members=ports("en2", "en3"))
    assert facts["bridge100"] == InterfaceFacts(members=ports("vmenet0"))
    assert facts["en0"] == InterfaceFacts(carrier=False)
    assert facts["lo0"] == InterfaceFacts()


def test_what_linux_says_of_its_bridges_and_cables(tmp_path: Path) -> None:
    def put(name: str, **files: str) -> None:
        for file, text in {"carrier": "1", "ifindex": "3", "iflink": "3", "uevent": "", **files}.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(f"{text}\n")

    put("enp3s0", device="")
    put("veth1", iflink="9")
    put("vnet0", tun_flags="0x1002")
    put("eth0.20", iflink="9", uevent="DEVTYPE=vlan")
    put("bond0", uevent="DEVTYPE=bond", carrier="0")
    put("br0")
    for port in ("enp3s0", "veth1", "vnet0", "eth0.20", "bond0"):
        (tmp_path / "br0" / "brif" / port).mkdir(parents=True)
    (tmp_path / "br0" / "bridge").mkdir()
    members = read_sysfs(tmp_path / "br0").members
    assert members is not None
    assert {member.name for member in members if member.virtual} == {"veth1", "vnet0"}
    assert {member.name for member in members if not member.virtual} == {"enp3s0", "eth0.20", "bond0"}
    assert not read_sysfs(tmp_path / "bond0").carrier
    assert read_sysfs(tmp_path / "enp3s0") == InterfaceFacts()
    assert read_sysfs(tmp_path / "of-another-system") == InterfaceFacts()
