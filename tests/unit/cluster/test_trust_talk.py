"""How two members' trust stores become one over their heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cluster.beats import Conversation, Speaker
from edgepipe.cluster.founding import found_local_cluster, open_trust
from edgepipe.cluster.membership import Membership
from edgepipe.cluster.trust_keeper import MAX_PIECE_STATEMENTS, TrustKeeper
from edgepipe.config import Timeouts
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.trust_view import Role
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.codec import to_wire
from edgepipe.wire.common import Hello
from edgepipe.wire.nodes import Beat, NodeState
from edgepipe.wire.trust import TrustStatement
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.cluster.member_simulation import LIMITS

BEAT_S = 0.25


class Side:
    """One end of a stream of heartbeats."""

    def __init__(self, keeper: TrustKeeper, clock: FakeClock) -> None:
        self.keeper, self.clock = keeper, clock
        self.conversation = Conversation()
        self.speaker = Speaker(
            membership=Membership(node_id=keeper.node_id, incarnation=1, address="", limits=LIMITS),
            hello=Hello(role="node", node_id=keeper.node_id, node_name="x"),
            trust=keeper,
            state=lambda: NodeState(node_id=keeper.node_id),
            clock=clock,
            timeouts=Timeouts.loopback(),
        )

    def says(self) -> Beat:
        return self.speaker.beat(self.conversation)

    async def hears(self, beat: Beat, source: TrustKeeper) -> None:
        if beat.trust_digest:
            self.conversation.heard_digest = beat.trust_digest
            statements = sent_in(beat)
            self.conversation.heard_statements(statements)
            await self.keeper.take_in(source.node_id, digest=beat.trust_digest, statements=statements)
        self.conversation.heard_keys(beat.trust_keys) if beat.trust_keys else None


def sent_in(beat: Beat) -> tuple[TrustStatement, ...]:
    return beat.trust.statements if beat.trust is not None else ()


async def talk(first: Side, second: Side, *, at_most: int) -> int:
    """Beats until both hold the same; the largest is held against what a beat may have."""
    for count in range(at_most):
        if first.keeper.digest == second.keeper.digest:
            return count
        for speaker, hearer in ((first, second), (second, first)):
            beat = speaker.says()
            assert to_wire(beat, pb.Beat).ByteSize() < 600 << 10
            assert len(sent_in(beat)) <= MAX_PIECE_STATEMENTS
            await hearer.hears(beat, speaker.keeper)
        first.clock.advance(BEAT_S)
    raise AssertionError("they did not come to hold the same")


def sides(tmp_path: Path, clock: FakeClock) -> tuple[Side, Side]:
    found_local_cluster([tmp_path / name for name in "ab"], name="home")
    a, b = (open_trust(tmp_path / name, cluster="", node_name=name, clock=clock) for name in "ab")
    return Side(a, clock), Side(b, clock)


async def test_news_travel_in_the_next_beat_and_a_settled_pair_says_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    a, b = sides(tmp_path, clock)
    for _ in range(2):
        await b.hears(a.says(), a.keeper)
        await a.hears(b.says(), b.keeper)
    quiet = a.says()
    assert (quiet.trust_digest, quiet.trust_keys, quiet.trust) == (b"", (), None)
    await a.keeper.add(make_key_pair().certificate, role=Role.MEMBER, name="c")
    news = a.says()
    assert len(sent_in(news)) == 1
    await b.hears(news, a.keeper)
    assert b.keeper.digest == a.keeper.digest


async def test_stores_that_grew_apart_become_one_in_some_beats_however_large(tmp_path: Path) -> None:
    clock = FakeClock()
    a, b = sides(tmp_path, clock)
    await a.keeper.promote(a.keeper.find("b"))
    assert await talk(a, b, at_most=4) <= 3
    for number in range(90):
        await a.keeper.add(make_key_pair().certificate, role=Role.MEMBER, name=f"a{number}")
        await b.keeper.add(make_key_pair().certificate, role=Role.MEMBER, name=f"b{number}")
    fresh = Side(a.keeper, clock), Side(b.keeper, clock)
    assert await talk(*fresh, at_most=8) <= 5
    assert len(a.keeper.store.peers) == 182


async def test_a_pair_that_never_agrees_tells_its_keys_ever_more_seldom(tmp_path: Path) -> None:
    clock = FakeClock()
    a, _ = sides(tmp_path, clock)
    num_told = 0
    for number in range(4 * 600):  # ten minutes
        a.conversation.heard_digest = number.to_bytes(32)
        num_told += bool(a.says().trust_keys)
        clock.advance(BEAT_S)
    assert num_told < 20
    await a.keeper.add(make_key_pair().certificate, role=Role.MEMBER, name="c")
    assert sent_in(a.says()), "news is sent at once"


async def test_the_last_beat_to_a_removed_node_tells_it_why(tmp_path: Path) -> None:
    clock = FakeClock()
    a, b = sides(tmp_path, clock)
    await a.keeper.remove(a.keeper.find("b"), keep_added=None)
    await b.hears(a.speaker.farewell(a.conversation), a.keeper)
    assert not b.keeper.belongs


@pytest.mark.parametrize("keys", [[b"short"], [number.to_bytes(32) for number in range(9000)]])
async def test_keys_that_are_none_or_too_many_are_not_answered(tmp_path: Path, keys: list[bytes]) -> None:
    clock = FakeClock()
    a, _ = sides(tmp_path, clock)
    a.says()
    a.conversation.heard_keys(keys)
    assert not a.conversation.to_tell
    assert a.keeper.store.signed()
