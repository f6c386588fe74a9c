"""Take a file into the store without copying its bytes, where the file system can."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
from pathlib import Path

_FICLONE = 0x40049409  # ioctl_ficlone(2)


def clone(path: Path, place: Path) -> bool:
    """Make ``place`` a file that shares its blocks with ``path`` until either is written. Return whether it was made.

    As Btrfs, XFS and APFS can.
    """
    return _clone_on_macos(path, place) if sys.platform == "darwin" else _clone_on_linux(path, place)


def hard_link(path: Path, place: Path) -> bool:
    """Make ``place`` another name of the file. Return whether it was made."""
    try:
        os.link(path, place)
    except OSError:
        return False
    return True


def _clone_on_linux(path: Path, place: Path) -> bool:
    try:
        with path.open("rb") as source, place.open("xb") as target:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            place.unlink()
        return False
    return True


def _clone_on_macos(path: Path, place: Path) -> bool:
    """clonefile(2)."""
    try:
        return ctypes.CDLL(None).clonefile(os.fsencode(path), os.fsencode(place), 0) == 0
    except (OSError, AttributeError):
        return False
