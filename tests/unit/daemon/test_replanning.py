"""Where the stages of a running model go, without the nodes and directed links that its engine quarantined."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.daemon.serving.capacity import stages_of
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.replanning import Avoided, Replanner, placed_of
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import BackendUnavailable, NoFeasiblePlacement
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.planner.placement import Placed
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.weights.weight_table import FLOATS
from edgepipe.wire.children import ProfileLayerRequest
from edgepipe.wire.engines import EngineState, Quarantined, ServeSpec, StagePlacement, StageState
from edgepipe.wire.nodes import DeviceState, NodeState
from edgepipe.wire.serving import PlanMade, PlanWanted, ProfileLinksReply, StartEngineRequest
from edgepipe.workers.planning import DaemonPlanner
from tests.support.daemon.engine_hosts import SlowChild, engine_host

SHAPE = named_shape("qwen2.5-7b")
SHAPE_JSON = json.dumps(config_to_json(SHAPE))
GB = 10**9
DEVICE = DeviceProfile(
    backend="torch",
    device="cuda:0",
    name="GPU",
    compute_dtype="bfloat16",
    memory_total_bytes=0,
    memory_free_bytes=0,
    bandwidth_bytes_per_s=1e11,
    flops=1e13,
)


class FakePeers:
    """Nodes of 10 GB; two of them hold the model."""

    def __init__(self, names: str, broken: Iterable[str] = ()) -> None:
        self._names = names
        self._broken = frozenset((NodeId(a), NodeId(b)) for a, b in broken)

    def nodes(self) -> list[NodeState]:
        return [self.node(name) for name in self._names]

    def node(self, node_id: str) -> NodeState:
        return NodeState(
            node_id=NodeId(node_id),
            name=node_id,
            address=f"10.0.0.{ord(node_id)}:7117",
            devices=(DeviceState(profile=DEVICE, state="idle", free_bytes=10 * GB),),
        )

    def broken_links(self) -> frozenset[tuple[NodeId, NodeId]]:
        return self._broken

    async def profile_layer(self, node_id: str, request: ProfileLayerRequest) -> LayerProfile:
        raise BackendUnavailable("nothing was measured")

    async def profile_links(self, node_id: str, others: Iterable[str], *, known_only: bool) -> ProfileLinksReply:
        return ProfileLinksReply()


class OneModel:
    """On every disk."""

    async def adopt(self, name: str, *, manifest_hash: str = "") -> Any:
        stored = SimpleNamespace(id=name, manifest_hash="", config=SHAPE, manifest=SimpleNamespace(tensors=[]))
        model = SimpleNamespace(
            name=name, config=SHAPE, config_json=SHAPE_JSON, weights=FLOATS, weights_json="", stored=stored
        )
        model.as_placed = lambda _: model  # pyright: ignore[reportUnknownLambdaType]
        return model


def wanted(*, quarantined: str = "", links: Iterable[str] = ()) -> PlanWanted:
    """For layers 0-13 on a, 14-27 on b."""
    slices = make_slices([LayerRange(0, 14), LayerRange(14, 28)], SHAPE.num_layers)
    stages = stages_of([Placed(node_id=NodeId(node_id), part=part) for node_id, part in zip("ab", slices, strict=True)])
    left_out = [left_alone(node_id) for node_id in quarantined] + [
        left_alone(node_id, other) for node_id, other in links
    ]
    return PlanWanted(spec=ServeSpec(model="m", stages=stages), left_out=tuple(left_out))


def left_alone(node_id: str, other_id: str = "", *, seconds: float = 30) -> Quarantined:
    other = NodeId(other_id) if other_id else None
    return Quarantined(node_id=NodeId(node_id), other_id=other, seconds=seconds, reason="")


def spec_of(made: PlanMade) -> ServeSpec:
    assert made.spec is not None
    return made.spec


async def order(peers: FakePeers, asked: PlanWanted) -> str:
    """The nodes of the plan, in a token's order."""
    fakes = cast("Any", peers)
    replanner = Replanner(peers=fakes, models=cast("Any", OneModel()), surveyor=Surveyor(fakes))
    return "".join(stage.node_id for stage in placed_of(spec_of(await replanner.plan("p", asked))))


@pytest.mark.parametrize(
    ("quarantined", "links", "expected"),
    [
        ("", [], "ab"),
        ("", ["ba"], "ab"),
        ("", ["ab"], "ba"),
        ("", ["ab", "ba"], "ab"),  # there is no other: tried again all the same
        ("b", [], "ab"),
        ("b", ["ab"], "ba"),
        ("b", ["ab", "ba"], "ab"),
    ],
)
async def test_two_nodes_are_neighbours_in_the_order_whose_link_is_not_barred(
    quarantined: str, links: list[str], expected: str
) -> None:
    assert await order(FakePeers("ab"), wanted(quarantined=quarantined, links=links)) == expected


async def test_a_third_node_takes_the_place_where_no_order_of_the_two_is_left() -> None:
    assert "c" in await order(FakePeers("abc"), wanted(links=["ab", "ba"]))
    assert await order(FakePeers("abc"), wanted(quarantined="b", links=["ac"])) == "ca"


