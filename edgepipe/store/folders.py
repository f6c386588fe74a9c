"""Whole folders on the models' disk: sizes, durable files, deletion. Other processes may change a folder meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

REMOVING_PREFIX = ".removing-"


def folder_size(folder: Path, *, without: str = "") -> int:
    """Return the total bytes of all files below a folder, except those in its subfolder ``without``."""
    total = 0
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder and without in folders:
            folders.remove(without)
        for name in files:
            with suppress(FileNotFoundError):  # a transfer has just renamed it, or it is being deleted
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def sync_files(folder: Path) -> None:
    """Flush all files to the disk before the final name shows that the model is whole."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Delete a folder, also if another process deletes it at the same time. Raises OSError."""

    def failed(_: Callable[..., Any], __: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    shutil.rmtree(folder, onerror=failed)


def hide_folder(folder: Path) -> Path:
    """Give a folder that is to be deleted a hidden name, so that no process opens half of it. Return its new path."""
    gone = folder.with_name(f"{REMOVING_PREFIX}{folder.name}")
    if gone.exists():
        remove_folder(gone)  # left by a process that was killed while it deleted
    folder.rename(gone)
    return gone


def remove_hidden(root: Path) -> None:
    """Delete what processes left that were killed while they deleted."""
    for path in root.glob(f"{REMOVING_PREFIX}*"):
        with suppress(OSError):
            remove_folder(path)
