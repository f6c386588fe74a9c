"""The service on each system: one file, and the commands that start and stop it. Pure: writes and runs nothing."""

from __future__ import annotations

import plistlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.parsers.expat import ExpatError

NAME = "edgepipe"
LABEL = "org.edgepipe.node"

_UNIT_HEAD = """\
[Unit]
Description=edgepipe node: one language model over the machines of this network
{after}StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
Type=exec
{user}ExecStart={command}
Restart=on-failure
RestartSec=2
# The node ends its children itself, in order; systemd then kills the remaining processes.
KillMode=mixed
TimeoutStopSec=45
# If a stage takes too much memory, the system kills that stage only; the node plans again without it.
OOMPolicy=continue
LimitNOFILE=65536
NoNewPrivileges=yes
"""
_HARDENED = """\
ProtectSystem=full
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
LockPersonality=yes
"""
_UNIT_TAIL = """\

[Install]
WantedBy={wanted_by}
"""


class Manager(Enum):
    """Service manager that starts the node."""

    SYSTEMD_USER = "systemd, for this user"
    SYSTEMD_SYSTEM = "systemd, for the machine"
    LAUNCHD = "launchd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """Facts of this machine that the plan depends on."""

    user: str
    home: Path
    python: Path
    data_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSetup:
    """The service of one machine."""

    manager: Manager
    path: Path  # the service's file
    text: str
    needs_root: bool
    install: tuple[tuple[str, ...], ...]  # commands after the file is written
    uninstall: tuple[tuple[str, ...], ...]  # commands before the file is removed
    forget: tuple[tuple[str, ...], ...]  # commands after the file is removed
    restart: tuple[tuple[str, ...], ...]  # commands that stop the node in order and start it again
    status: tuple[str, ...]
    logs: tuple[str, ...]  # the command; the number of lines comes after it


def make_plan(manager: Manager, machine: ServiceFacts) -> ServiceSetup:
    """Make the service of ``machine``.

    On a Mac, use a LaunchDaemon that runs as the user: Local Network privacy cuts a LaunchAgent off from the LAN.
    """
    if manager is Manager.LAUNCHD:
        return _launchd(machine)
    return _systemd(machine, system=manager is Manager.SYSTEMD_SYSTEM)


def starts_node_of(data_dir: Path, manager: Manager, text: str) -> bool:
    """Return whether a service's file, as it is on disk, starts the node of ``data_dir``. A damaged one does not."""
    if manager is not Manager.LAUNCHD:
        return any(line.endswith(f" --data-dir {_quoted(str(data_dir))}") for line in text.splitlines())
    try:
        return plistlib.loads(text.encode())["ProgramArguments"][-1] == str(data_dir)
    except (plistlib.InvalidFileException, ExpatError, KeyError, IndexError, TypeError, ValueError):
        return False


def _arguments(machine: ServiceFacts) -> list[str]:
    return [str(machine.python), "-P", "-m", "edgepipe.cli", "node", "start", "--data-dir", str(machine.data_dir)]


def _systemd(machine: ServiceFacts, *, system: bool) -> ServiceSetup:
    unit = f"{NAME}.service"
    control = ("systemctl",) if system else ("systemctl", "--user")
    folder = Path("/etc/systemd/system") if system else machine.home / ".config" / "systemd" / "user"
    text = _UNIT_HEAD.format(
        after="Wants=network-online.target\nAfter=network-online.target\n" if system else "",
        user=f"User={machine.user}\n" if system else "",
        command=" ".join(_quoted(word) for word in _arguments(machine)),
    )
    text += _HARDENED if system else ""
    text += _UNIT_TAIL.format(wanted_by="multi-user.target" if system else "default.target")
    linger = () if system else (("loginctl", "enable-linger", machine.user),)  # keeps the node running after logout
    journal = ("journalctl",) if system else ("journalctl", "--user")
    return ServiceSetup(
        manager=Manager.SYSTEMD_SYSTEM if system else Manager.SYSTEMD_USER,
        path=folder / unit,
        text=text,
        needs_root=system,
        install=(*linger, (*control, "daemon-reload"), (*control, "enable", "--now", unit)),
        uninstall=((*control, "disable", "--now", unit),),
        forget=((*control, "daemon-reload"),),
        restart=((*control, "restart", unit),),
        status=(*control, "show", unit, "--property=ActiveState,SubState,MainPID,UnitFileState"),
        logs=(*journal, "--unit", unit, "--no-pager", "--lines"),
    )


def _launchd(machine: ServiceFacts) -> ServiceSetup:
    path = Path("/Library/LaunchDaemons") / f"{LABEL}.plist"
    facts = {
        "Label": LABEL,
        "UserName": machine.user,
        "ProgramArguments": _arguments(machine),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 5,
        "ExitTimeOut": 45,
        "ProcessType": "Interactive",  # otherwise macOS slows it down
        "SoftResourceLimits": {"NumberOfFiles": 65536},
        "EnvironmentVariables": {"HOME": str(machine.home)},
        "StandardOutPath": "/dev/null",  # the node keeps and rotates its own log
        "StandardErrorPath": str(machine.data_dir / "service.err"),
    }
    target = f"system/{LABEL}"
    return ServiceSetup(
        manager=Manager.LAUNCHD,
        path=path,
        text=plistlib.dumps(facts, sort_keys=False).decode(),
        needs_root=True,
        install=(("launchctl", "bootstrap", "system", str(path)), ("launchctl", "enable", target)),
        uninstall=(("launchctl", "bootout", target),),
        forget=(),
        restart=(("launchctl", "bootout", target), ("launchctl", "bootstrap", "system", str(path))),
        status=("launchctl", "print", target),
        logs=("tail", str(machine.data_dir / "node.log"), "-n"),
    )


def _quoted(word: str) -> str:
    """Quote a word of ExecStart: systemd.service(5), "Command lines"."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(char in word for char in " \t'\";") else escaped
