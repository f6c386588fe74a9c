"""A folder whose files are trusted when they are read back, such as compiled code: only this user may change it.

As OpenSSH's StrictModes: the folder, each file in it, and each folder above it up to the user's home belong to this
user or to root, and no other user may write them. Files are opened by the folder's descriptor, so that nothing comes
between the check and the use.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import secrets
import shlex
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Protocol

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotOwn(Exception):
    """Another user may change a folder or a file. The text says which and why."""

    def __init__(self, path: Path, reason: str, *, remedy: str) -> None:
        """``remedy``: what to type."""
        super().__init__(f"{path} is not used: {reason}")
        self.remedy = remedy


class Rights(Protocol):
    """The part of ``os.stat_result`` that decides."""

    @property
    def st_mode(self) -> int:
        """Kind and permissions."""
        ...

    @property
    def st_uid(self) -> int:
        """Owner."""
        ...

    @property
    def st_gid(self) -> int:
        """Group."""
        ...


class OwnFolder:
    """An open folder that only this user may change."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def read(self, name: str) -> bytes:
        """Read a file. Raises NotOwn, and OSError, of it FileNotFoundError."""
        path = self._path / name
        try:
            file = os.open(name, _OPEN, dir_fd=self._descriptor)
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                raise NotOwn(path, "it is a link", remedy=f"rm {_quoted(path)}") from exc
            raise
        with os.fdopen(file, "rb") as source:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                raise NotOwn(path, "it is no plain file", remedy=f"rm -r {_quoted(path)}")
            if reason := refusal(info):
                raise NotOwn(path, reason, remedy=f"rm {_quoted(path)}")
            return source.read()

    def write(self, name: str, data: bytes) -> None:
        """Replace a file (0600) atomically. Raises OSError."""
        part = f"{name}.{secrets.token_hex(4)}.part"
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE, dir_fd=self._descriptor)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(data)
            os.replace(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=self._descriptor)
            raise


@contextmanager
def open_own_folder(path: Path) -> Generator[OwnFolder]:
    """Open a folder for its files; create it, and missing ones above it (0700). Raises NotOwn, OSError."""
    path = Path(os.path.abspath(path))
    _make(path)
    for above in _above(path):
        _check_above(above)
    try:
        descriptor = os.open(path, _OPEN | os.O_DIRECTORY)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise NotOwn(path, "it is a link", remedy=f"rm {_quoted(path)}") from exc
        raise
    try:
        if reason := refusal(os.fstat(descriptor)):
            raise NotOwn(path, reason, remedy=f"rm -r {_quoted(path)}")
        yield OwnFolder(path, descriptor)
    finally:
        os.close(descriptor)


def refusal(info: Rights, *, uid: int | None = None) -> str:
    """Say why another user than root may change a file or folder; empty if none may. ``uid``: None for this user's."""
    own = os.geteuid() if uid is None else uid
    if info.st_uid not in (own, 0):
        return f"its owner is user {info.st_uid}, this is user {own}"
    if info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _has_group_alone(info.st_gid, own)):
        return f"others may write it, its mode is {stat.S_IMODE(info.st_mode):04o}"
    return ""


def _check_above(path: Path) -> None:
    """Check a folder or link on the way. In a folder such as /tmp (sticky), others cannot replace what is not theirs.

    Raises NotOwn.
    """
    info = path.lstat()
    foreign = info.st_uid not in (os.geteuid(), 0)
    if not foreign and (stat.S_ISLNK(info.st_mode) or info.st_mode & stat.S_ISVTX):
        return
    if reason := refusal(info):
        mend = "set XDG_CACHE_HOME to a folder of your own" if foreign else f"chmod go-w {_quoted(path)}"
        raise NotOwn(path, reason, remedy=mend)


def _above(path: Path) -> list[Path]:
    """Return the folders above a path up to the home folder or the root, as they are named and where links lead."""
    home = os.path.expanduser("~")
    homes = {Path(home), Path(os.path.realpath(home))}
    found: list[Path] = []
    for way in dict.fromkeys((path.parent, Path(os.path.realpath(path.parent)))):
        for folder in (way, *way.parents):
            found.append(folder)
            if folder in homes:
                break
    return list(dict.fromkeys(found))


def _make(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another process was faster; the checks decide
            folder.mkdir(mode=_FOLDER_MODE)


@cache
def _has_group_alone(gid: int, uid: int) -> bool:
    """Return whether a group has this user alone, as where each user has a group and files are made group-writable."""
    try:
        name = pwd.getpwuid(uid).pw_name
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return False
    return members <= {name} and {user.pw_uid for user in pwd.getpwall() if user.pw_gid == gid} <= {uid}


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
