"""A cluster's trust as a world of machines that each know a part of what was said, some of them turned.

Statements are made without keys: who says what is what matters here, and a turned machine can say only in its own
name. ``check`` holds what must be true whoever says what in which order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgepipe.cluster.standing import Standing, stand
from edgepipe.cluster.statements import Statement, key_of
from edgepipe.cluster.trust import TrustStore, is_owner, store_of
from edgepipe.ids import NodeId
from edgepipe.security.certificates import Certificate, Fingerprint
from edgepipe.security.trust_view import Role

HONEST = tuple(map(NodeId, ("f", "g", "h", "i")))  # f founds the cluster
TURNED = tuple(map(NodeId, ("r", "s", "t")))  # machines that were let in, or were not, and are against it
EVERYBODY = (*HONEST, *TURNED)


def made(
    signer: NodeId,
    about: NodeId,
    *,
    role: Role | None = None,
    number: int,
    kept: Iterable[bytes] = (),
    founds: str = "",
) -> Statement:
    """A statement; equal ones have equal keys."""
    kept = frozenset(kept)
    body = repr((signer, about, role, number, sorted(kept), founds)).encode()
    return Statement(
        body=body,
        signature=b"",
        key=key_of(body),
        signer=signer,
        about=about,
        role=role,
        certificate=Certificate(pem=b"", fingerprint=Fingerprint(about)) if role is not None else None,
        name=about,
        founds=founds,
        cluster_id="home",
        made_ms=number,
        number=number,
        kept=kept,
    )


FOUNDING = made(HONEST[0], HONEST[0], role=Role.OWNER, number=1, founds="home")


@dataclass(slots=True)
class TrustWorld:
    """What was said so far, and what each honest machine has heard of it."""

    stores: dict[NodeId, TrustStore] = field(
        default_factory=lambda: {
            honest: store_of(FOUNDING, []) for honest in HONEST
        }  # they know of the cluster at least
    )
    said: list[Statement] = field(default_factory=list[Statement])
    late: set[bytes] = field(default_factory=set[bytes])  # said by a turned machine after an honest one removed it
    expelled: dict[NodeId, list[Statement]] = field(default_factory=dict[NodeId, list[Statement]])

    def add(self, by: NodeId, about: NodeId, role: Role) -> None:
        """An honest owner lets a machine in, or promotes it; a machine that is let in hears all that its host knows."""
        store = self.stores[by]
        if is_owner(store, by) and about not in store.removed and about != by:
            self._say(by, [made(by, about, role=role, number=store.next_number(by))])
            if about in self.stores:
                self.tell(by, about)

    def remove(self, by: NodeId, about: NodeId, *, keep_added: bool) -> None:
        """An honest owner removes a machine."""
        store = self.stores[by]
        if is_owner(store, by) and about in store.peers and about != by:
            number = store.next_number(by)
            gone = store.removals_for(about, remover=by, keep_added=keep_added)
            removals = [made(by, who, number=number + at, kept=kept) for at, (who, kept) in enumerate(gone)]
            self._say(by, removals)
            for removal in removals:
                self.expelled.setdefault(removal.about, []).append(removal)

    def lie(
        self, by: NodeId, about: NodeId, role: Role | None, *, number: int, kept: Sequence[int], to: Iterable[NodeId]
    ) -> None:
        """A turned machine says anything, to whomever it reaches. ``kept``: of the statements that were ever made."""
        keys = [self.said[at % len(self.said)].key for at in kept] if self.said else []
        if role is None and about == by:
            return  # refused by its form
        statement = made(by, about, role=role, number=number, kept=keys if role is None else ())
        if by in self.expelled and statement not in self.said:
            self.late.add(statement.key)
        self._note(statement)
        for who in to:
            self._hear(who, [statement])

    def tell(self, speaker: NodeId, hearer: NodeId) -> None:
        """An honest machine tells another all that it holds. Whether they would still talk does not matter here:
        somebody can always carry it."""
        self._hear(hearer, self.stores[speaker].statements.values())

    def check(self, rng: random.Random) -> None:
        """What must be true at any time. Raises AssertionError."""
        self._check_order(rng)
        self._check_turned()

    def _check_order(self, rng: random.Random) -> None:
        """The order in which statements are heard makes no difference."""
        whole = store_of(FOUNDING, self.said)
        shuffled = rng.sample(self.said, len(self.said))
        store = store_of(FOUNDING, [])
        for start in range(0, len(shuffled), 4):
            store = store_of(FOUNDING, [*store.statements.values(), *shuffled[start : start + 4]])
        assert store.digest == whole.digest
        assert (store.peers, store.removed) == (whole.peers, whole.removed)

    def _check_turned(self) -> None:
        """What a machine says after an elder removed it changes nothing, unless that very removal keeps it, nor does
        anybody whom only it vouches for."""
        late = set(self.late)
        late |= {
            statement.key
            for statement in self.said
            if statement.signer in TURNED and statement.signer not in self._let_in()
        }
        while True:
            without = stand(FOUNDING, [statement for statement in self.said if statement.key not in late])
            rest = {
                statement.key for statement in self.said if statement.key in late and self._is_bound(statement, without)
            }
            if rest == late:
                break
            late = rest  # removed by somebody younger, or the removal fell with who said it: not what is claimed here
        now = stand(FOUNDING, self.said)
        assert now.peers == without.peers
        assert now.removed == without.removed

    def _let_in(self) -> set[NodeId]:
        """Whom somebody let in whom somebody let in, up to the founder."""
        let_in, before = {HONEST[0]}, 0
        while len(let_in) > before:
            before = len(let_in)
            adds = (
                statement for statement in self.said if statement.role is not None and statement.key not in self.late
            )
            let_in |= {statement.about for statement in adds if statement.signer in let_in}
        return let_in

    def _is_bound(self, statement: Statement, without: Standing) -> bool:
        """Whether its signer has no say, or an elder's removal that counts does not keep it."""
        who, ranks = statement.signer, without.ranks
        if who not in ranks:
            return True
        counting = {removal.key for removal in without.counting}
        return any(
            removal.key in counting and ranks[removal.signer] < ranks[who] and statement.key not in removal.kept
            for removal in self.expelled.get(who, ())
        )

    def _say(self, by: NodeId, statements: list[Statement]) -> None:
        for statement in statements:
            self._note(statement)
        self._hear(by, statements)

    def _note(self, statement: Statement) -> None:
        if statement not in self.said:
            self.said.append(statement)

    def _hear(self, who: NodeId, statements: Iterable[Statement]) -> None:
        held = self.stores[who].statements
        new = [statement for statement in statements if statement.key not in held]
        if new:
            self.stores[who] = store_of(FOUNDING, [*held.values(), *new])


def play(rng: random.Random, *, steps: int) -> TrustWorld:
    """A random history of a cluster of four that lets turned machines in and removes them."""
    world = TrustWorld()
    founder, roles = HONEST[0], (Role.OWNER, Role.MEMBER)
    for about in rng.sample(EVERYBODY[1:], rng.randint(2, 5)):
        world.add(founder, about, rng.choice(roles))
    for _ in range(steps):
        kind = rng.random()
        if kind < 0.15:
            world.add(rng.choice(HONEST), rng.choice(EVERYBODY), rng.choice(roles))
        elif kind < 0.35:
            world.remove(rng.choice(HONEST), rng.choice((*TURNED, *EVERYBODY)), keep_added=rng.random() < 0.5)
        elif kind < 0.55:
            world.tell(*rng.sample(HONEST, 2))
        else:
            world.lie(
                rng.choice(TURNED),
                rng.choice(EVERYBODY),
                rng.choice((None, None, *roles)),
                number=rng.choice((0, 1, 2, 99)),
                kept=[rng.randrange(99) for _ in range(rng.randint(0, 6))],
                to=rng.sample(HONEST, rng.randint(0, 2)),
            )
    return world
