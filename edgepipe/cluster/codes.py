"""Codes that a person carries between machines: eight digits, or a long string for machines without a person."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from dataclasses import dataclass

from spake2 import SPAKE2_A, SPAKE2_B  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from edgepipe.cluster.pairing import Pake
from edgepipe.errors import ConfigInvalid
from edgepipe.ids import NodeId

CODE_DIGITS = 8
SECRET_BYTES = 16
_PREFIX = "EP1-"
_CHECK_BYTES = 6  # 60 bytes in all with IPv4: base32 without padding
_NODE_BYTES = 32  # SHA-256 of a public key
_REST_BYTES = 2 + _NODE_BYTES + SECRET_BYTES  # bytes after the host's address
_ADDRESS_BYTES = (4, 16)  # IPv4, IPv6


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCode:
    """A parsed code."""

    secret: bytes  # password of the SPAKE2 exchange
    host: str = ""  # the host's address, which only long strings hold
    port: int = 0
    node_id: str = ""  # id of the node that must answer there


def show_code(digits: str) -> str:
    """Format digits as ``4821-9037``."""
    return f"{digits[: CODE_DIGITS // 2]}-{digits[CODE_DIGITS // 2 :]}"


def read_code(text: str) -> JoinCode:
    """Parse a code or a long string. Raises ConfigInvalid for anything else, including a mistyped string."""
    bare = re.sub(r"[\s-]", "", text)
    if bare.isascii() and bare.isdecimal() and len(bare) == CODE_DIGITS:
        return JoinCode(secret=bare.encode())
    if text.strip().upper().startswith(_PREFIX):
        return _read_string(text.strip().upper().removeprefix(_PREFIX))
    raise ConfigInvalid(
        f"'{text[:40]}' is no pairing code",
        fact=f"a code has {CODE_DIGITS} digits, such as 4821-9037; a long string begins with {_PREFIX}",
        next_step="type it as 'edgepipe node invite' shows it",
    )


def show_string(*, host: str, port: int, node_id: NodeId, secret: bytes) -> str:
    """Make a long string: the host's address, its node id, and a secret that cannot be guessed."""
    packed = ipaddress.ip_address(host).packed + port.to_bytes(2, "big") + _unpack_id(node_id) + secret
    return _PREFIX + base64.b32encode(packed + _check(packed)).decode().rstrip("=")


def _read_string(text: str) -> JoinCode:
    try:
        packed = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError as exc:
        raise _mistyped() from exc
    body, check = packed[:-_CHECK_BYTES], packed[-_CHECK_BYTES:]
    length = len(body) - _REST_BYTES
    if length not in _ADDRESS_BYTES or check != _check(body):
        raise _mistyped()
    address, rest = body[:length], body[length:]
    return JoinCode(
        host=str(ipaddress.ip_address(address)),
        port=int.from_bytes(rest[:2], "big"),
        node_id=base64.b32encode(rest[2 : 2 + _NODE_BYTES]).decode().rstrip("=").lower(),
        secret=rest[2 + _NODE_BYTES :],
    )


def _mistyped() -> ConfigInvalid:
    return ConfigInvalid("the join string is damaged", fact="its check does not fit", next_step="copy it whole")


def _check(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()[:_CHECK_BYTES]


def _unpack_id(node_id: str) -> bytes:
    text = node_id.upper()
    return base64.b32decode(text + "=" * (-len(text) % 8))


def joiner_pake(secret: bytes, joiner: bytes, host: bytes) -> Pake:
    """Return the joiner's side of SPAKE2."""
    return SPAKE2_A(secret, idA=joiner, idB=host)


def host_pake(secret: bytes, joiner: bytes, host: bytes) -> Pake:
    """Return the host's side of SPAKE2."""
    return SPAKE2_B(secret, idA=joiner, idB=host)
