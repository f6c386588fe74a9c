"""A model whose engine pauses after crashes: clients learn when it starts again, and nobody waits for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.errors import StageLost
from edgepipe.wire.nodes import ClusterView
from tests.support.gateways.fake_engine import FakeEngine, view_of
from tests.support.gateways.server import FixedClock, Served, serving

CRASH = StageLost(
    "the engine of 'tiny' ended again and again",
    fact="the last time: killed by SIGKILL, as the system does when memory runs out",
    next_step="it starts again by itself; at once with: edgepipe serve tiny",
)
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
}


def paused(served: Served, *, in_s: float) -> ClusterView:
    """The engine's node has said that it starts again in so many seconds."""
    view = view_of(served.address, names=("tiny",), state="waiting")
    starts_at_us = int((FixedClock().wall_s() + in_s) * 1e6)
    engines = (
        replace(model, engine=replace(model.engine, error=CRASH, starts_at_us=starts_at_us)) for model in view.served
    )
    return replace(view, served=tuple(engines))


@pytest.mark.parametrize("path", list(PATHS))
async def test_a_request_learns_when_the_engine_starts_again(path: str) -> None:
    async with serving(FakeEngine()) as served:
        served.gateway.update(paused(served, in_s=11.5))
        response = await served.http.post(path, json={"model": "tiny", "stream": False, **PATHS[path]})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "12"
        assert "starts again in 11.5 s" in response.text
        assert "SIGKILL" in response.text
        served.gateway.update(view_of(served.address, names=("tiny",)))
        assert (await served.chat(model="tiny")).status_code == 200


@pytest.mark.parametrize(("in_s", "after"), [(-50.0, "1"), (1e9, "300")], ids=["past", "far"])
async def test_a_node_with_a_wrong_clock_sends_no_client_away_for_long(in_s: float, after: str) -> None:
    async with serving(FakeEngine()) as served:
        served.gateway.update(paused(served, in_s=in_s))
        assert (await served.chat(model="tiny")).headers["retry-after"] == after


async def test_a_model_whose_next_engine_is_starting_is_not_unknown() -> None:
    """After a long pause this gateway has no requests of the model left. It had answered 404."""
    async with serving(FakeEngine(), names=()) as served:
        view = view_of("", names=("tiny",), state="recovering")
        served.gateway.update(view)
        response = await served.chat(model="tiny")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
