"""Which requests are suspected, and refused, when epochs end before they get further."""

from __future__ import annotations

from edgepipe.engine.progress import Stalls
from edgepipe.engine.settings import MOST_STALLS
from edgepipe.ids import NodeId, RequestId, RequestKey

B, C = NodeId("b"), NodeId("c")


def keys(names: str) -> frozenset[RequestKey]:
    return frozenset(RequestKey(NodeId("g"), RequestId(name)) for name in names)


def test_a_request_that_never_gets_further_is_suspected_then_refused_with_the_nodes_that_tried_it() -> None:
    stalls = Stalls()
    (x,) = keys("x")
    verdicts = [stalls.count(keys("x"), node_id) for node_id in (B, B, C, C)]
    assert [verdict.suspects for verdict in verdicts] == [keys(""), keys("x"), keys("x"), keys("")]
    assert [verdict.refused for verdict in verdicts] == [None, None, None, x]
    assert verdicts[-1].nodes == (B, B, C, C)
    assert stalls.count(keys("x"), B).refused is None, "it starts anew"


def test_all_that_stalled_are_tried_apart_once_one_of_them_did_so_twice() -> None:
    stalls = Stalls()
    assert not stalls.count(keys("x"), B).suspects
    assert stalls.count(keys("xy"), B).suspects == keys("xy")


def test_a_request_that_got_further_or_ended_is_forgotten_and_one_that_waited_is_not() -> None:
    stalls = Stalls()
    for _ in range(MOST_STALLS - 1):
        stalls.count(keys("xyz"), B)
    stalls.keep_only(keys("xy"))
    verdict = stalls.count(keys("x"), B)
    assert verdict.refused in keys("x")
    assert verdict.suspects == keys("y")


def test_at_most_one_request_is_refused_after_an_epoch() -> None:
    stalls = Stalls()
    refused = [stalls.count(keys("xy"), B).refused for _ in range(MOST_STALLS)]
    assert len([key for key in refused if key is not None]) == 1


def test_a_stage_at_fault_clears_the_requests_of_its_steps() -> None:
    stalls = Stalls()
    for _ in range(MOST_STALLS - 1):
        stalls.count(keys("xy"), B)
    stalls.forget(keys("x"))
    assert stalls.count(keys("xy"), B).refused in keys("y")
    assert stalls.in_all_of(1, keys("x"))
    assert not stalls.in_all_of(2, keys("x"))


def test_the_record_of_a_request_stays_small_without_verdicts() -> None:
    stalls = Stalls()
    for _ in range(1000):
        stalls.note(keys("x"), B)
    assert len(stalls.count(keys("x"), B).nodes) <= MOST_STALLS + 2
