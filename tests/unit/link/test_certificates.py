"""Certificates: the one form that is accepted, and everything near it that is not."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import CertificateInvalid
from edgepipe.security.certificates import (
    KeyPair,
    make_key_pair,
    peek_fingerprint,
    read_certificate,
    read_key_pair,
)

PAIR = make_key_pair()
OTHER = make_key_pair()


def usage(**more: bool) -> x509.KeyUsage:
    fields = dict.fromkeys(
        [
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ],
        False,
    )
    return x509.KeyUsage(digital_signature=True, **{**fields, **more})


def forge(
    *,
    pair: KeyPair = PAIR,
    subject: str = "",
    san: str = "",
    key_usage: x509.KeyUsage | None = None,
    key_usage_critical: bool = True,
    ca: bool = False,
    client_too: bool = True,
    until: int = 2049,
    extra: bool = False,
    signer: KeyPair | None = None,
) -> bytes:
    """A certificate of ``pair``'s key that differs from ours in what is named."""
    key = serialization.load_pem_private_key(pair.key_pem, password=None)
    signing = serialization.load_pem_private_key((signer or pair).key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject or pair.fingerprint)])
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if client_too else [])]
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(until, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(key_usage or usage(), critical=key_usage_critical)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(san or pair.certificate.dns_name)]), critical=False)
    )
    if extra:
        builder = builder.add_extension(x509.OCSPNoCheck(), critical=False)
    return builder.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_our_own_form_is_accepted_and_names_the_key() -> None:
    read = read_certificate(PAIR.certificate.pem)
    assert read == PAIR.certificate
    assert len(read.fingerprint) == 52
    assert read.dns_name == f"{read.fingerprint}.peer.edgepipe"
    assert peek_fingerprint(read.pem) == read.fingerprint
    assert read_certificate(forge()).fingerprint == PAIR.fingerprint  # a re-issue with the same key is the same owner


def test_two_key_pairs_differ() -> None:
    assert PAIR.fingerprint != OTHER.fingerprint


@pytest.mark.parametrize(
    "pem",
    [
        pytest.param(forge(ca=True), id="an authority"),
        pytest.param(forge(key_usage=usage(key_cert_sign=True)), id="may sign certificates"),
        pytest.param(forge(key_usage_critical=False), id="key usage may be ignored"),
        pytest.param(forge(client_too=False), id="servers only"),
        pytest.param(forge(san=OTHER.certificate.dns_name), id="another's host name"),
        pytest.param(forge(subject=OTHER.fingerprint), id="another's name"),
        pytest.param(forge(until=2050), id="valid for longer"),
        pytest.param(forge(extra=True), id="one extension more"),
        pytest.param(forge(signer=OTHER), id="signed by another"),
        pytest.param(b"", id="nothing"),
        pytest.param(PAIR.certificate.pem[:-40], id="cut short"),
        pytest.param(PAIR.key_pem, id="a key"),
        pytest.param(PAIR.certificate.pem + b"\n" * 3000, id="too long"),
    ],
)
def test_whatever_differs_is_refused(pem: bytes) -> None:
    with pytest.raises(CertificateInvalid):
        read_certificate(pem)


def test_other_kinds_of_key_are_refused() -> None:
    for key in (ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()):
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
        algorithm = hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(2049, 12, 31, tzinfo=datetime.UTC))
            .sign(key, algorithm)
        )
        with pytest.raises(CertificateInvalid):
            read_certificate(certificate.public_bytes(serialization.Encoding.PEM))


def test_a_second_certificate_behind_the_first_does_not_ride_along() -> None:
    read = read_certificate(PAIR.certificate.pem + OTHER.certificate.pem)
    assert read.pem == PAIR.certificate.pem


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, len(PAIR.certificate.pem) - 1), byte=st.integers(0, 255), noise=st.binary(max_size=64))
def test_damaged_certificates_are_refused_and_never_crash(position: int, byte: int, noise: bytes) -> None:
    pem = bytearray(PAIR.certificate.pem)
    pem[position] = byte
    for damaged in (bytes(pem), noise):
        try:
            assert read_certificate(damaged) == PAIR.certificate  # a byte outside the certificate proper
        except CertificateInvalid:
            pass


def test_stored_key_pairs_are_read_back_and_checked() -> None:
    assert read_key_pair(key_pem=PAIR.key_pem, certificate_pem=PAIR.certificate.pem) == PAIR
    with pytest.raises(CertificateInvalid, match="not that of the certificate"):
        read_key_pair(key_pem=OTHER.key_pem, certificate_pem=PAIR.certificate.pem)
    with pytest.raises(CertificateInvalid, match="cannot be read"):
        read_key_pair(key_pem=b"-----BEGIN PRIVATE KEY-----\n", certificate_pem=PAIR.certificate.pem)


def test_the_key_is_not_shown() -> None:
    assert PAIR.key_pem.decode()[40:80] not in repr(PAIR)
    assert "PRIVATE" not in str(dataclasses.asdict(PAIR.certificate))


def test_signatures_hold_for_their_data_and_owner_only() -> None:
    signature = PAIR.sign(b"statement")
    assert PAIR.certificate.verifies(signature, b"statement")
    assert not PAIR.certificate.verifies(signature, b"statement!")
    assert not OTHER.certificate.verifies(signature, b"statement")
    assert not PAIR.certificate.verifies(b"junk", b"statement")
