"""Small steps with files and folders on disk. They block."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from edgepipe.errors import CapacityError


def open_private(path: Path, flags: int) -> int:
    """Open a file that only this user may read (0600), and no link. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def lock_file(path: Path) -> int:
    """Hold a file's lock. Raises CapacityError while another gateway holds it, OSError."""
    file = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(file)
        raise CapacityError(
            "another gateway of this node still holds the files of batches", next_step="try again in a moment"
        ) from exc
    return file


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all bytes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
