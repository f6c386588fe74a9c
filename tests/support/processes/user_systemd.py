"""A systemd of its own for a test: the user's manager, in namespaces that end with the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_SYSTEMD = next((path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(path).exists()), "")
_RUNTIME = "/run/user/0"
_START_S = 20.0
_LOOK_S = 0.05
# The first process of the namespaces: a /run of its own, a group of control groups of its own, then the manager.
_BEGIN = f"""
set -e
echo $$ >"$GROUP/cgroup.procs"
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system {_RUNTIME}
chmod 700 {_RUNTIME}
XDG_RUNTIME_DIR={_RUNTIME} {_SYSTEMD} --user &
wait
"""


@contextmanager
def user_systemd(home: Path) -> Iterator[tuple[str, ...]]:
    """Run systemd's manager for root's services in ``home``. Yield the words before a command that runs beside it.

    Skips the test where namespaces or systemd are missing.
    """
    group = _control_group()
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", _BEGIN],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "GROUP": str(group)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield _beside(process)
    finally:
        for first in psutil.Process(process.pid).children():
            first.send_signal(signal.SIGKILL)  # all others in the namespaces end with it
        process.wait(_START_S)
        _remove(group)


def _control_group() -> Path:
    """Make a group of control groups, or skip."""
    for tool in ("unshare", "nsenter", "systemctl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not _SYSTEMD or os.getuid() != 0:
        pytest.skip("a systemd for a test needs root, and systemd's files")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    tops = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    for top in tops:
        group = top / f"edgepipe-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        return group
    pytest.skip("no control group can be made here")


def _beside(process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Wait until the manager answers."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for first in psutil.Process(process.pid).children():
            enter = ("nsenter", "--target", str(first.pid), "--mount", "--pid")
            ask = [*enter, "env", f"XDG_RUNTIME_DIR={_RUNTIME}", "systemctl", "--user", "is-system-running"]
            said = subprocess.run(ask, capture_output=True, text=True, timeout=_START_S, check=False).stdout
            if said.strip() in ("running", "degraded"):
                return (*enter, "env", f"XDG_RUNTIME_DIR={_RUNTIME}")
        time.sleep(_LOOK_S)
    pytest.skip("systemd does not start in namespaces here")


def _remove(group: Path) -> None:
    """Remove the group and those that the manager made in it; the last processes leave them soon."""
    deadline_s = time.monotonic() + _START_S
    while group.exists() and time.monotonic() < deadline_s:
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            _try_to_remove(folder)
        _try_to_remove(group)
        time.sleep(_LOOK_S)


def _try_to_remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # a process is still in it
