"""Keys of this node's HTTP: from a setting, or made once where other machines or other users reach it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgepipe.addresses import is_loopback
from edgepipe.cluster.private_files import read_private, write_private
from edgepipe.config import Config
from edgepipe.daemon.machine.accounts import shared_computer

_FILE = "api-key"
_MOST_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpKeys:
    """The keys that the gateway accepts."""

    keys: tuple[str, ...] = ()
    on_loopback: bool = False  # whether clients on this machine need a key, too


def key_file(data_dir: Path) -> Path:
    """Return the file with the key for clients of the same user; 0600, may be missing."""
    return data_dir / _FILE


def read_key(data_dir: Path) -> str:
    """Return the key in that file; empty if the file is missing. Raises ConfigInvalid if others may read it."""
    try:
        return read_private(key_file(data_dir), most_bytes=_MOST_BYTES).decode("ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def asks_on_loopback(config: Config, *, shared: Callable[[], bool] = shared_computer) -> bool:
    """Return whether clients on this computer need a key: as set, else if a key is set or others have accounts."""
    if config.local_key != "auto":
        return config.local_key == "yes"
    return bool(config.api_key) or shared()


def keys_in_force(config: Config, data_dir: Path, *, shared: Callable[[], bool] = shared_computer) -> HttpKeys:
    """Return the keys by settings. ``data_dir`` keeps the first for the command line, or the key that is made here."""
    on_loopback = asks_on_loopback(config, shared=shared)
    if config.api_key:
        write_private(key_file(data_dir), config.api_key[0].encode())
        return HttpKeys(keys=config.api_key, on_loopback=on_loopback)
    if is_loopback(config.http_host) and not on_loopback:
        return HttpKeys()
    key = read_key(data_dir)
    if not key:
        key = "ep-" + secrets.token_urlsafe(32)
        write_private(key_file(data_dir), key.encode())
    return HttpKeys(keys=(key,), on_loopback=on_loopback)
