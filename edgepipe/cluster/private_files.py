"""Files that belong to this user alone: created private, checked before use, replaced atomically."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgepipe.errors import ConfigInvalid
from edgepipe.files.durable import sync_names
from edgepipe.plain_words import plain

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


def make_private_folder(path: Path) -> None:
    """Create a folder (0700) if missing. Raises ConfigInvalid if it cannot be made or belongs to another user."""
    try:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        info = path.lstat()
        if info.st_uid != os.getuid():
            raise ConfigInvalid(f"{path} belongs to another user", next_step="choose a folder with --data-dir")
        path.chmod(_FOLDER_MODE)
    except OSError as exc:
        reason = plain(exc)
        raise ConfigInvalid(f"{path} cannot be used", fact=reason, next_step="choose a folder with --data-dir") from exc


@contextmanager
def writable(path: Path) -> Generator[None]:
    """Translate disk errors at a node's start into ConfigInvalid."""
    try:
        yield
    except OSError as exc:
        reason = plain(exc)
        raise ConfigInvalid(
            f"{path} cannot be written", fact=reason, next_step="make room, or choose a folder with --data-dir"
        ) from exc


def write_private(path: Path, data: bytes) -> None:
    """Write ``path`` (0600) so that a crash leaves the old content or the new, nothing between. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with suppress(FileNotFoundError):
        part.unlink()  # left by a crash, or a link that another user put there
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    with os.fdopen(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
    sync_names(path.parent)


def read_private(path: Path, *, most_bytes: int) -> bytes:
    """Read a file that only this user may touch. Raises ConfigInvalid, with the command for the repair, if others may
    touch it, if it is a link or too long; FileNotFoundError if it is missing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ENOENT:
            raise
        reason = "it is a symbolic link" if exc.errno == errno.ELOOP else plain(exc)
        raise ConfigInvalid(f"{path} cannot be used", fact=reason, next_step="put the file itself there") from exc
    try:
        _check(path, os.fstat(file))
    except ConfigInvalid:
        os.close(file)
        raise
    with os.fdopen(file, "rb") as source:
        data = source.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ConfigInvalid(f"{path} is too long", fact=f"at most {most_bytes} bytes are read", next_step="restore it")
    return data


def _check(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ConfigInvalid(f"{path} is no plain file", next_step="put the file itself there")
    if info.st_uid != os.getuid():
        raise ConfigInvalid(
            f"{path} belongs to another user",
            fact=f"its owner is user {info.st_uid}, this is user {os.getuid()}",
            next_step=f"sudo chown {os.getuid()} '{path}'",
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigInvalid(
            f"others may read or change {path}",
            fact=f"its mode is {stat.S_IMODE(info.st_mode):04o}",
            next_step=f"chmod 600 '{path}'",
        )
