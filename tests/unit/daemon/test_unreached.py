"""Which nodes a placement leaves out, as a table: failed ways in, nodes with the way that is named out."""

from __future__ import annotations

import pytest

from edgepipe.daemon.serving.unreached import left_out
from edgepipe.ids import NodeId

CASES = {
    "everything is open": ("", {}),
    "the member's firewall": ("ab", {"b": "ab"}),
    "no way between two": ("ab ba", {"b": "ab"}),
    "a member's firewall, seen by all": ("ab cb", {"b": "ab"}),
    "this machine's own firewall": ("ba ca", {"b": "ba", "c": "ca"}),
    "the member's firewall stops its own processes, too": ("ab bb cb", {"b": "ab"}),
    "this machine's firewall stops its own processes": ("aa", {"a": "aa"}),
    "two others do not meet": ("bc cb", {"c": "bc"}),
    "two members behind firewalls": ("ab ac bc cb", {"c": "ac", "b": "ab"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fewest_nodes_are_left_out_and_this_one_last(case: str) -> None:
    ways, wanted = CASES[case]
    unreached = [(NodeId(way[0]), NodeId(way[1])) for way in ways.split()]
    found = left_out(unreached, own=NodeId("a"))
    assert {node: "".join(way) for node, way in found.items()} == wanted
    assert not [way for way in unreached if not set(way) & set(found)]
