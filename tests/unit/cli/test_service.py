"""The service: its files to the letter, its commands against a stand-in for systemctl."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgepipe.cli.service_plan import Machine, Manager, make_plan
from tests.support.command_line import Run

MACHINE = Machine(
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


def test_the_plist_to_the_letter() -> None:
    plan = make_plan(Manager.LAUNCHD, MACHINE)
    assert plistlib.loads(plan.text.encode()) == PLIST
    assert plan.path == Path("/Library/LaunchDaemons/org.edgepipe.node.plist")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("manager", [Manager.SYSTEMD_USER, Manager.SYSTEMD_SYSTEM])
def test_systemd_finds_nothing_wrong(manager: Manager, tmp_path: Path) -> None:
    machine = Machine(user="root", home=tmp_path, python=Path(sys.executable), data_dir=tmp_path / "da ta 100%")
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


def test_uninstall_lists_and_removes_all_but_models(run: Run, systemd: Path) -> None:
    data, models = systemd / "data", systemd / "data" / "models"
    models.mkdir(parents=True)
    (models / "org--a").mkdir()
    (models / "org--a" / "weights").write_bytes(bytes(3000))
    repacked = models / "org--a" / "repacked"
    repacked.mkdir()
    (repacked / "x.repacked").write_bytes(bytes(2000))
    (data / "identity.json").write_text("{}")
    settings = systemd / "config" / "edgepipe" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("")
    kernels = systemd / "cache" / "edgepipe" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "code.o").write_bytes(bytes(100))
    listed = run("uninstall", "--dry-run").out
    assert all(str(path) in listed for path in (data, models, settings, kernels, repacked))
    assert "2.0 KB  weights in this CPU's layout" in listed
    assert "3.0 KB  models" in listed
    assert (data / "identity.json").exists()
    assert run("uninstall").code == 2  # nobody is there to ask
    assert run("uninstall", "--yes").code == 0
    assert [path.name for path in data.iterdir()] == ["models"]
    assert not settings.exists()
    assert not kernels.exists()
    assert [path.name for path in (models / "org--a").iterdir()] == ["weights"]
    assert run("uninstall", "--yes", "--purge-models").code == 0
    assert not data.exists()
    assert "keeps nothing" in run("uninstall").out
