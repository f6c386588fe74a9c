"""Network namespaces and TAP devices by way of ``ip``. Everything is named after the process that made it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
from pathlib import Path

_PREFIX = "edgelan"
_NAMES = Path("/run/netns")
_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_DEVICE = "lan0"  # inside the namespace
_COMMAND_TIMEOUT_S = 20.0


def missing_parts() -> str | None:
    """Why no namespace with a TAP can be made here; None if one can (tried with a namespace that is removed again)."""
    if os.uname().sysname != "Linux":
        return "the LAN lab needs Linux"
    if os.geteuid() != 0:
        return "the LAN lab needs root"
    if shutil.which("ip") is None:
        return "the LAN lab needs the command ip (package iproute2)"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"the LAN lab needs {_TUN}"
    trial = namespace_name("trial")
    try:
        os.close(make_namespace(trial, "10.77.255.254/16", mtu=1500, device=device_name(999)))
    except (OSError, RuntimeError) as exc:
        return f"the LAN lab cannot make a network namespace: {exc}"
    finally:
        remove_namespace(trial)
    return None


def namespace_name(host: str) -> str:
    """``edgelan-<pid>-<start of the process>-<host>``: tells whether its maker still runs, also after pids wrapped."""
    return f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{host}"


def device_name(index: int) -> str:
    """A name for a TAP until it is in its namespace; at most 15 characters."""
    return f"ep{os.getpid() % 10**7}x{index}"


def make_namespace(name: str, address: str, *, mtu: int, device: str) -> int:
    """A namespace with loopback and one TAP that carries ``address`` and the default route.

    Returns the TAP's non-blocking descriptor; the device lives as long as that. Raises OSError or RuntimeError, and the
    namespace may then exist.
    """
    _ip(["netns", "add", name])
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
        _ip(["link", "set", device, "netns", name, "name", _DEVICE])
        commands = [
            "link set lo up",
            f"link set {_DEVICE} mtu {mtu} txqueuelen 1000 up",
            f"addr add {address} dev {_DEVICE}",
            f"route add default dev {_DEVICE}",  # multicast needs a route
        ]
        _ip(["-n", name, "-batch", "-"], stdin="\n".join(commands))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def kill_processes(name: str) -> None:
    """Kill what runs in the namespace, children of children too."""
    if not (_NAMES / name).exists():
        return
    for line in _ip(["netns", "pids", name]).split():
        if int(line) != os.getpid():  # one of our own threads may be in there
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)


def remove_namespace(name: str) -> None:
    """Kill what runs in the namespace, then remove it. Does nothing if it is not there."""
    kill_processes(name)
    if (_NAMES / name).exists():
        _ip(["netns", "delete", name])


def remove_stale() -> list[str]:
    """Remove the namespaces whose makers have died; their names."""
    found = [path.name for path in _NAMES.glob(f"{_PREFIX}-*")] if _NAMES.exists() else []
    stale = [name for name in found if not _maker_lives(name)]
    for name in stale:
        remove_namespace(name)
    return stale


def enter_namespace(name: str) -> None:
    """Move the calling thread, and only it, into the namespace. Raises OSError."""
    descriptor = os.open(_NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns into {name}")
    finally:
        os.close(descriptor)


def command_in(name: str, command: list[str]) -> list[str]:
    """The command line that runs ``command`` in the namespace; ``ip`` replaces itself, so the process id is its own."""
    return ["ip", "netns", "exec", name, *command]


def _maker_lives(name: str) -> bool:
    parts = name.split("-")
    return len(parts) >= 4 and parts[1].isdigit() and _started(int(parts[1])) == parts[2]


def _started(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _ip(arguments: list[str], *, stdin: str = "") -> str:
    done = subprocess.run(
        ["ip", *arguments], input=stdin, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
