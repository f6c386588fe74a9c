"""Nodes that are announced on the network: which of them are strangers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edgepipe.cluster.discovery import Announcement
from edgepipe.daemon.network.neighbours import Neighbours


class _World:
    def __init__(self) -> None:
        self.members: list[str] = []
        trust: Any = SimpleNamespace(outbound=lambda: [SimpleNamespace(node_id=name) for name in self.members])
        self.dialled: list[str] = []
        self.neighbours = Neighbours(trust=trust, dial=lambda _address, node_id: self.dialled.append(node_id))

    def announce(self, node_id: str, *, host: str = "10.0.0.2") -> None:
        self.neighbours.found(
            Announcement(
                cluster_id="c",
                cluster_name="home",
                node_id=node_id,
                node_name="attic",
                host=host,
                port=7117,
                incarnation=1,
            )
        )

    def strangers(self) -> list[str]:
        return [other.node_id for other in self.neighbours.others()]


def test_a_machine_that_is_let_in_is_no_stranger_from_then_on() -> None:
    world = _World()
    world.announce("attic")
    assert world.strangers() == ["attic"]
    world.members.append("attic")
    assert world.strangers() == []


def test_a_machine_that_comes_back_with_a_new_key_is_listed_once() -> None:
    world = _World()
    world.announce("old")
    world.announce("new")
    world.announce("other", host="10.0.0.3")
    assert world.strangers() == ["new", "other"]
    world.members.append("new")
    world.announce("new")
    assert world.strangers() == ["other"]
    assert world.dialled == ["new"]
