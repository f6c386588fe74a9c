"""Room on the models' disk, and what to say when it runs out or cannot be written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from edgepipe.errors import ModelDownloadFailed
from edgepipe.units import format_bytes

HEADROOM_BYTES = 512 << 20  # kept free on the disk besides models that somebody asked for
COPY_HEADROOM_BYTES = 2 << 30  # besides copies that nobody asked for


def free_bytes(root: Path) -> int:
    """Free on the disk of a folder that may not exist yet; 0 where that cannot be known."""
    try:
        return shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
    except OSError:
        return 0


def check_room(model: str, root: Path, num_bytes: int) -> None:
    """Raises ModelDownloadFailed with the numbers if so many bytes and some air do not fit."""
    needed, free = num_bytes + HEADROOM_BYTES, free_bytes(root)
    if num_bytes > 0 and free < needed:
        raise ModelDownloadFailed(
            f"'{model}' does not fit on the disk",
            fact=f"{format_bytes(needed)} are needed at {root}, {format_bytes(free)} are free",
            next_step="make room: edgepipe models list, edgepipe models rm NAME",
        )


@contextmanager
def disk_errors(model: str) -> Generator[None]:
    """Translates OSError of writing a model's files. Raises ModelDownloadFailed; what was written stays for later."""
    try:
        yield
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ModelDownloadFailed(
            f"'{model}' could not be written to the disk",
            fact="the disk is full" if full else str(exc),
            next_step="make room and try again" if full else "check the folder's permissions and try again",
        ) from exc
