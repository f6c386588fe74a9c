"""Changes single settings in the settings file; comments and order stay. The file may be a link to another one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain

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
            f"the settings file {path} cannot be changed", fact=plain(exc), next_step="repair it, or move it away"
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
    """Lock a folder itself for one command, so that nothing is left to clean up. Raises OSError, ConfigInvalid."""
    descriptor, taken = os.open(folder, os.O_RDONLY), Future[None]()
    Thread(target=_take, args=(descriptor, taken), daemon=True).start()
    try:
        taken.result(_LOCK_S)
    except TimeoutError as exc:
        if taken.cancel():  # the thread closes the descriptor when it has the lock
            raise ConfigInvalid(
                f"the settings in {folder} cannot be changed",
                fact=f"another edgepipe command has been changing them for {_LOCK_S:.0f} s",
                next_step="end that command, then type this one again",
            ) from exc
        taken.result()  # the lock came in this moment
    try:
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, taken: Future[None]) -> None:
    """Wait for the lock of an open folder."""
    problem: OSError | None = None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as exc:
        problem = exc
    wanted = taken.set_running_or_notify_cancel()
    if problem is not None or not wanted:
        os.close(descriptor)
    if wanted:
        taken.set_result(None) if problem is None else taken.set_exception(problem)
