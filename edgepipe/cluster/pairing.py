"""How two machines come to trust each other by a short code: both sides of the exchange as state machines.

SPAKE2 (Abdalla and Pointcheval 2005) turns the code into a strong key: each exchange allows one guess, and an
eavesdropper learns nothing. The identities of both sides are the hash of both greetings, certificates included. So a
machine in the middle that swaps a certificate gets another key, as with a wrong code.

::

    joiner                                   host
    hello (certificate, nonce)      ──▶
                                    ◀──      hello (certificate, nonce, cluster)
    element                         ──▶
                                    ◀──      element
    confirmation                    ──▶      counts as a wrong try unless it is right
                                    ◀──      confirmation, then "waiting": a person is asked
                                    ◀──      sealed welcome: the trust store, the joiner in it
    sealed "done"                   ──▶

PURE: bytes in, bytes out. ``receive`` computes for some 50 ms: call it in a thread. After an error make a new machine.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Protocol, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError, Message

from edgepipe.cluster.trust import TrustStore, read_store
from edgepipe.errors import EdgepipeError, PairingRejected, RemoteProtocolError
from edgepipe.ids import NodeId
from edgepipe.plain_words import plain
from edgepipe.security.certificates import Certificate, KeyPair, read_certificate
from edgepipe.security.trust_view import Role
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, check_hello
from edgepipe.wire.trust import (
    KnownAddress,
    PairDone,
    PairHello,
    PairMessage,
    PairWaiting,
    PairWelcome,
    TrustSet,
)
from edgepipe.wire.v1 import trust_pb2 as pb

NONCE_BYTES = 16
MAX_MESSAGE_BYTES = 16 << 10  # limit for a peer that has proven nothing; the greeting with its certificate has 1 KB
MAX_WELCOME_BYTES = 4 << 20  # limit for a host that has proven that it knows the code: the whole trust store
_CONTEXT = b"edgepipe-pair-1"
_KEY_BYTES = 32
_ELEMENT_BYTES = 33
_MAX_NAME_CHARS = 63
_JOINER_NONCE, _HOST_NONCE = b"joiner->host", b"host->joiner"  # 12 bytes; a key seals one message each way


class Pake(Protocol):
    """One side of SPAKE2."""

    def start(self) -> bytes:
        """Return the element to send."""
        ...

    def finish(self, element: bytes, /) -> bytes:
        """Return the key. Raises for an invalid element, for the own one, and for one from the same side."""
        ...


M = TypeVar("M", bound=Message)
MakePake = Callable[[bytes, bytes, bytes], Pake]  # password, identity of the joiner, identity of the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """One side's hello."""

    certificate: Certificate
    name: str
    cluster_id: str = ""
    cluster_name: str = ""

    @property
    def node_id(self) -> NodeId:
        """The node id of its key."""
        return NodeId(self.certificate.fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """This side of an exchange."""

    code: bytes  # the secret that both sides know
    key_pair: KeyPair
    hello: Hello  # versions, name and, of the host, the cluster
    nonce: bytes  # fresh


class _State(Enum):
    HELLO = auto()
    ELEMENT = auto()
    CONFIRMATION = auto()
    WELCOME = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class _Keys:
    joiner: bytes
    host: bytes
    seal: bytes


class _Machine:
    """The part that both sides share: order, the transcript, keys."""

    def __init__(self, party: Party, make_pake: MakePake, *, is_host: bool) -> None:
        self.other: Greeting | None = None
        self._party = party
        self._make_pake = make_pake
        self._is_host = is_host
        self._state = _State.HELLO
        self._hellos: dict[bool, bytes] = {is_host: self._own_hello()}
        self._transcript = b""
        self._pake: Pake | None = None
        self._keys: _Keys | None = None

    def receive(self, data: bytes) -> bytes | None:
        """Take one message; return the reply, if any. Raises the reason that ends the exchange: the other side's
        refusal, PairingRejected, CertificateInvalid, VersionMismatch or RemoteProtocolError."""
        try:
            message = _decode(data)
            if message.refusal is not None:
                raise message.refusal
            return self._receive(message, data)
        except BaseException:
            self._state = _State.FAILED
            raise

    def _receive(self, message: PairMessage, data: bytes) -> bytes | None:
        raise NotImplementedError

    def _own_hello(self) -> bytes:
        hello = self._party.hello
        greeting = PairHello(
            protocol_version=hello.protocol_version,
            edgepipe_version=hello.edgepipe_version,
            nonce=self._party.nonce,
            certificate=self._party.key_pair.certificate.pem,
            node_name=hello.node_name,
            cluster_id=hello.cluster_id,
            cluster_name=hello.cluster_name,
        )
        return _encode(PairMessage(hello=greeting))

    def _hear_hello(self, hello: PairHello, data: bytes) -> None:
        """Check the greeting and bind the exchange to both greetings."""
        check_hello(
            Hello(
                role="",
                protocol_version=hello.protocol_version,
                edgepipe_version=hello.edgepipe_version[:_MAX_NAME_CHARS],
                node_name=_name(hello.node_name),
            ),
            own_name=self._party.hello.node_name or "this node",
        )
        if len(hello.nonce) != NONCE_BYTES:
            raise RemoteProtocolError("the greeting has no nonce")
        self.other = Greeting(
            certificate=read_certificate(hello.certificate),
            name=_name(hello.node_name),
            cluster_id=_name(hello.cluster_id),
            cluster_name=_name(hello.cluster_name),
        )
        if self.other.node_id == self._party.key_pair.fingerprint:
            raise PairingRejected("a machine cannot pair with itself", next_step="run 'node join' on the other machine")
        self._hellos[not self._is_host] = data
        parts = (self._hellos[False], self._hellos[True])
        self._transcript = hashlib.sha256(_CONTEXT + b"".join(len(p).to_bytes(4, "big") + p for p in parts)).digest()
        self._pake = self._make_pake(self._party.code, b"J" + self._transcript, b"H" + self._transcript)

    def _own_element(self) -> bytes:
        assert self._pake is not None, "the greetings come first"
        return self._pake.start()

    def _hear_element(self, element: bytes) -> None:
        assert self._pake is not None, "the greetings come first"
        if len(element) != _ELEMENT_BYTES:
            raise wrong_code()
        try:
            secret = self._pake.finish(element)
        except Exception as exc:  # not an element, a small group, our own reflected: each is an attempt to cheat
            raise wrong_code() from exc
        material = HKDF(hashes.SHA256(), 3 * _KEY_BYTES, salt=self._transcript, info=_CONTEXT).derive(secret)
        self._keys = _Keys(*(material[i : i + _KEY_BYTES] for i in range(0, 3 * _KEY_BYTES, _KEY_BYTES)))

    def _confirmation(self, *, of_host: bool) -> bytes:
        assert self._keys is not None, "the elements come first"
        return hmac.digest(self._keys.host if of_host else self._keys.joiner, self._transcript, "sha256")

    def _hear_confirmation(self, confirmation: bytes) -> None:
        if not hmac.compare_digest(confirmation, self._confirmation(of_host=not self._is_host)):
            raise wrong_code()

    def _seal(self, message: Message) -> bytes:
        assert self._keys is not None, "the elements come first"
        nonce = _HOST_NONCE if self._is_host else _JOINER_NONCE
        return ChaCha20Poly1305(self._keys.seal).encrypt(nonce, message.SerializeToString(), self._transcript)

    def _open(self, sealed: bytes) -> bytes:
        assert self._keys is not None, "the elements come first"
        nonce = _JOINER_NONCE if self._is_host else _HOST_NONCE
        try:
            return ChaCha20Poly1305(self._keys.seal).decrypt(nonce, sealed, self._transcript)
        except InvalidTag as exc:
            raise PairingRejected("the last message of the pairing was changed on the way", fact=_ATTACK) from exc


class HostPairing(_Machine):
    """The host's side. Once ``confirmed``, ``other`` is the machine that asks; if it is admitted, call ``welcome``."""

    def __init__(self, party: Party, make_pake: MakePake) -> None:
        super().__init__(party, make_pake, is_host=True)
        self.guessed = False  # the other side used up a try: from its element until it has proven the code

    @property
    def confirmed(self) -> bool:
        """Whether the other side has proven that it knows the code, so that a person may be asked."""
        return self._state is _State.WELCOME

    @property
    def done(self) -> bool:
        """Whether the joiner has the store on disk."""
        return self._state is _State.DONE

    def welcome(self, store: TrustStore, addresses: Mapping[str, str]) -> bytes:
        """Return the last message to the joiner, which is in ``store`` by now, with the members' addresses."""
        assert self._state is _State.WELCOME, "only a joiner that has proven the code is welcome"
        known = tuple(KnownAddress(node_id=NodeId(node_id), address=address) for node_id, address in addresses.items())
        welcome = PairWelcome(trust=TrustSet(statements=store.signed()), addresses=known)
        return _encode(PairMessage(sealed=self._seal(to_wire(welcome, pb.PairWelcome))))

    def _receive(self, message: PairMessage, data: bytes) -> bytes | None:
        match self._state, message:
            case _State.HELLO, PairMessage(hello=PairHello() as hello):
                self._hear_hello(hello, data)
                self._state = _State.ELEMENT
                return self._hellos[True]
            case _State.ELEMENT, PairMessage(element=bytes() as element):
                self.guessed = True
                own = self._own_element()
                self._hear_element(element)
                self._state = _State.CONFIRMATION
                return _encode(PairMessage(element=own))
            case _State.CONFIRMATION, PairMessage(confirmation=bytes() as confirmation):
                self._hear_confirmation(confirmation)
                self.guessed = False
                self._state = _State.WELCOME
                return _encode(PairMessage(confirmation=self._confirmation(of_host=True)))
            case _State.WELCOME, PairMessage(sealed=bytes() as sealed):
                _parse(pb.PairDone(), self._open(sealed))
                self._state = _State.DONE
                return None
            case _:
                raise _out_of_order(message)


class JoinerPairing(_Machine):
    """The joiner's side: send ``hello``, then answer messages until ``store`` is set."""

    def __init__(self, party: Party, make_pake: MakePake, *, host: str = "") -> None:
        super().__init__(party, make_pake, is_host=False)
        self.store: TrustStore | None = None
        self.addresses: dict[str, str] = {}
        self.waiting_s = 0  # how long the host's person may take; 0: no person was asked yet
        self._wanted_host = host  # node id of the host, if the code names it

    @property
    def hello(self) -> bytes:
        """The first message to send."""
        return self._hellos[False]

    @property
    def proven(self) -> bool:
        """Whether the host has proven that it knows the code."""
        return self._state is _State.WELCOME

    def done(self) -> bytes:
        """Return the last message: the store is on disk."""
        assert self._state is _State.DONE, "the welcome comes first"
        return _encode(PairMessage(sealed=self._seal(to_wire(PairDone(), pb.PairDone))))

    def _receive(self, message: PairMessage, data: bytes) -> bytes | None:
        match self._state, message:
            case _State.HELLO, PairMessage(hello=PairHello() as hello):
                self._hear_hello(hello, data)
                if self._wanted_host and (self.other is None or self.other.node_id != self._wanted_host):
                    raise PairingRejected("another machine answered than the one that made the string", fact=_ATTACK)
                self._state = _State.ELEMENT
                return _encode(PairMessage(element=self._own_element()))
            case _State.ELEMENT, PairMessage(element=bytes() as element):
                self._hear_element(element)
                self._state = _State.CONFIRMATION
                return _encode(PairMessage(confirmation=self._confirmation(of_host=False)))
            case _State.CONFIRMATION, PairMessage(confirmation=bytes() as confirmation):
                self._hear_confirmation(confirmation)
                self._state = _State.WELCOME
                return None
            case _State.WELCOME, PairMessage(waiting=PairWaiting() as waiting):
                self.waiting_s = min(waiting.at_most_s, _MOST_WAITING_S)
                return None
            case _State.WELCOME, PairMessage(sealed=bytes() as sealed):
                self._hear_welcome(self._open(sealed))
                self._state = _State.DONE
                return None
            case _:
                raise _out_of_order(message)

    def _hear_welcome(self, data: bytes) -> None:
        welcome = from_wire(_parse(pb.PairWelcome(), data), PairWelcome)
        assert self.other is not None, "the greetings come first"
        store = read_store(welcome.trust.statements, cluster_id=self.other.cluster_id)
        host = store.peers.get(self.other.node_id)
        if self._party.key_pair.fingerprint not in store.peers or host is None or host.role is not Role.OWNER:
            raise PairingRejected("the host sent a cluster that this machine, or the host itself, is not in")
        self.store = store
        self.addresses = {entry.node_id: entry.address for entry in welcome.addresses if entry.node_id in store.peers}


_MOST_WAITING_S = 120
_ATTACK = "if you are sure that it was right, someone may be tampering"


def wrong_code() -> PairingRejected:
    """Return the error of both sides: a wrong code and a machine in the middle look the same."""
    return PairingRejected("wrong code", fact=_ATTACK, next_step="type the code as it is shown")


def refusal(error: EdgepipeError) -> bytes:
    """Return the message that ends an exchange."""
    return _encode(PairMessage(refusal=error))


def waiting(at_most_s: int) -> bytes:
    """Return the host's message that a person is being asked."""
    return _encode(PairMessage(waiting=PairWaiting(at_most_s=at_most_s)))


def _out_of_order(message: PairMessage) -> RemoteProtocolError:
    kind = next((field.name for field in fields(message) if getattr(message, field.name) is not None), None)
    return RemoteProtocolError("the pairing went out of step", fact=f"'{kind}' came at the wrong time")


def _encode(message: PairMessage) -> bytes:
    return to_wire(message, pb.PairMessage).SerializeToString()


def _decode(data: bytes) -> PairMessage:
    return from_wire(_parse(pb.PairMessage(), data), PairMessage)


def _parse(into: M, data: bytes) -> M:
    try:
        into.ParseFromString(data)
    except DecodeError as exc:
        raise RemoteProtocolError("a message of the pairing cannot be read", fact=plain(exc)) from exc
    return into


def _name(text: str) -> str:
    if len(text) > _MAX_NAME_CHARS or not text.isprintable():
        raise RemoteProtocolError("the greeting holds a name that cannot be shown")
    return text
