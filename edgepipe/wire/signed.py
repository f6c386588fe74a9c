"""Bytes that are signed or kept on disk: statements of trust and serve records.

A signature covers the bytes as they were made; no bytes that came from elsewhere are ever made anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from edgepipe.errors import RemoteProtocolError
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.serving import ServeBody, ServeRecord
from edgepipe.wire.trust import TrustBody, TrustSet, TrustStatement
from edgepipe.wire.v1 import node_pb2, trust_pb2

M = TypeVar("M", bound=Message)


def trust_body_to_bytes(body: TrustBody) -> bytes:
    """Return what an owner signs."""
    return to_wire(body, trust_pb2.TrustBody).SerializeToString(deterministic=True)


def trust_body_from_bytes(data: bytes) -> TrustBody:
    """Read what an owner signed. Raises RemoteProtocolError."""
    return from_wire(_parsed(data, trust_pb2.TrustBody), TrustBody)


def trust_set_to_bytes(statements: Iterable[TrustStatement]) -> bytes:
    """Return statements as they are kept on disk."""
    return to_wire(TrustSet(statements=tuple(statements)), trust_pb2.TrustSet).SerializeToString()


def trust_set_from_bytes(data: bytes) -> tuple[TrustStatement, ...]:
    """Read statements from the disk. Raises RemoteProtocolError."""
    return from_wire(_parsed(data, trust_pb2.TrustSet), TrustSet).statements


def serve_body_to_bytes(body: ServeBody) -> bytes:
    """Return what a node signs about a served model."""
    return to_wire(body, node_pb2.ServeBody).SerializeToString(deterministic=True)


def serve_body_from_bytes(data: bytes) -> ServeBody:
    """Read what a node signed. Raises RemoteProtocolError, PlanInvalid."""
    return from_wire(_parsed(data, node_pb2.ServeBody), ServeBody)


def serve_records_to_bytes(records: Iterable[ServeRecord]) -> bytes:
    """Return serve records as they are kept on disk."""
    return node_pb2.ServeRecords(
        records=[to_wire(record, node_pb2.ServeRecord) for record in records]
    ).SerializeToString()


def serve_records_from_bytes(data: bytes) -> tuple[ServeRecord, ...]:
    """Read serve records from the disk. Raises RemoteProtocolError, PlanInvalid."""
    return tuple(from_wire(record, ServeRecord) for record in _parsed(data, node_pb2.ServeRecords).records)


def _parsed(data: bytes, kind: type[M]) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as exc:
        raise RemoteProtocolError(f"bytes are no {kind.DESCRIPTOR.name}") from exc
