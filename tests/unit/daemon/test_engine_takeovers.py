"""A node with an engine is lost or does nothing, and some members lie: the model is served again all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.daemon.serving.takeover import DUTY_S, IDLE_S, PROVEN_S, VETO_S
from edgepipe.wire.serving import VouchReply
from tests.support.daemon.keeper_fleet import Fleet, P
from tests.support.engine.virtual_ring import in_virtual_time

SLACK_S = 4.0  # a look a second


def lost_head(folder: Path) -> Fleet:
    """The engine ran on the node with the greatest id, which has just died."""
    fleet = Fleet(folder)
    head = fleet.members[-1]
    fleet.serve(head)
    fleet.dead.add(head.name)
    return fleet


def test_the_first_living_member_takes_over_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = lost_head(tmp_path)
        assert await fleet.run(60.0, until=lambda: bool(fleet.hosts())) <= SLACK_S
        assert fleet.hosts() == [fleet.members[0].name]

    in_virtual_time(story())


@pytest.mark.parametrize("proof", [b"", b"x" * 70, bytes(1 << 16)], ids=["none", "invented", "long"])
def test_a_member_that_says_it_hears_the_dead_node_delays_the_model_and_no_more(tmp_path: Path, proof: bytes) -> None:
    async def story() -> None:
        fleet = lost_head(tmp_path)
        fleet.members[2].lie = lambda: VouchReply(hears=True, proof=proof)
        took_s = await fleet.run(120.0, until=lambda: bool(fleet.hosts()))
        assert VETO_S <= took_s <= VETO_S + SLACK_S
        assert fleet.hosts() == [fleet.members[0].name]

    in_virtual_time(story())


def test_members_whose_turn_it_is_and_who_do_nothing_delay_the_model_and_no_more(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = lost_head(tmp_path)
        for member in fleet.members[:2]:
            member.lie = VouchReply
        took_s = await fleet.run(120.0, until=lambda: bool(fleet.hosts()))
        assert 2 * DUTY_S <= took_s <= 2 * DUTY_S + SLACK_S
        assert fleet.hosts() == [fleet.members[2].name]

    in_virtual_time(story())


def test_a_member_that_takes_the_engine_over_and_runs_none_loses_it(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = lost_head(tmp_path)
        rogue = fleet.members[0]
        rogue.lie = VouchReply
        rogue.book.take_over(P)
        took_s = await fleet.run(240.0, until=lambda: bool(fleet.hosts()))
        assert took_s <= IDLE_S + DUTY_S + SLACK_S
        assert len(fleet.hosts()) == 1
        honest = [member for member in fleet.members[1:] if member.name not in fleet.dead]
        held = [member.book.held(P) for member in honest]
        assert {record.engine_node for record in held if record is not None} == {fleet.trust.node_id(fleet.hosts()[0])}

    in_virtual_time(story())


def test_a_broken_link_to_a_node_that_others_hear_moves_no_engine(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path)
        head, other = fleet.members[-1], fleet.members[0]
        fleet.serve(head)
        fleet.cut.add(frozenset((head.name, other.name)))
        await fleet.run(200.0)
        assert fleet.hosts() == [head.name]
        fleet.dead.add(head.name)
        assert await fleet.run(60.0, until=lambda: bool(fleet.hosts())) <= PROVEN_S + SLACK_S

    in_virtual_time(story())
