"""Both sides of a pairing in one process, a stand-in for SPAKE2, and damaged messages from a seed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from edgepipe.cluster.codes import host_pake, joiner_pake
from edgepipe.cluster.pairing import NONCE_BYTES, HostPairing, JoinerPairing, MakePake, Party
from edgepipe.cluster.statements import NONCE_BYTES as FOUNDING_NONCE_BYTES
from edgepipe.cluster.trust import TrustStore, add_statement, found_cluster, merge
from edgepipe.errors import EdgepipeError
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.security.trust_view import Role
from edgepipe.wire.common import Hello

CODE = b"48219037"


@dataclass(frozen=True, slots=True)
class StubPake:
    """Not secure: the key is a hash of the password, both identities and both elements, at no cost in time."""

    password: bytes
    joiner: bytes
    host: bytes

    def start(self) -> bytes:
        """An element of the right length."""
        return b"S" + bytes(32)

    def finish(self, element: bytes, /) -> bytes:
        """Raises ValueError for anything but a stub's element."""
        if element != self.start():
            raise ValueError("no element")
        return hashlib.sha256(self.password + self.joiner + self.host).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingLab:
    """A host with a cluster of its own and a machine that wants to join."""

    host_key: KeyPair
    joiner_key: KeyPair
    store: TrustStore
    stubbed: bool

    @classmethod
    def make(cls, *, stubbed: bool = False) -> PairingLab:
        """Fresh keys and a cluster 'home'."""
        host, nonce = make_key_pair(), bytes(FOUNDING_NONCE_BYTES)
        store = found_cluster(name="home", node_name="gamer", founder=host, nonce=nonce, now_ms=0)
        return cls(host_key=host, joiner_key=make_key_pair(), store=store, stubbed=stubbed)

    def host(self, *, code: bytes = CODE, nonce: bytes = bytes(NONCE_BYTES)) -> HostPairing:
        """The host's side."""
        hello = Hello(
            role="node",
            node_name="gamer",
            cluster_id=self.store.cluster_id,
            cluster_name=self.store.cluster_name,
        )
        party = Party(code=code, key_pair=self.host_key, hello=hello, nonce=nonce)
        return HostPairing(party, self._pake(host_pake))

    def joiner(self, *, code: bytes = CODE, nonce: bytes = bytes(NONCE_BYTES), host: str = "") -> JoinerPairing:
        """The joiner's side."""
        hello = Hello(role="node", node_name="studio")
        party = Party(code=code, key_pair=self.joiner_key, hello=hello, nonce=nonce)
        return JoinerPairing(party, self._pake(joiner_pake), host=host)

    def with_joiner(self) -> TrustStore:
        """The store with the joiner let in."""
        certificate = self.joiner_key.certificate
        added = add_statement(
            self.store, signer=self.host_key, certificate=certificate, role=Role.MEMBER, name="studio", now_ms=1
        )
        return merge(self.store, [added]).store

    def _pake(self, real: MakePake) -> MakePake:
        return StubPake if self.stubbed else real


def fuzz_exchange(lab: PairingLab, rng: random.Random) -> str:
    """One exchange in which some message is damaged, doubled, dropped, reordered or invented.

    What came of it: "joined", or the code of the error that ended it. Any other exception is a bug and comes through.
    """
    host, joiner = lab.host(), lab.joiner()
    to_host: list[bytes] = [joiner.hello]
    to_joiner: list[bytes] = []
    try:
        for _ in range(12):
            if to_host:
                reply = host.receive(damaged(to_host.pop(0), rng))
                to_joiner += [reply] if reply is not None else []
                if host.confirmed and joiner.store is None:
                    to_joiner.append(host.welcome(lab.with_joiner(), {}))
            if to_joiner:
                reply = joiner.receive(damaged(to_joiner.pop(0), rng))
                to_host += [reply] if reply is not None else []
            if joiner.store is not None:
                host.receive(joiner.done())
                return "joined"
            if rng.random() < 0.05 and (to_host or to_joiner):
                (to_host or to_joiner).append(rng.randbytes(rng.randrange(64)))
    except EdgepipeError as error:
        return error.code
    return "stuck"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data``, in two cases of three changed: a bit flipped, cut, grown, doubled, or other bytes altogether."""
    kind = rng.randrange(12)
    if not data or kind < 4:
        return data
    at = rng.randrange(len(data))
    if kind < 7:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 7:
        return data[:at]
    if kind == 8:
        return data + rng.randbytes(rng.randrange(1, 40))
    if kind == 9:
        return data[:at] + rng.randbytes(rng.randrange(1, 8)) + data[at:]
    if kind == 10:
        return data + data
    return rng.randbytes(rng.randrange(200))
