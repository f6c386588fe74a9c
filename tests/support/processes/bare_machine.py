"""A machine that has nothing yet, for the ways onto it: no Python, no settings, a few tools of the system."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from os import uname
from pathlib import Path

from tests.support.processes.wheels import ROOT, later_wheel

SCRIPT = ROOT / "scripts" / "install.sh"
_TOOLS = ("sh", "cat", "dirname", "basename", "env", "find", "grep", "head", "mktemp", "rm", "uname", "unshare")
_COMMAND_S = 100


class BareMachine:
    """A home without Python: commands see a few tools of the system, uv, and a Python that uv keeps for itself."""

    def __init__(self, folder: Path, *, with_uv: bool = True, tools: Sequence[str] = ()) -> None:
        self.home = folder / "home"
        self.program = self.home / ".local/bin/edgepipe"  # as uv and pipx place it
        self._tools = folder / "tools"
        self._within: tuple[str, ...] = ()
        version = ".".join(map(str, sys.version_info[:3]))
        libc = "gnu" if sys.platform == "linux" else "none"
        python = folder / "pythons" / f"cpython-{version}-{sys.platform}-{uname().machine}-{libc}"
        for made in (self.home, self._tools, python):
            made.mkdir(parents=True)
        for part in Path(sys.base_prefix).iterdir():
            (python / part.name).symlink_to(part)
        for tool in (*_TOOLS, *(["uv"] if with_uv else []), *tools):
            self.give(tool)
        self.environment = {
            "HOME": str(self.home),
            "PATH": str(self._tools),
            "UV_PYTHON_INSTALL_DIR": str(folder / "pythons"),
        }

    def give(self, tool: str, *, program: str = "") -> None:
        """Put a tool of this system on the machine. ``program``: what runs under that name instead."""
        (self._tools / tool).symlink_to(shutil.which(program or tool) or tool)

    def replace(self, tool: str, program: Path) -> None:
        """Let a program run in place of a tool of the system."""
        (self._tools / tool).unlink(missing_ok=True)
        (self._tools / tool).symlink_to(program)

    def enter(self, *prefix: str) -> None:
        """Run all further commands behind ``prefix``, such as in the namespaces of a service manager."""
        self._within = prefix

    def install(self, *arguments: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Run the script for people."""
        return self.run(*within, "sh", str(SCRIPT), *arguments)

    def edgepipe(self, *arguments: str) -> str:
        """Run the installed edgepipe, which must succeed; its output."""
        return self.must(str(self.program), *arguments)

    def must(self, *command: str) -> str:
        """Run a command, which must succeed; its output."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command, without a terminal."""
        return subprocess.run(
            [*self._within, *command],
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            start_new_session=True,
        )


def newer_wheels(wheels: Path, folder: Path, *, version: str) -> Path:
    """Fill ``folder`` with the same wheels, edgepipe's with another version."""
    folder.mkdir()
    for wheel in wheels.glob("*.whl"):
        if wheel.name.startswith("edgepipe-"):
            later_wheel(wheel, folder, version=version)
        else:
            (folder / wheel.name).symlink_to(wheel)
    return folder
