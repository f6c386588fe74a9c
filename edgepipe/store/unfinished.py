"""Folders of models that are not whole yet: pulls that a later one continues, copies that a killed process left.

The process that fills such a folder holds a lock on it. Without a holder, it was interrupted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgepipe.errors import ModelDownloadFailed
from edgepipe.spec.names import is_name, name_of_folder
from edgepipe.store.folders import folder_size, remove_folder

_PULLING, _QUANTISING = ".pulling-", ".quantising-"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnendedPull:
    """What a pull has fetched that has not ended."""

    id: str  # name of the model
    path: Path

    @property
    def num_bytes(self) -> int:
        """Size on the disk, in bytes."""
        return folder_size(self.path)

    @property
    def goes_on(self) -> bool:
        """Whether a process is pulling the model now."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self) -> int:
        """Delete it. Return the freed bytes. Raises ModelDownloadFailed if a process is pulling the model."""
        with exclusive_staging(self.path, self.id, or_else="stop that pull with ^C, then try again"):
            freed = self.num_bytes
            remove_folder(self.path)
        return freed


def staging_folder(target: Path) -> Path:
    """Return the folder for a model's files until it is whole. An interrupted pull leaves partial files in it."""
    return target.with_name(f"{_PULLING}{target.name}")


def quantising_folder(target: Path) -> Path:
    """Return the folder for a packed copy until it is whole. No later process continues it."""
    return target.with_name(f"{_QUANTISING}{target.name}")


def unended_pulls(root: Path) -> list[UnendedPull]:
    """Return the models whose pull has not ended, by name; also one that goes on in another process."""
    found = [(name_of_folder(path.name.removeprefix(_PULLING)), path) for path in root.glob(f"{_PULLING}*")]
    return [UnendedPull(id=name, path=path) for name, path in sorted(found) if is_name(name) and path.is_dir()]


def remove_dead_copies(root: Path) -> None:
    """Delete packed copies that a killed process left."""
    for path in root.glob(f"{_QUANTISING}*"):
        with suppress(OSError, ModelDownloadFailed), exclusive_staging(path, path.name):
            remove_folder(path)


@contextmanager
def exclusive_staging(
    staging: Path, model_id: str, *, or_else: str = "wait until it ends, then: edgepipe models list"
) -> Generator[None]:
    """Make a model's staging folder and lock it for one process. Raises ModelDownloadFailed if another one holds it.

    The lock is on the folder itself, so it leaves nothing to clean up. ``or_else``: what the user may do.
    """
    descriptor = _opened(staging)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise ModelDownloadFailed(
                    f"'{model_id}' is being pulled already",
                    fact="another edgepipe process holds its folder",
                    next_step=or_else,
                ) from exc
            if _is_at(descriptor, staging):
                break
            os.close(descriptor)  # another process has just deleted that folder
            descriptor = _opened(staging)
        yield
    finally:
        os.close(descriptor)


def _opened(staging: Path) -> int:
    while True:
        staging.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # deleted in between
            return os.open(staging, os.O_RDONLY)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
