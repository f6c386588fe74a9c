"""Models that requests want are loaded in turn: none is dropped, and no user keeps the others from loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.daemon.processes.load_turns import MOST_LOADING, MOST_PER_OWNER, MOST_WAITING, PATIENCE_S, LoadTurns
from edgepipe.errors import CapacityError, NoFeasiblePlacement
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.models import ModelTable
from edgepipe.testing.clock import START_S
from edgepipe.wire.children import LoadFailed, LoadQueue, LoadWanted
from tests.support.daemon.gateway_children import GatewayChild, gateway_keeper, settled


async def _want(child: GatewayChild, *models: str, owner: str = "") -> None:
    for model in models:
        child.on_report(LoadWanted(model=model, owner=owner))
    await settled()


async def test_a_fifth_model_waits_and_is_loaded_once_another_is(tmp_path: Path) -> None:
    async with gateway_keeper(tmp_path) as (_, children, loads):
        child = children.all[0]
        await _want(child, "a", "b", "c", "d", "e", "f", "e")
        assert loads.begun == ["a", "b", "c", "d"]
        assert child.newest(LoadQueue) == LoadQueue(loading=("a", "b", "c", "d"), waiting=("e", "f"))
        await loads.end("b")
        assert loads.begun[4:] == ["e"]
        await loads.end("c", NoFeasiblePlacement("no room"))
        assert loads.begun[4:] == ["e", "f"]
        assert child.newest(LoadFailed).model == "c"
        assert child.newest(LoadQueue) == LoadQueue(loading=("a", "d", "e", "f"))


async def test_one_user_s_models_do_not_keep_another_s_from_loading(tmp_path: Path) -> None:
    async with gateway_keeper(tmp_path) as (_, children, loads):
        child = children.all[0]
        await _want(child, "a1", "a2", "a3", "a4", "a5", "a6", owner="a")
        await _want(child, "b1", "b2", owner="b")
        assert loads.begun == ["a1", "a2", "a3", "a4", "b1"]
        assert child.newest(LoadQueue).waiting == ("b2", "a5", "a6")
        await loads.end("a1")
        assert loads.begun[-1] == "b2"
        await _want(child, "c1", owner="c")
        await loads.end("a2")
        assert loads.begun[-1] == "c1"


async def test_a_gateway_that_starts_again_knows_what_loads_and_hears_why_not(tmp_path: Path) -> None:
    async with gateway_keeper(tmp_path) as (keeper, children, loads):
        await _want(children.all[0], "a", "b", "c", "d", "e")
        await keeper.start()
        child = children.all[1]
        assert child.newest(LoadQueue) == LoadQueue(loading=("a", "b", "c", "d"), waiting=("e",))
        await loads.end("a", NoFeasiblePlacement("no room"))
        assert child.newest(LoadFailed).model == "a"


async def test_beyond_the_most_that_may_wait_the_user_with_the_most_is_told_so(tmp_path: Path) -> None:
    async with gateway_keeper(tmp_path) as (_, children, _loads):
        child = children.all[0]
        await _want(child, *(f"a{index}" for index in range(MOST_PER_OWNER + MOST_WAITING)), owner="a")
        await _want(child, "b1", "b2", owner="b")
        refused = child.newest(LoadFailed)
        assert refused.model == f"a{MOST_PER_OWNER + MOST_WAITING - 1}"
        assert refused.error.http_status == 503
        assert str(MOST_WAITING) in refused.error.fact
        assert "b2" in child.newest(LoadQueue).waiting


@pytest.mark.parametrize(
    ("queue", "fact"),
    [
        (LoadQueue(), "its load has not begun"),
        (LoadQueue(loading=("big",)), "it loads"),
        (
            LoadQueue(loading=("a", "b"), waiting=("c", "big", "d")),
            "it is number 2 of 3 that wait while others load: a, b",
        ),
    ],
    ids=["unknown", "loading", "waiting"],
)
async def test_a_client_whose_model_is_late_reads_what_is_so(queue: LoadQueue, fact: str) -> None:
    asked: list[tuple[str, str]] = []
    loads = ModelLoads(ModelTable(), load=lambda *wanted: asked.append(wanted), wait_s=0.01)
    loads.update(["big"])
    loads.queue = queue
    with pytest.raises(CapacityError) as late:
        await loads.entry("big", owner="me")
    assert late.value.http_status == 503
    assert late.value.fact.startswith(fact)
    assert asked == [("big", "me")]


def test_a_model_that_nobody_wants_any_more_waits_no_longer() -> None:
    turns = LoadTurns()
    for model in "abcdef":
        turns.want(model, "", now_s=START_S)
    turns.want("f", "", now_s=START_S + PATIENCE_S)
    assert turns.ended("a", now_s=START_S + PATIENCE_S + 1).start == ("f",)
    assert turns.waiting == ()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abc"), st.integers(0, 15)),
        st.tuples(st.just("end"), st.integers(0, MOST_LOADING - 1)),
    ),
    max_size=120,
)


@given(STEPS)
def test_in_any_history_all_get_their_turn(steps: list[tuple[str, int]]) -> None:
    turns = LoadTurns()
    loading: list[str] = []
    wanted: set[str] = set()
    for owner, number in steps:
        if owner == "end":
            if loading:
                model = loading.pop(number % len(loading))
                wanted.discard(model)
                loading += turns.ended(model, now_s=START_S).start
        else:
            decision = turns.want(f"{owner}{number}", owner, now_s=START_S)
            wanted.add(f"{owner}{number}")
            wanted.discard(decision.refused)
            loading += decision.start
        assert list(turns.loading) == loading
        assert len(loading) <= MOST_LOADING
        assert len(turns.waiting) <= MOST_WAITING
        assert all(sum(model[0] == each for model in loading) <= MOST_PER_OWNER for each in "abc")
        assert {*loading, *turns.waiting} == wanted
    while loading:
        model = loading.pop(0)
        wanted.discard(model)
        loading += turns.ended(model, now_s=START_S).start
    assert not wanted
