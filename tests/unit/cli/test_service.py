"""The service: its files to the letter, its commands against a stand-in for systemctl."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgepipe.cli import service
from edgepipe.cli.service_plan import Manager, ServiceFacts, make_plan, starts_node_of
from edgepipe.errors import ClusterError
from tests.support.daemon.node_files import make_node
from tests.support.processes.command_line import Run

MACHINE = ServiceFacts(
    user="ada",
    home=Path("/home/ada"),
    python=Path("/opt/edge pipe/bin/python"),
    data_dir=Path("/home/ada/.local/share/edgepipe"),
)
USER_UNIT = """\
[Unit]
Description=edgepipe node: one language model over the machines of this network
StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
Type=exec
ExecStart="/opt/edge pipe/bin/python" -P -m edgepipe.cli node start --data-dir /home/ada/.local/share/edgepipe
Restart=on-failure
RestartSec=2
# The node ends its children itself, in order; systemd then kills the remaining processes.
KillMode=mixed
TimeoutStopSec=45
# If a stage takes too much memory, the system kills that stage only; the node plans again without it.
OOMPolicy=continue
LimitNOFILE=65536
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
SYSTEM_UNIT = """\
[Unit]
Description=edgepipe node: one language model over the machines of this network
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
Type=exec
User=ada
ExecStart="/opt/edge pipe/bin/python" -P -m edgepipe.cli node start --data-dir /home/ada/.local/share/edgepipe
Restart=on-failure
RestartSec=2
# The node ends its children itself, in order; systemd then kills the remaining processes.
KillMode=mixed
TimeoutStopSec=45
# If a stage takes too much memory, the system kills that stage only; the node plans again without it.
OOMPolicy=continue
LimitNOFILE=65536
NoNewPrivileges=yes
ProtectSystem=full
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
LockPersonality=yes

[Install]
WantedBy=multi-user.target
"""
PLIST = {
    "Label": "org.edgepipe.node",
    "UserName": "ada",
    "ProgramArguments": [
        "/opt/edge pipe/bin/python",
        "-P",
        "-m",
        "edgepipe.cli",
        "node",
        "start",
        "--data-dir",
        "/home/ada/.local/share/edgepipe",
    ],
    "RunAtLoad": True,
    "KeepAlive": {"SuccessfulExit": False},
    "ThrottleInterval": 5,
    "ExitTimeOut": 45,
    "ProcessType": "Interactive",
    "SoftResourceLimits": {"NumberOfFiles": 65536},
    "EnvironmentVariables": {"HOME": "/home/ada"},
    "StandardOutPath": "/dev/null",
    "StandardErrorPath": "/home/ada/.local/share/edgepipe/service.err",
}


@pytest.mark.parametrize(
    ("manager", "text"), [(Manager.SYSTEMD_USER, USER_UNIT), (Manager.SYSTEMD_SYSTEM, SYSTEM_UNIT)]
)
def test_units_to_the_letter(manager: Manager, text: str) -> None:
    assert make_plan(manager, MACHINE).text == text


@pytest.mark.parametrize("manager", Manager)
def test_a_service_belongs_to_the_node_that_it_starts(manager: Manager) -> None:
    home = MACHINE.data_dir.parent
    for data_dir in (MACHINE.data_dir, home / "da ta 100%"):
        text = make_plan(manager, replace(MACHINE, data_dir=data_dir)).text
        assert starts_node_of(data_dir, manager, text)
        assert not starts_node_of(home / "other", manager, text)
    assert not starts_node_of(MACHINE.data_dir, manager, "damaged")


def test_the_plist_to_the_letter() -> None:
    plan = make_plan(Manager.LAUNCHD, MACHINE)
    assert plistlib.loads(plan.text.encode()) == PLIST
    assert plan.path == Path("/Library/LaunchDaemons/org.edgepipe.node.plist")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("manager", [Manager.SYSTEMD_USER, Manager.SYSTEMD_SYSTEM])
def test_systemd_finds_nothing_wrong(manager: Manager, tmp_path: Path) -> None:
    machine = ServiceFacts(user="root", home=tmp_path, python=Path(sys.executable), data_dir=tmp_path / "da ta 100%")
    path = tmp_path / "edgepipe.service"
    path.write_text(make_plan(manager, machine).text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "edgepipe" in line]) == (0, [])


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and commands that note how they were called and answer for a running service."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemctl", "loginctl", "journalctl"):
        script = folder / name
        script.write_text(
            f"#!/bin/sh\necho {name} $* >> {tmp_path}/calls\n"
            f'case "$*" in *"$(cat {tmp_path}/failing 2>/dev/null || echo none)"*) echo no such bus >&2; exit 1;; '
            "*show*) printf 'ActiveState=active\\nSubState=running\\nMainPID=42\\n';; *--lines*) echo a line;; esac\n"
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("edgepipe.cli.service.wait_until_answers", lambda data_dir: None)  # nothing is started here
    return tmp_path


def test_it_is_installed_seen_and_removed(run: Run, systemd: Path) -> None:
    unit = systemd / "home" / ".config" / "systemd" / "user" / "edgepipe.service"
    assert run("service", "status").code == 3
    for _ in range(2):  # repeated without harm
        assert run("service", "install").code == 0
    assert f"--data-dir {systemd}/data" in unit.read_text()
    shown = run("service", "status")
    assert (shown.code, shown.out) == (0, f"active: {unit} (process 42)\n")
    assert run("service", "logs").out == "a line\n"
    assert str(unit) in run("uninstall", "--dry-run").out
    assert run("service", "uninstall").code == 0
    assert not unit.exists()
    calls = (systemd / "calls").read_text()
    assert "loginctl enable-linger" in calls
    assert calls.index("systemctl --user enable --now edgepipe.service") < calls.index("systemctl --user disable --now")
    assert "no service is installed" in run("service", "uninstall").out


def test_a_failing_systemctl_is_said_and_leaves_nothing(run: Run, systemd: Path) -> None:
    (systemd / "failing").write_text("enable --now")
    result = run("service", "install")
    assert result.code == 2
    assert "no such bus" in result.err
    assert "edgepipe node start" in result.err
    assert not list((systemd / "home").rglob("edgepipe.service"))


def test_a_service_whose_node_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_ANSWER_S", 0.0)
    monkeypatch.setattr(service, "_ask", lambda _: subprocess.CompletedProcess([], 3, "", "error: no node runs\n"))
    with pytest.raises(ClusterError, match="does not answer") as caught:
        service.wait_until_answers(tmp_path)
    assert (caught.value.fact, caught.value.next_step) == ("no node runs", "edgepipe service logs")


def test_uninstall_spares_the_service_of_another_node(run: Run, systemd: Path) -> None:
    assert run("service", "install").code == 0
    unit = systemd / "home" / ".config" / "systemd" / "user" / "edgepipe.service"
    make_node(systemd / "trial")
    shown = run("uninstall", "--yes", "--data-dir", str(systemd / "trial")).out
    assert "stays: it starts another node" in shown
    assert unit.exists()
    assert not (systemd / "trial").exists()
    make_node(systemd / "data")
    assert run("uninstall", "--yes").code == 0
    assert not unit.exists()
