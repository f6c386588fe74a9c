"""Names of files that survive a power cut. Blocks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_names(folder: Path) -> None:
    """Make new names in a folder survive a power cut, where the file system can sync folders."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
