"""Changes single settings in the settings file; comments and order stay. The file may be a link to another one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from edgepipe.errors import ConfigInvalid

_LOCK_S = 10.0  # another command holds the lock for milliseconds


def write_settings(path: Path, changes: Mapping[str, str | int | float | bool | list[str]]) -> None:
    """Set top-level keys. Commands that do so at the same time take turns.

    Raises ConfigInvalid if the file is no valid TOML or cannot be written.
    """
    from tomlkit.exceptions import TOMLKitError

    try:
        file = path.resolve()  # a link to a file elsewhere, as in a collection of settings, stays a link
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(file.parent):
            _change(file, changes)
    except (OSError, RuntimeError, TOMLKitError) as exc:  # RuntimeError: links in a circle, before Python 3.13
        raise ConfigInvalid(
            f"the settings file {path} cannot be changed", fact=str(exc), next_step="repair it, or move it away"
        ) from exc


def _change(file: Path, changes: Mapping[str, str | int | float | bool | list[str]]) -> None:
    import tomlkit

    document = tomlkit.parse(file.read_text(encoding="utf-8")) if file.exists() else tomlkit.document()
    before = tomlkit.dumps(document)
    for key, value in changes.items():
        document[key] = value
    if tomlkit.dumps(document) == before:
        return
    part = file.with_name(file.name + ".part")
    part.touch(mode=0o600)  # the file may hold an API key
    part.write_text(tomlkit.dumps(document), encoding="utf-8")
    part.replace(file)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Lock a folder for one command. Raises TimeoutError. The lock is on the folder itself: nothing to clean up."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        waiting = Thread(target=fcntl.flock, args=(descriptor, fcntl.LOCK_EX), daemon=True)
        waiting.start()
        waiting.join(_LOCK_S)
        if waiting.is_alive():
            raise TimeoutError(f"another edgepipe command has been changing it for {_LOCK_S:.0f} s")
        yield
    finally:
        os.close(descriptor)