async def test_a_machine_that_failed_long_ago_is_tried_before_the_one_that_fails_now() -> None:
    asked = wanted(quarantined="b")
    long_ago, now = left_alone("c", seconds=5), left_alone("c", seconds=60)
    assert await order(FakePeers("abc"), replace(asked, left_out=(*asked.left_out, long_ago))) == "ac"
    assert await order(FakePeers("abc"), replace(asked, left_out=(*asked.left_out, now))) == "ab"


async def test_barred_links_count_beside_those_that_nodes_know_to_be_broken() -> None:
    peers = FakePeers("abc", broken=["ab", "ba"])
    assert await order(peers, wanted(links=["ac", "bc", "cb"])) == "ca"
    assert await order(peers, wanted(links=["ac", "ca", "cb"])) == "bc"


async def test_what_nodes_know_to_be_broken_is_not_tried_again() -> None:
    with pytest.raises(NoFeasiblePlacement, match="do not reach each other"):
        await order(FakePeers("ab", broken=["ab", "ba"]), wanted(links=["ab"]))


async def test_who_is_asked_to_place_a_model_anew_leaves_alone_what_its_engine_does() -> None:
    fakes, spec = cast("Any", FakePeers("abc")), wanted().spec
    replanner = Replanner(peers=fakes, models=cast("Any", OneModel()), surveyor=Surveyor(fakes))
    avoided = wanted(quarantined="c", links=["ab"]).left_out
    made = await replanner.place_anew("p", spec, Avoided.of(avoided), num_nodes=2)
    assert [stage.node_id for stage in placed_of(spec_of(made))] == ["b", "a"]
    avoided = wanted(quarantined="c", links=["ab", "ba"]).left_out
    with pytest.raises(NoFeasiblePlacement, match="do not reach each other"):
        await replanner.place_anew("p", spec, Avoided.of(avoided), num_nodes=2)


async def host_of(tasks: asyncio.TaskGroup, spec: ServeSpec, **reported: Any) -> EngineHost:
    """A host whose engine of pipeline p has reported this."""
    child = SlowChild()

    async def start(*_: object) -> SlowChild:
        return child

    host = engine_host(tasks, start)
    await host.start(StartEngineRequest(pipeline_id=PipelineId("p"), spec=spec), model_config="")
    state = EngineState(model="m", pipeline_id=PipelineId("p"), epoch=Epoch(1, EngineId("e")), state="starting")
    cast("Any", child).on_report(replace(state, **reported))
    return host


async def test_stages_that_an_engine_reports_are_planned_again_as_they_were_placed() -> None:
    """With their experts in RAM: a stage of another share is not the one that a node keeps."""
    spec = wanted().spec
    stages = tuple(replace(stage, ram_percent=percent) for stage, percent in zip(spec.stages, (40, 0), strict=True))
    values = [{field.name: getattr(stage, field.name) for field in fields(StagePlacement)} for stage in stages]
    async with asyncio.TaskGroup() as tasks:
        states = tuple(StageState(**value) for value in values)
        host = await host_of(tasks, replace(spec, stages=()), state="ready", stages=states)
        [(_, ready)] = host.ready()
        await host.stop("p")
    assert ready.stages == stages
    fakes = cast("Any", FakePeers("ab"))
    replanner = Replanner(peers=fakes, models=cast("Any", OneModel()), surveyor=Surveyor(fakes))
    assert spec_of(await replanner.plan("p", PlanWanted(spec=ready))).stages == stages


async def test_what_an_engine_leaves_alone_is_kept_beside_it_for_as_long_as_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        asked = wanted(quarantined="c", links=["ab"])
        host = await host_of(tasks, asked.spec, state="recovering", left_out=asked.left_out)
        assert host.avoided("p") == Avoided(nodes=frozenset("c"), links=frozenset({(NodeId("a"), NodeId("b"))}))
        assert host.avoided("q") == Avoided()
        loop = asyncio.get_running_loop()
        later_s = loop.time() + 31
        with monkeypatch.context() as patched:
            patched.setattr(loop, "time", lambda: later_s, raising=False)
            assert host.avoided("p") == Avoided()
        await host.stop("p")


async def test_a_move_that_arrives_during_a_recovery_is_not_taken_for_the_answer() -> None:
    asked: list[PlanWanted] = []
    planner = DaemonPlanner(cast("Any", SimpleNamespace(report=asked.append)))
    asking = asyncio.ensure_future(planner.plan(ServeSpec(model="m"), quarantined={}, quarantined_links={}))
    while not asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    pushed = planner.take(PlanMade(spec=ServeSpec(model="pushed")))
    assert pushed is not None
    assert pushed.spec.model == "pushed"
    planner.take(PlanMade(spec=ServeSpec(model="late"), question=asked[0].question - 1))
    planner.take(PlanMade(spec=ServeSpec(model="asked"), question=asked[0].question))
    assert (await asking).spec.model == "asked"


async def test_an_engine_tells_its_daemon_both() -> None:
    asked: list[PlanWanted] = []

    def report(question: PlanWanted) -> None:
        asked.append(question)
        planner.take(PlanMade(spec=question.spec, question=question.question))

    planner = DaemonPlanner(cast("Any", SimpleNamespace(report=report)))
    link = (NodeId("a"), NodeId("b"))
    await planner.plan(ServeSpec(model="m"), quarantined={NodeId("c"): 3.0}, quarantined_links={link: 30.0})
    left_out = [(left_out.node_id, left_out.other_id, left_out.seconds) for left_out in asked[0].left_out]
    assert left_out == [("c", None, 3.0), (*link, 30.0)]
