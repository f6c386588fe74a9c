"""Trust, pairing and peers as values."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first statement of every cluster: its signer owns it."""

    cluster_name: str = ""
    nonce: bytes = b""  # 16 random bytes: two clusters of one founder differ
    certificate: bytes = b""  # PEM, of the signer
    node_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Lets a node in."""

    certificate: bytes = b""  # PEM
    role: str = ""  # "owner" | "member"; the highest of valid statements counts
    node_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Shuts a key out for ever. Of all that it signed, only ``kept`` still counts."""

    node_id: NodeId
    kept: tuple[bytes, ...] = ()  # SHA-256 of bodies that ``node_id`` signed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustBody:
    """What an owner states."""

    cluster_id: str = ""  # hash of the founding statement; empty in that statement
    signer: str = ""  # node id of the owner
    made_ms: int = 0  # signer's clock, since 1970; for people only
    number: int = 0  # number of this signer's statement, from 1
    statement: Found | Add | Remove | None = None  # None: of a later version


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStatement:
    """A signed ``TrustBody``; see the .proto for the signature."""

    body: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustSet:
    """The statements of a trust store, or of a piece of one."""

    statements: tuple[TrustStatement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAddress:
    """Where a node answered; a hint, which proves nothing."""

    node_id: NodeId
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairHello:
    """First message of a pairing, both ways."""

    protocol_version: int = 0
    edgepipe_version: str = ""
    nonce: bytes = b""  # 16 bytes
    certificate: bytes = b""  # PEM
    node_name: str = ""
    cluster_id: str = ""  # host only
    cluster_name: str = ""  # host only


@dataclass(frozen=True, slots=True, kw_only=True)
class PairWaiting:
    """The host's person is being asked."""

    at_most_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairWelcome:
    """What the host tells a joiner, under the agreed key."""

    trust: TrustSet
    addresses: tuple[KnownAddress, ...] = ()  # present addresses of members


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDone:
    """The joiner has stored what it got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMessage:
    """A message of a pairing: exactly one field is set."""

    hello: PairHello | None = None  # 1 both ways
    element: bytes | None = None  # 2 both ways: SPAKE2
    confirmation: bytes | None = None  # 3 both ways: HMAC of the transcript
    sealed: bytes | None = None  # 4 host: PairWelcome; joiner: PairDone; under the agreed key
    refusal: EdgepipeError | None = None  # set instead of any of them
    waiting: PairWaiting | None = None  # host, between its confirmation and ``sealed``: a person is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteStart:
    """Opens a pairing window."""

    role: str = ""  # role of the joiner; empty: owner for the second machine of a cluster, member for others
    valid_s: int = 0
    long_string: bool = False
    accept_all: bool = False  # accept without asking


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteAnswer:
    """The person's answer to ``InviteAsks``."""

    accept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteCommand:
    """A message of the command line to its daemon while a pairing window is open."""

    command: InviteStart | InviteAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteOpened:
    """The window is open."""

    code: str = ""  # code as shown to people
    address: str = ""  # HOST:PORT of the pairing port
    valid_s: int = 0
    cluster_name: str = ""
    usual_port: bool = False  # the default port: the joiner needs no port


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteFailed:
    """A joiner used a wrong code."""

    address: str = ""
    name: str = ""
    error: EdgepipeError
    tries_left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteAsks:
    """A joiner waits for the person's answer."""

    name: str = ""
    address: str = ""
    node_id: NodeId
    at_most_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteJoined:
    """A node has joined."""

    name: str = ""
    address: str = ""
    node_id: NodeId
    role: str = ""
    silent: bool = False  # it sent no confirmation
    wanted_name: str = ""  # its own name, if another machine has that name


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteEvent:
    """A message of the daemon to the command line while a pairing window is open."""

    event: InviteOpened | InviteFailed | InviteAsks | InviteJoined


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Asks a node to join another cluster."""

    code: str = ""
    host: str = ""
    port: int = 0
    new_identity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinWaiting:
    """The host's person is being asked."""

    host_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinDone:
    """The node has joined."""

    cluster_name: str = ""
    num_peers: int = 0  # others in the cluster
    node_name: str = ""  # name in the cluster
    wanted_name: str = ""  # its own name, if another machine has that name


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEvent:
    """Progress of a node that joins another cluster."""

    event: JoinWaiting | JoinDone


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """A member of the cluster."""

    node_id: NodeId
    name: str = ""
    role: str = ""
    state: str = ""  # "alive" | "suspect" | "dead" | "asleep" | "left" | "unseen"
    address: str = ""  # present or last
    added_ms: int = 0
    added_by: str = ""  # name or id
    self: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPeersReply:
    """The members of the cluster."""

    cluster_id: str = ""
    cluster_name: str = ""
    node_id: NodeId
    peers: tuple[PeerState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovePeerReply:
    """Who was removed."""

    name: str = ""
    others: tuple[str, ...] = ()
