"""Messages about copies of batches, as values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBatch:
    """A batch of the reporting node that another node should have a copy of."""

    batch_id: str
    keeper: str = ""  # id of the node that keeps the copy; empty: none
    term: int = 0  # how often the batch was taken over
    num_bytes: int = 0  # recorded bytes of all its files


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBatch:
    """A copy that the reporting node keeps."""

    batch_id: str
    owner: str = ""  # id of the node that it was copied from
    term: int = 0  # term of that node
    num_bytes: int = 0  # durable bytes of the copy


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """A node's batches with copies, and the copies that it keeps."""

    room_bytes: int = 0  # room for further copies
    owned: tuple[OwnedBatch, ...] = ()
    held: tuple[HeldBatch, ...] = ()
    owners: tuple[str, ...] = ()  # ids of heard nodes that own batches with a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """What a daemon may send to the keeper of a batch of its gateway."""

    batch_id: str
    keeper: str  # node id
    record: bytes  # JSON, see ``edgepipe.gateway.batches.copies``
    files: tuple[str, ...] = ()  # names in the folder of files: input, output, errors
    num_bytes: tuple[int, ...] = ()  # durable bytes of each


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """All of a gateway's batches that have or keep copies."""

    facts: BatchFacts
    sources: tuple[BatchSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatchRequest:
    """Asks for what a keeper lacks of a batch. The answer waits for news for a while."""

    batch_id: str
    input_at: int = 0  # bytes of each file that the caller has
    output_at: int = 0
    error_at: int = 0
    have: bytes = b""  # digest of the record that the caller has


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """A record, or bytes of a file of a batch."""

    record: bytes = b""  # JSON; in the first part only
    file: int = 0  # 0: input, 1: output, 2: errors
    offset: int = 0
    data: bytes = b""


def digest_of(record: bytes) -> bytes:
    """Return what ``ReadBatchRequest.have`` says of a record."""
    return hashlib.blake2b(record, digest_size=16).digest()
