"""The trust store on disk: replaced atomically, with the version before; a damaged file is reported, not ignored."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgepipe.cluster.private_files import make_private_folder, read_private, write_private
from edgepipe.cluster.trust import TrustStore, read_store
from edgepipe.errors import ConfigInvalid, RemoteProtocolError, TrustInvalid
from edgepipe.wire.signed import trust_set_from_bytes, trust_set_to_bytes
from edgepipe.wire.trust import TrustStatement

_MAGIC = b"edgepipe trust 1\n"
_HASH_BYTES = 32
_MOST_BYTES = 8 << 20  # twice what the largest store takes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrust:
    """The trust store that a node loads at its start."""

    store: TrustStore
    damage: str = ""  # how the file is damaged; empty: it is whole. The store of a damaged file is the rescued part


class TrustFile:
    """``statements`` and ``statements.before`` in one folder (0700)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "statements"
        self._before = folder / "statements.before"

    def load(self) -> LoadedTrust | None:
        """Load the store; None if both files are missing. Raises ConfigInvalid if no part of a damaged store can be
        rescued, or if others may change it."""
        make_private_folder(self.path.parent)
        try:
            return LoadedTrust(store=_whole(read_private(self.path, most_bytes=_MOST_BYTES)))
        except FileNotFoundError:
            if not self._before.exists():
                return None
            damage = "it is missing"
        except TrustInvalid as error:
            damage = error.what
        return LoadedTrust(store=self._saved(damage), damage=damage)

    def save(self, store: TrustStore) -> None:
        """Replace the file and keep the version before. Raises OSError."""
        make_private_folder(self.path.parent)
        with suppress(FileNotFoundError):
            self._before.unlink()
        with suppress(FileNotFoundError):
            os.link(self.path, self._before)  # the store itself exists at every moment between the two steps
        data = trust_set_to_bytes(store.signed())
        data = _MAGIC + hashlib.sha256(data).digest() + data
        if not self._before.exists():
            write_private(self._before, data)  # the first time: a copy, so that damage to one file spares the other
        write_private(self.path, data)

    def forget(self) -> None:
        """Remove the store: this node leaves its cluster."""
        self._before.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _saved(self, damage: str) -> TrustStore:
        """Rescue statements from the version before and the rest of this one: each statement has its own signature."""
        statements: list[TrustStatement] = []
        for path in (self._before, self.path):
            with suppress(OSError, ConfigInvalid, RemoteProtocolError):
                data = read_private(path, most_bytes=_MOST_BYTES)
                statements += trust_set_from_bytes(data[len(_MAGIC) + _HASH_BYTES :])
        try:
            return read_store(statements)
        except TrustInvalid as exc:
            raise ConfigInvalid(
                f"the trust store {self.path} is damaged, and so is the version before it",
                fact=damage,
                next_step=f"mv '{self.path.parent}' '{self.path.parent}.damaged', then join the cluster again: "
                "edgepipe node join --new-identity CODE",
            ) from exc


def _whole(data: bytes) -> TrustStore:
    head = len(_MAGIC) + _HASH_BYTES
    body = data[head:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : head]:
        raise TrustInvalid(f"its {len(data)} bytes do not match their hash")
    try:
        return read_store(trust_set_from_bytes(body))
    except RemoteProtocolError as exc:
        raise TrustInvalid("it cannot be read", fact=str(exc)) from exc
