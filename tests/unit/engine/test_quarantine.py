"""Connections that could not be made: what they quarantine, and what people are told."""

from __future__ import annotations

import pytest

from edgepipe.engine.placing import Nodes
from edgepipe.engine.quarantine import Missed, Quarantine
from edgepipe.engine.sites import StageSite
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.testing.clock import START_S
from edgepipe.wire.engines import ServeSpec, StagePlacement

SLICES = make_slices([LayerRange(0, 2), LayerRange(2, 4)], 4)
NODES = Nodes(addresses={NodeId("a"): "10.0.0.1:7117", NodeId("b"): "10.0.0.2:7117"}, names={})


def site(index: int, *, port: int = 7119) -> StageSite:
    """Stage 0 on gamer, stage 1 on mac."""
    return StageSite(
        index=index,
        node_id=NodeId("ab"[index]),
        node_name=("gamer", "mac")[index],
        address=f"10.0.0.{index + 1}:{port}",
        slices=(SLICES[index],),
        backend="",
        device="",
        weight_bytes=0,
        kv_block_bytes=1,
        max_blocks=1,
    )


def placed(order: str) -> ServeSpec:
    stages = [
        StagePlacement(node_id=NodeId(node_id), slices=(part,)) for node_id, part in zip(order, SLICES, strict=True)
    ]
    return ServeSpec(model="m", stages=tuple(stages[::-1]))


def test_a_link_that_failed_is_not_used_in_its_direction_for_a_while() -> None:
    quarantine = Quarantine()
    quarantine.note(Missed(links=((site(0), site(1)),)), START_S)
    assert not quarantine.allows(placed("ab"), START_S + 1.0)
    assert quarantine.allows(placed("ba"), START_S + 1.0)
    assert not quarantine.nodes(START_S + 1.0)
    [quarantined] = quarantine.left_out(START_S + 10.0)
    assert (quarantined.node_id, quarantined.other_id, quarantined.seconds) == ("a", "b", 20.0)
    assert quarantined.reason == "no connection could be made in that direction"
    assert quarantine.allows(placed("ab"), START_S + 30.0)
    assert not quarantine.left_out(START_S + 30.0)


@pytest.mark.parametrize("between", [Missed(), Missed(sites=(site(0),))], ids=["an epoch stood", "another one"])
def test_a_node_that_the_engine_does_not_reach_is_left_out_after_the_second_time_in_a_row(between: Missed) -> None:
    quarantine = Quarantine()
    for missed in (Missed(sites=(site(1),)), between, Missed(sites=(site(1),))):
        quarantine.note(missed, START_S)
        assert quarantine.allows(placed("ab"), START_S)
    quarantine.note(Missed(sites=(site(1),)), START_S)
    assert quarantine.nodes(START_S).keys() == {"b"}
    assert not quarantine.allows(placed("ab"), START_S)


def test_a_node_that_is_lost_three_times_within_minutes_is_left_out_with_the_newest_reason() -> None:
    quarantine = Quarantine()
    for lost_s, reason in ((0.0, "its connection broke"), (20.0, "it answers no more")):
        assert not quarantine.lost(NodeId("b"), reason, START_S + lost_s)
        assert quarantine.allows(placed("ab"), START_S + lost_s)
    assert quarantine.lost(NodeId("b"), "it restarted", START_S + 40.0)
    [left_out] = quarantine.left_out(START_S + 45.0)
    assert (left_out.node_id, left_out.other_id, left_out.seconds, left_out.reason) == ("b", None, 25.0, "it restarted")
    assert not quarantine.allows(placed("ab"), START_S + 45.0)


def test_both_machines_are_named_and_the_ports_to_be_opened() -> None:
    error = Missed(links=((site(0), site(1)),)).error(NODES, engine="studio")
    assert error.lines() == [
        "gamer does not reach mac (stage 1)",
        "no connection to 10.0.0.2:7119 could be made from there, though studio reaches both",
        "let TCP ports 7118-7132 through the firewall of mac, at least from gamer: see 'edgepipe doctor' on gamer",
    ]
    error = Missed(sites=(site(1, port=40001),)).error(NODES, engine="gamer")
    assert error.what == "gamer does not reach mac"
    assert "let TCP port 40001 through the firewall of mac" in error.next_step
    error = Missed(sites=(site(1),)).error(NODES, engine="mac")
    assert error.lines() == [
        "mac does not reach its own ports (stage 1)",
        "no connection to 10.0.0.2:7119 could be made from the machine itself",
        "let TCP ports 7118-7132 through the firewall of mac, also from itself: see 'edgepipe doctor' on mac",
    ]
