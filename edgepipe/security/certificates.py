"""Keys and self-signed certificates: a process proves its identity with its own and checks those of others.

Processes pin whole certificates, so no authority signs anything. But gRPC takes every pinned certificate for a root.
Only the critical key usage ``digitalSignature`` keeps its owner from signing another certificate in a false name. So a
certificate is accepted only in exactly the form that ``make_key_pair`` gives it.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NewType

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgepipe.errors import CertificateInvalid
from edgepipe.plain_words import plain

Fingerprint = NewType("Fingerprint", str)
"""SHA-256 of a public key (DER SubjectPublicKeyInfo), base32, lower case, no padding: 52 characters, one DNS label."""

MAX_CERTIFICATE_BYTES = 2048  # PEM; ours have about 800

# Wide and fixed: a machine with a wrong clock must not drop out of its owner's cluster.
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2049, 12, 31, tzinfo=datetime.UTC)
_DOMAIN = "peer.edgepipe"
_SIGNATURE = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate that has passed ``read_certificate``. Two are equal only if all bytes are."""

    pem: bytes  # exactly one certificate, as this program writes it
    fingerprint: Fingerprint

    @property
    def dns_name(self) -> str:
        """The only name in it, which TLS compares."""
        return _dns_name(self.fingerprint)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Return whether the certificate's key signed exactly ``data``."""
        try:
            _public_key(x509.load_pem_x509_certificate(self.pem)).verify(signature, data, _SIGNATURE)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A private key with its certificate."""

    key_pem: bytes = field(repr=False)  # PKCS #8, not encrypted: it never leaves the process or a file of mode 0600
    certificate: Certificate

    @property
    def fingerprint(self) -> Fingerprint:
        """The hash of its public key."""
        return self.certificate.fingerprint

    def sign(self, data: bytes) -> bytes:
        """Sign data: ECDSA over SHA-256, DER; ``Certificate.verifies`` checks it."""
        return _private_key(self.key_pem).sign(data, _SIGNATURE)


def make_key_pair() -> KeyPair:
    """Make a P-256 key and a certificate that it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    fingerprint = _fingerprint(key.public_key())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, fingerprint)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
    )
    for extension, critical in _extensions(fingerprint):
        builder = builder.add_extension(extension, critical=critical)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = builder.sign(key, hashes.SHA256())
    return KeyPair(key_pem=key_pem, certificate=Certificate(pem=_pem(certificate), fingerprint=fingerprint))


def read_key_pair(*, key_pem: bytes, certificate_pem: bytes) -> KeyPair:
    """Read a stored key pair. Raises CertificateInvalid if a part is damaged or they do not belong together."""
    certificate = read_certificate(certificate_pem)
    if _fingerprint(_private_key(key_pem).public_key()) != certificate.fingerprint:
        raise CertificateInvalid("the key is not that of the certificate")
    return KeyPair(key_pem=key_pem, certificate=certificate)


def read_certificate(pem: bytes) -> Certificate:
    """Read a foreign certificate, which must have exactly the form of ours. Raises CertificateInvalid."""
    if len(pem) > MAX_CERTIFICATE_BYTES:
        raise CertificateInvalid(fact=f"it has {len(pem)} bytes, at most {MAX_CERTIFICATE_BYTES} are taken")
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        fingerprint = _fingerprint(_public_key(certificate))
        wrong = _what_is_wrong(certificate, fingerprint)
    except CertificateInvalid:
        raise
    except Exception as exc:  # the parser reads foreign bytes and refuses them with many kinds of errors
        raise CertificateInvalid(fact=f"it cannot be read: {plain(exc)}") from exc
    if wrong:
        raise CertificateInvalid(fact=wrong)
    return Certificate(pem=_pem(certificate), fingerprint=fingerprint)  # encoded anew, without trailing data


@lru_cache(maxsize=256)  # called for every RPC, and one caller makes many
def peek_fingerprint(pem: bytes) -> Fingerprint:
    """Return the fingerprint of a certificate that TLS has accepted as pinned. Raises CertificateInvalid."""
    try:
        return _fingerprint(_public_key(x509.load_pem_x509_certificate(pem)))
    except ValueError as exc:
        raise CertificateInvalid(fact="it cannot be read") from exc


def _what_is_wrong(certificate: x509.Certificate, fingerprint: Fingerprint) -> str:
    """Return the first difference from our form; empty without one."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, fingerprint)])
    wanted = [x509.Extension(extension.oid, critical, extension) for extension, critical in _extensions(fingerprint)]
    if certificate.version is not x509.Version.v3:
        return "it is no certificate of version 3"
    if certificate.subject != name or certificate.issuer != name:
        return "its name is not the hash of its key"
    if (certificate.not_valid_before_utc, certificate.not_valid_after_utc) != (_NOT_BEFORE, _NOT_AFTER):
        return "it is not valid from 2020 to 2049"
    if sorted(certificate.extensions, key=_by_oid) != sorted(wanted, key=_by_oid):
        return "its permitted uses are not exactly ours"
    try:
        certificate.verify_directly_issued_by(certificate)
    except (InvalidSignature, ValueError, TypeError):
        return "its signature is not made with its own key"
    return ""


def _extensions(fingerprint: Fingerprint) -> list[tuple[x509.ExtensionType, bool]]:
    """Return the extensions of every certificate, each with whether it is critical."""
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage, True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (x509.SubjectAlternativeName([x509.DNSName(_dns_name(fingerprint))]), False),
    ]


def _by_oid(extension: x509.Extension[x509.ExtensionType]) -> str:
    return extension.oid.dotted_string


def _dns_name(fingerprint: Fingerprint) -> str:
    return f"{fingerprint}.{_DOMAIN}"


def _fingerprint(key: ec.EllipticCurvePublicKey) -> Fingerprint:
    info = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Fingerprint(base64.b32encode(hashlib.sha256(info).digest()).decode().rstrip("=").lower())


def _public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateInvalid(fact="its key is not of the curve P-256")
    return key


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as exc:
        raise CertificateInvalid("the private key cannot be read") from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateInvalid("the private key is not of the curve P-256")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
