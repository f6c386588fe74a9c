"""Commands of this machine that call engines themselves, as a gateway does: known to the cluster while they run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from edgepipe.daemon.offers import PublishedState
from edgepipe.errors import QueueFull
from edgepipe.security.certificates import read_certificate

_MAX_GUESTS = 16  # a person runs one bench at a time


class Guests:
    """Certificates of the commands that run now."""

    def __init__(self, local: PublishedState) -> None:
        self._local = local
        self._certificates: list[bytes] = []

    def certificates(self) -> list[bytes]:
        """Return the certificates (PEM) of the commands that run now."""
        return list(self._certificates)

    @contextmanager
    def admit(self, certificate: bytes) -> Generator[None]:
        """Count the command as a gateway of this node inside the block. Raises CertificateInvalid, QueueFull."""
        if len(self._certificates) >= _MAX_GUESTS:
            raise QueueFull("too many commands call engines at once", fact=f"{_MAX_GUESTS} run already")
        pem = read_certificate(certificate).pem
        self._certificates.append(pem)
        self._local.refresh()
        try:
            yield
        finally:
            self._certificates.remove(pem)
            self._local.refresh()
