"""What the operating system says of network interfaces beside their addresses: members of bridges, cables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys/class/net")
_IFCONFIG = "/sbin/ifconfig"
_IFCONFIG_S = 2.0
_MAC_VIRTUAL = ("vmenet", "vmnet", "feth", "tap", "vnic")  # interfaces that virtual machines bring to a bridge on macOS


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeMember:
    """One port of a bridge."""

    name: str
    virtual: bool  # the interface leads to a container or a virtual machine of this computer


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """Facts of one interface."""

    members: tuple[BridgeMember, ...] | None = None  # None: no bridge, as far as the system tells
    carrier: bool = True  # False: the cable is out, or no radio network is joined


def interface_facts(names: Iterable[str]) -> dict[str, InterfaceFacts]:
    """Read the facts of the named interfaces. Names that the system does not know get the defaults."""
    if sys.platform == "darwin":
        known = parse_ifconfig(_ifconfig())
        return {name: known.get(name, InterfaceFacts()) for name in names}
    return {name: read_sysfs(_SYSFS / name) for name in names}


def read_sysfs(folder: Path) -> InterfaceFacts:
    """Read an interface's folder of Linux's /sys/class/net."""
    members = None
    if (folder / "bridge").is_dir():
        ports = sorted(path.name for path in (folder / "brif").glob("*"))
        members = tuple(BridgeMember(name=name, virtual=_is_virtual(folder.parent / name)) for name in ports)
    return InterfaceFacts(members=members, carrier=_text(folder / "carrier", default="1") == "1")


def parse_ifconfig(text: str) -> dict[str, InterfaceFacts]:
    """Read what macOS's ``ifconfig -a`` prints; facts by name."""
    return {name: _parse_block(name, lines) for name, lines in _blocks(text)}


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each interface's name with its indented lines."""
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line[:1].isspace():
            lines.append(line.strip())
            continue
        if name:
            yield name, lines
        name, lines = line.partition(":")[0], []
    if name:
        yield name, lines


def _parse_block(name: str, lines: list[str]) -> InterfaceFacts:
    words = [line.split() for line in lines]
    ports = [word[1] for word in words if len(word) > 1 and word[0] == "member:"]
    members = tuple(BridgeMember(name=port, virtual=port.startswith(_MAC_VIRTUAL)) for port in ports)
    return InterfaceFacts(
        members=members if name.startswith("bridge") else None, carrier=["status:", "inactive"] not in words
    )


def _is_virtual(folder: Path) -> bool:
    """Return whether a port leads into this computer: a TUN/TAP device, or one end of a veth pair.

    A veth's other end is another interface, as a VLAN's is, but only the latter has a device type.
    """
    if (folder / "tun_flags").exists():
        return True
    if (folder / "device").exists():
        return False
    paired = _text(folder / "iflink") != _text(folder / "ifindex")
    return paired and "DEVTYPE=" not in _text(folder / "uevent")


def _text(path: Path, *, default: str = "") -> str:
    """Read a file; empty if it cannot be read, as the carrier of an interface that is switched off."""
    if not path.exists():
        return default
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _ifconfig() -> str:
    try:
        done = subprocess.run(
            [_IFCONFIG, "-a"], capture_output=True, text=True, timeout=_IFCONFIG_S, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
