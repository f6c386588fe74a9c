"""Space on the models' disk, and errors for a full or read-only disk."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from edgepipe.errors import ModelDownloadFailed
from edgepipe.plain_words import plain
from edgepipe.units import format_bytes

HEADROOM_BYTES = 512 << 20  # space that stays free on the disk when a user pulls models
COPY_HEADROOM_BYTES = 2 << 30  # space that automatic copies leave free


def free_bytes(root: Path) -> int:
    """Return the free bytes on the disk of a folder that may not exist yet; 0 if unknown."""
    try:
        return shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
    except OSError:
        return 0


def check_room(model: str, root: Path, num_bytes: int) -> None:
    """Check that ``num_bytes`` and the headroom fit. Raises ModelDownloadFailed with the numbers."""
    needed, free = num_bytes + HEADROOM_BYTES, free_bytes(root)
    if num_bytes > 0 and free < needed:
        raise ModelDownloadFailed(
            f"'{model}' does not fit on the disk",
            fact=f"{format_bytes(needed)} are needed at {root}, {format_bytes(free)} are free",
            next_step="make room: edgepipe models list, edgepipe models rm NAME",
        )


@contextmanager
def disk_errors(model: str) -> Generator[None]:
    """Translate OSErrors of writing a model's files to ModelDownloadFailed. Partial files stay for a retry."""
    try:
        yield
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ModelDownloadFailed(
            f"'{model}' could not be written to the disk",
            fact="the disk is full" if full else plain(exc),
            next_step="make room and try again" if full else "check the folder's permissions and try again",
        ) from exc


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, since other processes may read or replace it."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
