"""The time of ``keep_alive`` outlives the gateway that promised it, and the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.clock import Clock
from edgepipe.daemon.processes.gateway_keeper import GatewayKeeper
from edgepipe.daemon.processes.kept_models import KeptModelsFile
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.unloading import KeepAlives
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.children import KeptModel, KeptModels
from tests.support.daemon.gateway_children import GatewayChild, gateway_keeper, settled
from tests.support.processes.waiting import until

MODEL = RoutedModel(
    name="big",
    pipeline_id=PipelineId("p"),
    epoch=Epoch(counter=1, engine_id=EngineId("e")),
    state="ready",
    address="",
    context_length=64,
    model_path="",
    on_request=True,
)


class OneModel(ModelTable):
    """A table whose one model appears with the first view."""

    there = True

    @property
    def served(self) -> list[RoutedModel]:
        """As it is now."""
        return [MODEL] if self.there else []


class GatewayLife:
    """The part of one gateway process that keeps models; its reports go to the keeper."""

    def __init__(self, child: GatewayChild, clock: Clock) -> None:
        self.table, self.unloaded = OneModel(), list[str]()
        self.keep_alives = KeepAlives(self.table, clock=clock, unload=self.unloaded.append, report=child.on_report)
        for command in child.sent:
            if isinstance(command, KeptModels):
                self.keep_alives.restore(command)

    def look(self) -> float | None:
        return self.keep_alives._look()


def keeper_kept(keeper: GatewayKeeper) -> tuple[KeptModel, ...]:
    """What a further gateway would get."""
    return keeper._kept.newest.models


async def test_a_gateway_that_starts_again_unloads_a_model_when_its_predecessor_said(tmp_path: Path) -> None:
    clock = FakeClock()
    async with gateway_keeper(tmp_path) as (keeper, children, _):
        first = GatewayLife(children.all[0], clock)
        first.keep_alives.want(MODEL, 300.0)
        assert first.look() == 300.0
        clock.advance(100)
        await keeper.start()
        second = GatewayLife(children.all[1], clock)
        second.table.there = False
        assert second.look() is None, "no view has come"
        clock.advance(20)
        second.table.there = True
        assert second.keep_alives.left_s(MODEL) == float("inf")
        assert second.look() == pytest.approx(180.0)
        assert second.keep_alives.left_s(MODEL) == pytest.approx(180.0)
        clock.advance(181)
        second.look()
        assert second.unloaded == ["big"]
        assert keeper_kept(keeper) == ()


async def test_a_model_in_use_when_the_gateway_ended_is_idle_since_the_next_one_began(tmp_path: Path) -> None:
    clock = FakeClock()
    async with gateway_keeper(tmp_path) as (keeper, children, _):
        first = GatewayLife(children.all[0], clock)
        first.keep_alives.want(MODEL, 300.0)
        with first.keep_alives.use(MODEL, None):
            first.look()
            clock.advance(1000)
            await keeper.start()
        second = GatewayLife(children.all[1], clock)
        assert second.look() == pytest.approx(300.0)
        second.keep_alives.want(MODEL, 10.0)
        assert second.look() == pytest.approx(10.0), "a newer request decides"


async def test_a_node_that_starts_again_knows_the_time(tmp_path: Path) -> None:
    clock = FakeClock()
    async with gateway_keeper(tmp_path) as (_, children, _loads):
        first = GatewayLife(children.all[0], clock)
        first.keep_alives.want(MODEL, 300.0)
        first.look()
        await until((tmp_path / "keep_alive.json").exists)
    clock.advance(100)
    async with gateway_keeper(tmp_path) as (_, children, _loads):
        second = GatewayLife(children.all[0], clock)
        assert second.look() == pytest.approx(200.0)


async def test_a_model_that_is_served_no_more_is_forgotten_after_a_day(tmp_path: Path) -> None:
    clock = FakeClock()
    async with gateway_keeper(tmp_path) as (keeper, children, _):
        first = GatewayLife(children.all[0], clock)
        first.keep_alives.want(MODEL, 300.0)
        first.look()
        first.table.there = False
        first.look()
        await settled()
        assert len(keeper_kept(keeper)) == 1
        clock.advance(86400 + 301)
        first.look()
        assert keeper_kept(keeper) == ()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"pipeline_id": "p"}]', '[{"pipeline_id": "p", "keep_s": "x"}]'])
def test_an_unusable_file_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keep_alive.json"
    path.write_text(text)
    path.chmod(0o600)
    assert KeptModelsFile(path).newest == KeptModels()


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_report_with_an_impossible_time_is_not_kept(tmp_path: Path, value: float) -> None:
    file = KeptModelsFile(tmp_path / "keep_alive.json")
    good = KeptModel(pipeline_id=PipelineId("a"), keep_s=1.0, idle_since_s=2.0)
    bad = [
        KeptModel(pipeline_id=PipelineId("b"), keep_s=value),
        KeptModel(pipeline_id=PipelineId("c"), idle_since_s=value),
    ]
    file.keep(KeptModels(models=(good, *bad)))
    assert file.newest.models == (good,)
