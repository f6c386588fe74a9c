"""A node's data directory: who the node is, the lock that keeps a second daemon out, the socket of its own machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgepipe.clock import Clock
from edgepipe.errors import ConfigInvalid
from edgepipe.ids import IdSource, NodeId

_SOCKET_PATH_BYTES = 100  # the kernel takes 107 on Linux and 103 on macOS
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this node is; stable per data directory."""

    node_id: NodeId
    incarnation: int  # grows with every start


def socket_path(data_dir: Path) -> Path:
    """Where the daemon of ``data_dir`` answers the command line: in it, or in /tmp when that path is too long."""
    inside = data_dir / "daemon.sock"
    if len(os.fsencode(inside)) <= _SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(f"/tmp/edgepipe-{os.getuid()}") / f"{digest}.sock"


def log_path(data_dir: Path) -> Path:
    """The daemon's log file; its children's lines are in it too."""
    return data_dir / "node.log"


class DataDir:
    """The opened and locked directory. ``close`` gives the lock back and removes what a stopped node leaves nobody."""

    def __init__(self, path: Path) -> None:
        """Create (0700) and lock. Raises ConfigInvalid if another daemon has it or it cannot be written."""
        self.path = path
        _make_private(path)
        self._lock = self._acquire()
        self.socket = socket_path(path)
        _make_private(self.socket.parent)
        self.socket.unlink(missing_ok=True)  # left by a daemon that was killed

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

    def identity(self, ids: IdSource, clock: Clock) -> Identity:
        """The node's identity with a new incarnation; made at the first start."""
        known = self._read()
        node_id = known.get("node_id")
        if not isinstance(node_id, str) or not re.fullmatch(r"node-[0-9a-f]{4,64}", node_id):
            node_id = ids.new("node")
        last = known.get("incarnation")
        # From the clock, so that two copies of one directory do not count alike; never back, should the clock go back.
        incarnation = max((last if isinstance(last, int) else 0) + 1, int(clock.wall_s() * 1000))
        return self._write(Identity(node_id=NodeId(node_id), incarnation=incarnation))

    def new_identity(self, ids: IdSource, clock: Clock) -> Identity:
        """Replace the identity: another node has it too, so this directory is a copy."""
        return self._write(Identity(node_id=NodeId(ids.new("node")), incarnation=int(clock.wall_s() * 1000)))

    def close(self) -> None:
        """Remove the socket, unlock. May be called twice."""
        if self._lock < 0:
            return
        self.socket.unlink(missing_ok=True)
        (self.path / "daemon.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads((self.path / "identity.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}  # pyright: ignore[reportUnknownVariableType]

    def _write(self, identity: Identity) -> Identity:
        text = json.dumps({"node_id": identity.node_id, "incarnation": identity.incarnation})
        write_atomically(self.path / "identity.json", text.encode())
        return identity


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``path`` (0600) so that a crash leaves the old content or the new, nothing between."""
    part = path.with_name(path.name + ".part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    part.replace(path)


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        info = path.lstat()
        if info.st_uid != os.getuid():
            raise ConfigInvalid(f"{path} belongs to another user", next_step="choose a folder with --data-dir")
        path.chmod(_PRIVATE)
    except OSError as exc:
        reason = os.strerror(exc.errno or errno.EIO)
        raise ConfigInvalid(f"{path} cannot be used", fact=reason, next_step="choose a folder with --data-dir") from exc
