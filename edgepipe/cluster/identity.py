"""This node's identity: an ECDSA P-256 key and a self-signed certificate, in files that only its user can read.

The node's id is the hash of its public key. So no node can claim another's id, and a new certificate keeps the id.
"""

from __future__ import annotations

from pathlib import Path

from edgepipe.cluster.private_files import make_private_folder, read_private, write_private
from edgepipe.errors import CertificateInvalid, ConfigInvalid
from edgepipe.plain_words import plain
from edgepipe.security.certificates import KeyPair, make_key_pair, read_key_pair

_KEY = "key.pem"
_CERTIFICATE = "certificate.pem"
_MOST_BYTES = 16 << 10  # key and certificate are below 1 KB; a larger file is not the node's


def load_identity(folder: Path) -> KeyPair:
    """Load the key pair in ``folder``; make it at the first start. Raises ConfigInvalid if others may read the key, if
    it is damaged, or if the certificate is not the key's."""
    make_private_folder(folder)
    try:
        key = read_private(folder / _KEY, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        pair = make_key_pair()
        replace_identity(folder, pair)
        return pair
    try:
        certificate = read_private(folder / _CERTIFICATE, most_bytes=_MOST_BYTES)
        return read_key_pair(key_pem=key, certificate_pem=certificate)
    except (FileNotFoundError, CertificateInvalid) as exc:
        raise ConfigInvalid(
            f"the identity of this node in {folder} is damaged",
            fact=plain(exc),
            next_step=f"restore the folder, or begin as a new node: mv '{folder}' '{folder}.damaged'",
        ) from exc


def replace_identity(folder: Path, pair: KeyPair) -> None:
    """Make ``pair`` the identity in ``folder``, replacing any other. Raises ConfigInvalid."""
    make_private_folder(folder)
    try:
        (folder / _KEY).unlink(missing_ok=True)  # written last, so a key is never beside another key's certificate
        write_private(folder / _CERTIFICATE, pair.certificate.pem)
        write_private(folder / _KEY, pair.key_pem)
    except OSError as exc:
        raise ConfigInvalid(
            f"the identity of this node cannot be written to {folder}",
            fact=plain(exc),
            next_step="check its permissions and free space, or choose another folder: --data-dir",
        ) from exc
