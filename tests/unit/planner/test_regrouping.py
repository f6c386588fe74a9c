"""Another number of pipelines for a served model: which stay as they are, and when all machines are grouped anew."""

from __future__ import annotations

import pytest

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.regrouping import Regrouping, best_number, regrouped, with_more
from tests.support.worlds.planner import GB, machine, machines
from tests.unit.planner.test_replicas import CABLE, CONFIG, demand

FREE = Constraints()


def nodes(words: str) -> list[frozenset[NodeId]]:
    return [frozenset(NodeId(name) for name in word) for word in words.split()]


def words(found: Regrouping | None) -> str:
    return " ".join("".join(sorted(group)) for group in found.groups) if found is not None else ""


def to(count: int, devices: str, running: str, *, chats: int = 64) -> str:
    able = machines(devices, CONFIG)
    return words(regrouped(demand(chats), able, CABLE, FREE, running=nodes(running), count=count))


@pytest.mark.parametrize(
    ("count", "running", "expected"),
    [(3, "a", "a b c"), (3, "b", "b a c"), (2, "a b c", "a b"), (2, "c b a", "c b"), (1, "b c", "b")],
)
def test_pipelines_stay_where_they_are_on_equal_machines(count: int, running: str, expected: str) -> None:
    assert to(count, "3x rtx4090", running, chats=8 if count == 1 else 64) == expected


def test_the_slowest_ends_but_never_the_first() -> None:
    assert to(2, "rtx4090, m4pro, rtx4090", "a b c") == "a c"
    assert to(2, "m4pro, rtx4090, m4pro", "a b c") == "a b"


def test_a_pipeline_over_all_machines_leaves_some_to_the_second() -> None:
    found = to(2, "4x rtx4090", "abcd").split()
    assert len(found) == 2
    assert sum(map(len, found)) == len(set("".join(found)))


def test_machines_are_grouped_anew_if_that_gives_clearly_more() -> None:
    """The first pipeline runs on the slow machine and a fast one; each of three could have one of its own."""
    able = machines("m4pro, rtx4090, rtx4090", CONFIG)
    found = regrouped(demand(64), able, CABLE, FREE, running=nodes("ab"), count=2)
    assert set(words(found).split()) >= {"c"}
    assert found.layout.tokens_per_s > 0
    assert sum(found.layout.shares) == pytest.approx(1)


def test_more_than_fit_are_refused_with_the_number_that_does() -> None:
    able = [
        machine(name, "rtx4090", CONFIG, free_bytes=free * GB) for name, free in zip("abc", (18, 9, 9), strict=True)
    ]
    with pytest.raises(NoFeasiblePlacement, match="3 replicas do not fit on 3 machines"):
        regrouped(demand(8), able, CABLE, FREE, running=nodes("a"), count=3)
    assert words(regrouped(demand(8), able, CABLE, FREE, running=nodes("a"), count=2)) == "a bc"


def test_a_machine_that_joins_gets_a_pipeline_if_that_pays() -> None:
    able = machines("3x rtx4090", CONFIG)
    assert words(with_more(demand(128), able, CABLE, FREE, running=nodes("a b"))) == "a b c"
    assert words(with_more(demand(128), able, CABLE, FREE, running=nodes("c"))) == "c a b"
    assert with_more(demand(1), able, CABLE, FREE, running=nodes("a")) is None, "one chat needs no second pipeline"
    small = [*able[:2], machine("c", "rtx4090", CONFIG, free_bytes=2 * GB)]
    assert with_more(demand(128), small, CABLE, FREE, running=nodes("a b")) is None
    assert with_more(demand(128), able, CABLE, FREE, running=nodes("a x")) is None, "a machine of the second is away"


def test_the_best_number_is_that_of_a_model_served_anew() -> None:
    assert best_number(demand(64), machines("4x rtx4090", CONFIG), CABLE, FREE) > 1
    assert best_number(demand(1), machines("4x rtx4090", CONFIG), CABLE, FREE) == 1
