"""A node's data directory: a lock against a second daemon, a count of starts, and the daemon's socket."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from edgepipe.clock import Clock
from edgepipe.cluster.private_files import make_private_folder, writable, write_private
from edgepipe.config import name_file
from edgepipe.errors import ConfigInvalid

_SOCKET_PATH_BYTES = 100  # the kernel takes 107 on Linux and 103 on macOS


def socket_path(data_dir: Path) -> Path:
    """Return the daemon's socket for the command line: in ``data_dir``, or in /tmp if that path is too long."""
    inside = data_dir / "daemon.sock"
    if len(os.fsencode(inside)) <= _SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(f"/tmp/edgepipe-{os.getuid()}") / f"{digest}.sock"


def log_path(data_dir: Path) -> Path:
    """Return the daemon's log file; it also has the children's lines."""
    return data_dir / "node.log"


def tier_dir(data_dir: Path) -> Path:
    """Return the folder in which stages open files of KV that leaves host memory. The files have no names."""
    return data_dir / "kv"


def keep_name(data_dir: Path, name: str) -> None:
    """Keep a name that a command gave this node for later ones. Raises ConfigInvalid if it cannot be written."""
    make_private_folder(data_dir)
    with writable(data_dir):
        write_private(name_file(data_dir), f"{name}\n".encode("ascii"))


def forget_name(data_dir: Path) -> None:
    """Let the node be called by its setting again, or as its host."""
    name_file(data_dir).unlink(missing_ok=True)


class DataDir:
    """The opened and locked directory. ``close`` unlocks it and removes files that only a running node needs."""

    def __init__(self, path: Path) -> None:
        """Create (0700) and lock. Raises ConfigInvalid if another daemon has the lock or the folder is not writable."""
        self.path = path
        make_private_folder(path)
        with writable(path):
            self._lock = self._acquire()
        self.socket = socket_path(path)
        make_private_folder(self.socket.parent)
        self.socket.unlink(missing_ok=True)  # left by a daemon that was killed
        shutil.rmtree(tier_dir(path), ignore_errors=True)  # files of stages that were killed while they opened them

    def _acquire(self) -> int:
        file = os.open(self.path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            raise ConfigInvalid(
                f"another edgepipe node uses the data directory {self.path}",
                fact=f"its process id is {owner or 'unknown'}",
                next_step="stop it with 'edgepipe node stop', or give this one its own with --data-dir",
            ) from exc
        if not _same_file(file, self.path / "daemon.lock"):  # its last owner removed it between our open and lock
            os.close(file)
            return self._acquire()
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        return file

    def next_incarnation(self, clock: Clock) -> int:
        """Return a number greater than at every start before: other nodes then take this node's state for newer.

        Raises ConfigInvalid if the number cannot be written.
        """
        try:
            last = int((self.path / "incarnation").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):  # missing, or damaged
            last = 0
        # From the clock, so that two copies of a directory differ; never lower than before, should the clock go back.
        incarnation = max(last + 1, int(clock.wall_s() * 1000))
        with writable(self.path):
            write_private(self.path / "incarnation", f"{incarnation}\n".encode())
        return incarnation

    def close(self) -> None:
        """Remove the socket, unlock. May be called twice."""
        if self._lock < 0:
            return
        self.socket.unlink(missing_ok=True)
        (self.path / "daemon.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def home_name(data_dir: Path) -> str:
    """Return the name of the cluster that a stopped node shares with other machines; empty without one.

    Loads the modules for certificates only if the folder has a trust store.
    """
    if not (data_dir / "trust").exists():
        return ""
    from edgepipe.cluster.founding import home_of

    try:
        home = home_of(data_dir)
    except ConfigInvalid:
        return ""  # 'node start' reports what is wrong with its files
    return home.cluster_name if home is not None else ""
