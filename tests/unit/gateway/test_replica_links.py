"""A model with two pipelines behind one gateway: fake engines, real streams and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edgepipe.errors import EdgepipeError, NoFeasiblePlacement, StageLost, StepFailed
from edgepipe.gateway.batches.store import FilesSettings
from edgepipe.gateway.engine_link import LinkLimits
from edgepipe.gateway.replica_links import ReplicaLinks
from edgepipe.gateway.ui.history import History
from edgepipe.gateway.ui.view import page_view
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId, RequestId
from edgepipe.sampling import SamplingParams
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.engines import EngineState, StageState
from edgepipe.wire.nodes import ClusterView, ServedModel
from edgepipe.wire.requests import Submission
from tests.support.gateways.batch_files import BatchUser, EchoEngine, completion_line, expected, jsonl, texts_of
from tests.support.gateways.fake_engine import CONTEXT, FakeEngine, start_engine
from tests.support.gateways.server import Served, serving

PIPELINES = (PipelineId("p1"), PipelineId("p2"))
LIMITS = LinkLimits(resume_window_s=5, again_s=0.05, patience_s=0.4)
ANSWER = "The capital of France is Paris."


def state_of(number: int, address: str, *, state: str = "ready", **more: Any) -> EngineState:
    stage = StageState(
        node_id=NodeId(f"n{number}"),
        node_name=f"n{number}",
        slices=(Slice(index=0, layers=LayerRange(0, 6), embedding=True, head=True),),
    )
    return EngineState(
        model="tiny",
        pipeline_id=PIPELINES[number - 1],
        epoch=Epoch(1, EngineId(f"engine-{number}")),
        state=state,
        address=address,
        context_length=CONTEXT,
        num_replicas=2,
        replica=number,
        stages=(stage,),
        num_blocks=100,
        free_blocks=100,
        block_size=16,
        **more,
    )


@dataclass(slots=True)
class Pair:
    """Two engines and their gateway."""

    served: Served
    engines: tuple[FakeEngine, FakeEngine]
    servers: list[Any]
    addresses: list[str]
    asking: list[asyncio.Task[Any]] = field(default_factory=list[asyncio.Task[Any]])

    def update(self, *engines: EngineState | None, stopped: tuple[str, ...] = ()) -> None:
        """What the daemon tells of the engines; None: it knows of none."""
        served = tuple(ServedModel(engine=engine, model_path="/nowhere") for engine in engines if engine is not None)
        self.served.gateway.update(ClusterView(cluster_id="test", served=served, stopped=stopped))

    def state(self, number: int, state: str = "ready", **more: Any) -> EngineState:
        return state_of(number, self.addresses[number - 1], state=state, **more)

    async def ask(self, text: str = "hi", **fields: Any) -> asyncio.Task[Any]:
        """Ask, and return once an engine has the request."""
        before = sum(len(engine.submits) for engine in self.engines)
        task = asyncio.create_task(self.served.chat(text, **fields))
        await until(lambda: sum(len(engine.submits) for engine in self.engines) > before)
        return task

    def where(self) -> tuple[int, int]:
        """Requests that each engine got so far."""
        return len(self.engines[0].submits), len(self.engines[1].submits)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - fakes do not notify
            await asyncio.sleep(0.01)


@asynccontextmanager
async def pair(
    engines: tuple[FakeEngine, FakeEngine] | None = None, *, files: FilesSettings | None = None, **fields: Any
) -> AsyncIterator[Pair]:
    engines = engines or (FakeEngine(**fields), FakeEngine(engine_id="engine-2", **fields))
    other, address = await start_engine(engines[1])
    try:
        async with serving(engines[0], limits=LIMITS, files=files) as served:
            made = Pair(served, engines, [served.server, other], [served.address, address])
            made.update(made.state(1), made.state(2))
            async with asyncio.timeout(10):
                while (await served.http.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield made
    finally:
        await other.stop(None)


def text_of(response: Any) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def test_clients_see_one_model_and_its_requests_are_shared_out() -> None:
    async with pair(hold_after=3) as both:
        listed = (await both.served.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny"]
        tasks = [await both.ask(f"question {number}") for number in range(6)]
        assert both.where() == (3, 3)
        for engine in both.engines:
            engine.release.set()
        assert [text_of(await task) for task in tasks] == [ANSWER] * 6
        metrics = (await both.served.http.get("/metrics")).text
        for replica in (1, 2):
            assert f'edgepipe_kv_cache_blocks{{model="tiny",replica="{replica}"}} 100.0' in metrics


async def test_shares_follow_the_plan() -> None:
    async with pair(hold_after=3) as both:
        both.update(both.state(1, replica_share=0.25), both.state(2, replica_share=0.75))
        await asyncio.sleep(0.05)
        tasks = [await both.ask(f"question {number}") for number in range(8)]
        assert both.where() == (2, 6)
        for engine in both.engines:
            engine.release.set()
        for task in tasks:
            await task


async def test_a_conversation_returns_to_its_replica() -> None:
    async with pair() as both:
        long = "word " * 200
        assert text_of(await both.served.chat(long)) == ANSWER
        first = both.where()
        for turn in range(1, 4):
            assert text_of(await both.served.chat(long + "and " * 60 * turn)) == ANSWER
        assert sorted(both.where()) == [0, 4]
        assert both.where()[first.index(1)] == 4


def continued(engine: FakeEngine, have: int) -> None:
    """The engine got the request with its first tokens, as a further attempt."""
    (submit,) = engine.submits
    assert submit.attempt == 2
    assert [bytes(choice.ids) for choice in submit.generated] == [ANSWER[:have].encode()]


async def held_at_the_first(both: Pair, **fields: Any) -> asyncio.Task[Any]:
    """A request that the first engine has begun; the second one would finish it."""
    both.engines[1].hold_after = both.engines[1].error = None
    task = await both.ask(**fields)
    assert both.where()[0] == 1, "of idle replicas the first one"
    await asyncio.sleep(0.1)
    return task


async def test_requests_of_a_lost_engine_go_on_at_the_other_from_their_last_token() -> None:
    async with pair(hold_after=5) as both:
        task = await held_at_the_first(both)
        both.engines[0].break_stream.set()
        await both.servers[0].stop(None)
        assert text_of(await task) == ANSWER
        continued(both.engines[1], 5)
        assert text_of(await both.served.chat("once more")) == ANSWER, "no request waits for the lost one"


async def test_a_blip_of_the_stream_moves_nothing() -> None:
    async with pair(hold_after=5) as both:
        task = await held_at_the_first(both)
        both.engines[0].break_stream.set()
        await until(lambda: bool(both.engines[0].resumes))
        both.engines[0].release.set()
        assert text_of(await task) == ANSWER
        assert both.where() == (1, 0)


@pytest.mark.parametrize("state", ["recovering", "waiting", "gone"])
async def test_requests_leave_a_replica_that_recovers_waits_or_is_gone(state: str) -> None:
    async with pair(hold_after=5) as both:
        task = await held_at_the_first(both)
        error = NoFeasiblePlacement("no machine is left") if state == "waiting" else None
        both.update(None if state == "gone" else both.state(1, state=state, error=error), both.state(2))
        assert text_of(await task) == ANSWER
        continued(both.engines[1], 5)
        if state == "recovering":
            assert [cancel.attempt for cancel in both.engines[0].cancels] == [1], (
                "the first engine stops computing a request that has moved"
            )


async def test_requests_of_a_stopped_model_end() -> None:
    async with pair(hold_after=5) as both:
        task = await held_at_the_first(both)
        both.update(both.state(1, state="stopping"), both.state(2, state="stopping"))
        answer = await task
        assert answer.status_code >= 400
        assert "was stopped" in answer.text
        assert both.where() == (1, 0)


@pytest.mark.parametrize("shown", ["by its engine", "by its record", "by both"])
async def test_requests_of_a_pipeline_that_ends_go_on_at_the_others(shown: str) -> None:
    """A person wants fewer pipelines of the model."""
    async with pair(hold_after=5) as both:
        task = await held_at_the_first(both)
        engine = both.state(1, state="stopping") if shown != "by its record" else None
        both.update(engine, both.state(2), stopped=() if shown == "by its engine" else (PIPELINES[0],))
        assert text_of(await task) == ANSWER
        continued(both.engines[1], 5)


async def test_a_single_pipeline_gets_a_second_one_while_it_answers() -> None:
    async with pair(hold_after=5) as both:
        both.update(None, None, stopped=PIPELINES)
        await until(lambda: not both.served.gateway._models.served)
        alone = replace(both.state(1), num_replicas=0, replica=0)
        both.update(alone)
        await until(lambda: bool(both.served.gateway._models.served))
        task = await both.ask("one")
        both.update(both.state(1), both.state(2))
        await until(lambda: both.served.gateway._models.num_engines("tiny") == 2)
        other = await both.ask("two")
        assert both.where() == (1, 1)
        for engine in both.engines:
            engine.release.set()
        assert [text_of(await each) for each in (task, other)] == [ANSWER] * 2


@pytest.mark.parametrize(("error", "moves"), [(NoFeasiblePlacement("no room"), True), (StepFailed("it failed"), False)])
async def test_a_request_that_an_engine_cannot_place_tries_the_other_and_one_that_failed_does_not(
    error: EdgepipeError, moves: bool
) -> None:
    async with pair(hold_after=5) as both:
        both.engines[0].error = error
        task = await held_at_the_first(both)
        answer = await task
        if moves:
            assert text_of(answer) == ANSWER
            continued(both.engines[1], 5)
        else:
            assert answer.status_code >= 500
            assert both.where() == (1, 0)


async def test_while_no_replica_works_requests_wait_and_go_on_where_one_is_back() -> None:
    async with pair(hold_after=5) as both:
        task = await held_at_the_first(both)
        both.update(None, None)
        await asyncio.sleep(0.6)
        assert not task.done()
        both.update(None, both.state(2))
        assert text_of(await task) == ANSWER
        continued(both.engines[1], 5)


async def test_details_name_the_machines_of_the_replicas_that_computed_the_answer() -> None:
    async with pair(hold_after=5) as both:
        both.engines[1].hold_after = None
        body = {"messages": [{"role": "user", "content": "hi"}]}
        asking = asyncio.create_task(
            both.served.http.post("/v1/chat/completions", json=body, headers={"X-Edgepipe-Details": "1"})
        )
        await until(lambda: bool(both.engines[0].submits))
        both.update(both.state(1, state="recovering"), both.state(2))
        rings = (await asking).json()["edgepipe"]["rings"]
        assert [ring["stages"] for ring in rings] == [[{"machine": f"n{n}", "layers": "0-5"}] for n in (1, 2)]


async def test_lines_of_one_batch_run_at_all_replicas(tmp_path: Path) -> None:
    engines = (EchoEngine(), EchoEngine(engine_id="engine-2"))
    lines = [completion_line(number, prompt=f"line {number}") for number in range(40)]
    async with pair(engines, files=FilesSettings(folder=tmp_path / "batches", least_free_bytes=0)) as both:
        user = BatchUser(both.served.http)
        ended = await user.ended(await user.begin(jsonl(lines)))
        assert texts_of(await user.entries(ended["output_file_id"])) == expected(lines)
        assert sum(both.where()) == 40
        assert min(both.where()) >= 10


async def test_lines_of_batches_get_a_window_for_each_replica() -> None:
    async with pair() as both:
        table = both.served.gateway._models
        assert table.num_engines("tiny") == 2
        both.update(both.state(1), None)
        await until(lambda: table.num_engines("tiny") == 1)
        both.update(both.state(1), both.state(2))
        await until(lambda: table.num_engines("tiny") == 2)
        assert table.num_engines("other") == 1
        assert replace(table.served[0], name="x").context_length == CONTEXT


def test_the_page_names_each_pipeline() -> None:
    states = [state_of(number, "127.0.0.1:1") for number in (1, 2)]
    served = tuple(ServedModel(engine=state, model_path="/nowhere") for state in states)
    view = page_view(ClusterView(cluster_id="test", served=served), node_name="a", edgepipe_version="1")
    titles = ["tiny replica 1/2", "tiny replica 2/2"]
    assert [(model["name"], model["title"]) for model in view["models"]] == [("tiny", title) for title in titles]
    history = History()
    history.sample(states)
    assert list(history.newest()) == titles


async def test_a_request_whose_model_ended_meanwhile_gets_an_error() -> None:
    request = Submission(request_id=RequestId("r"), prompt=(1,), num_choices=1, max_tokens=1, sampling=SamplingParams())
    with pytest.raises(StageLost), ReplicaLinks(LIMITS).open(request, changed=asyncio.Event()):
        pass
