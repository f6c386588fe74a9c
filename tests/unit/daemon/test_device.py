"""The stage processes of one device: spares before, beside and after a stage, and stages that nobody claims."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import DEFAULT_SETTINGS, DeviceProfile, PackedProducts, SlowPath, StageSettings
from edgepipe.config import Timeouts
from edgepipe.daemon.device import layer_measuring
from edgepipe.daemon.device.device import DeviceHost
from edgepipe.daemon.device.layer_profiles import LayerProfiles
from edgepipe.daemon.device.spare import SpareStage
from edgepipe.daemon.processes.children import Children
from edgepipe.errors import BackendUnavailable, EdgepipeError, StageLost
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.children import (
    ChildProgress,
    ChildStarted,
    Command,
    LoadShard,
    PauseStage,
    Prepared,
    PrepareRequest,
    ProfileLayerRequest,
    Report,
    ShardLoaded,
)
from edgepipe.wire.engines import StagePlacement
from edgepipe.workers.settings import ChildSettings
from tests.support.daemon.published_state import FakeState
from tests.support.daemon.stage_settings import STAGE_SETTINGS
from tests.support.processes.waiting import until

GB = 10**9
CONFIG = emulated_model_config(num_layers=2)
LAYER = LayerProfile(base_s=0.0, decode=(Point(1, 0.001),), prefill=(), head=(), kv_token_s=0.0, decode_context=64)
PRODUCTS = (PackedProducts(by="kernels"), PackedProducts(by="torch", reason="it is missing", remedy="install it"))
SLOW = (SlowPath(what="steps", cost="half", reason="an old card", remedy="buy one"),)
MEASURE = ProfileLayerRequest(model_config="{}", fresh=True)
UNLESS_KNOWN = ProfileLayerRequest(model_config="{}")
UNLESS_BUSY = ProfileLayerRequest(model_config="{}", again_if_busy=True)


class Process:
    """A stage process that does at once what it is told."""

    def __init__(self, settings: ChildSettings) -> None:
        self.settings = settings
        self.exited = asyncio.Event()
        self.alive, self.stopping, self.port, self.certificate, self.hang = True, False, 1, b"", ""
        self.loads = True
        self.is_dying = False  # it hangs up before its end is told
        self.process = SimpleNamespace(returncode=None)
        self.pid = os.getpid()
        self.crashed_in = None
        self.measured = 0
        self.layer_factor = 1.0
        self.paused: list[PauseStage] = []  # as told
        self.progress = ChildProgress()
        self.on_report: Callable[[Report | None], None] = lambda _report: None
        self.on_profiled: Callable[[LayerProfile], None] = lambda _layer: None

    async def lives(self) -> bool:
        if self.is_dying:
            self.die(-9)
        return self.alive

    def send(self, command: Command) -> None:
        if isinstance(command, LoadShard) and self.loads:
            report = ShardLoaded(weight_bytes=1, kv_block_bytes=16, settings=command.settings)
            self.on_report(replace(report, products=PRODUCTS, slow_paths=SLOW))
        if isinstance(command, PauseStage):
            self.paused.append(command)
        if isinstance(command, ProfileLayerRequest):
            self.measured += 1
            seconds = LAYER.decode[0].seconds * self.layer_factor
            self.on_profiled(replace(LAYER, decode=(Point(1, seconds),)))

    def die(self, status: int = 1) -> None:
        self.alive, self.process.returncode = False, status
        self.exited.set()

    def error(self) -> EdgepipeError:
        return StageLost("the stage process ended")


class Processes:
    """In place of ``Children``: what was started, and what each was told of the device."""

    def __init__(self, *, free_bytes: int) -> None:
        self.started: list[Process] = []
        self._free_bytes = free_bytes

    async def start(self, settings: ChildSettings, _tasks: asyncio.TaskGroup) -> Process:
        self.started.append(Process(settings))
        return self.started[-1]

    async def wait_started(self, _child: Process) -> ChildStarted:
        profile = DeviceProfile(
            backend="emulated",
            device="x",
            name="x",
            compute_dtype="bfloat16",
            memory_total_bytes=24 * GB,
            memory_free_bytes=self._free_bytes,
            bandwidth_bytes_per_s=0.0,
            flops=0.0,
        )
        return ChildStarted(profile=profile)

    async def stop(self, child: Process) -> None:
        child.stopping = True
        child.die()

    async def stop_all(self, _kind: str) -> None:
        for child in self.started:
            await self.stop(child)


class Host:
    """A device host over such processes, and a way to wait for what it does."""

    def __init__(self, processes: Processes, tasks: asyncio.TaskGroup, folder: Path) -> None:
        self.processes = processes
        self.memory_kills: int | None = 0  # kills by the system, so far
        self._changed = asyncio.Condition()
        self.host = DeviceHost(
            node_name="a",
            backend="emulated",
            children=cast("Children", processes),
            setup=cast("Any", SimpleNamespace(child_settings=lambda _kind: STAGE_SETTINGS)),
            introductions=cast("Any", SimpleNamespace(greet=lambda _child: None)),
            memory_limit_bytes=0,
            timeouts=Timeouts(connect_s=1.0, orphan_s=0.01),
            tasks=tasks,
            directory=cast("Any", SimpleNamespace(has_engine=lambda _pipeline: False)),
            local=FakeState(),
            layers=LayerProfiles(folder / "layers.json"),
            memory_kills=lambda: self.memory_kills,
            settled_s=0.0,
            ask_again_s=0.001,
        )

    async def prepare(
        self,
        *,
        counter: int = 1,
        fresh: bool = False,
        context: int = 64,
        num_layers: int = 2,
        kv_tokens: int = 64,
    ) -> Prepared:
        """As an engine does; returns the stage when it is ready."""
        part = Slice(index=0, layers=LayerRange(0, num_layers), embedding=True, head=True)
        request = PrepareRequest(
            pipeline_id=PipelineId("p"),
            epoch=Epoch(counter, EngineId("engine-1")),
            placement=StagePlacement(node_id=NodeId("node-a"), slices=(part,)),
            settings=StageSettings(context_length=context),
            kv_tokens=kv_tokens,
            fresh=fresh,
        )
        preparing = self.host.prepare(request, engine_node="node-b", path="", config=CONFIG, engine=None)
        *_, last = [event.event async for event in preparing]
        assert isinstance(last, Prepared)
        return last

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Every turn of the loop is looked at: nothing here takes time."""
        async with asyncio.timeout(5):
            while not wanted():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def beside(self, *, kv_tokens: int = 64) -> asyncio.Task[Prepared]:
        """Begin to load other layers of the pipeline in the spare, which does not finish."""
        await self.until(lambda: len(self.spares()) == 1)
        self.spares()[0].loads = False
        preparing = asyncio.create_task(self.prepare(counter=2, num_layers=1, kv_tokens=kv_tokens))
        await self.until(lambda: self.state() == "loading")
        return preparing

    def reserved_bytes(self) -> int:
        (reserved,) = self.host.state()[0].reserved
        return reserved.num_bytes

    def spares(self) -> list[Process]:
        """Living processes that serve nothing."""
        serving = {id(process) for process in self._serving()}
        return [process for process in self.processes.started if process.alive and id(process) not in serving]

    def state(self) -> str:
        return self.host.state()[0].state

    def _serving(self) -> list[Any]:
        return [hold.child for hold in self.host._holds.values()]  # pyright: ignore[reportPrivateUsage]


@asynccontextmanager
async def running(folder: Path, *, free_bytes: int = 20 * GB) -> AsyncIterator[Host]:
    async with asyncio.TaskGroup() as tasks:
        host = Host(Processes(free_bytes=free_bytes), tasks, folder)
        keeper = tasks.create_task(host.host.keep_spare())
        await host.until(lambda: host.state() == "idle")
        yield host
        await host.host.release_all()
        keeper.cancel()


async def test_a_second_crash_finds_a_spare_too(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        first = host.processes.started[0]
        await host.prepare()
        await host.until(lambda: len(host.spares()) == 1)
        spare = host.spares()[0]
        assert first.settings.device_profile is None
        assert spare.settings.device_profile is not None  # it does not time a device that is at work
        first.die()
        await host.until(lambda: host.host.pipelines() == [])
        await host.prepare(counter=2)
        assert spare not in host.spares()
        assert len(host.processes.started) == 2
        await host.until(lambda: len(host.spares()) == 1)


async def test_a_stage_is_kept_for_another_epoch_unless_it_is_dying(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        first = host.processes.started[0]
        await host.prepare()
        await host.until(lambda: len(host.spares()) == 1)
        kept = await host.prepare(counter=2)
        assert kept.products == PRODUCTS
        assert kept.slow_paths == SLOW
        assert first.alive
        assert len(host.processes.started) == 2
        first.is_dying = True
        await host.prepare(counter=3)
        assert len(host.spares()) == 0
        assert host.host.pipelines() == ["p"]


async def test_a_stage_that_is_to_run_in_a_new_process_is_not_kept(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        await host.prepare()
        [stage] = host._serving()
        await host.prepare(counter=2, fresh=True)
        [other] = host._serving()
        assert other is not stage
        assert not stage.alive


async def test_a_stage_for_another_context_is_built_anew(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        assert (await host.prepare()).settings.context_length == 64
        [stage] = host._serving()
        assert (await host.prepare(counter=2, context=128)).settings.context_length == 128
        [other] = host._serving()
        assert other is not stage


async def test_a_stage_serves_until_its_pipeline_s_other_layers_are_loaded(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        first = host.processes.started[0]
        await host.prepare()
        before = host.reserved_bytes()
        preparing = await host.beside()
        [loading] = host._serving()
        assert first.alive
        assert host.reserved_bytes() > before, "both stages count"
        loading.on_report(ShardLoaded(weight_bytes=1, kv_block_bytes=16, settings=DEFAULT_SETTINGS))
        await preparing
        await host.until(lambda: not first.alive)
        assert loading.alive
        await host.until(lambda: host.reserved_bytes() < before)


async def test_a_stage_ends_first_where_memory_does_not_hold_the_other_layers_beside_it(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        first = host.processes.started[0]
        kv_tokens = 20 * GB // CONFIG.kv_bytes_per_token(form="bfloat16")
        await host.prepare(kv_tokens=kv_tokens)
        preparing = await host.beside(kv_tokens=kv_tokens)
        assert not first.alive
        preparing.cancel()


async def test_a_stage_goes_on_when_the_other_layers_cannot_be_loaded(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        first = host.processes.started[0]
        await host.prepare()
        before = host.reserved_bytes()
        preparing = await host.beside()
        [loading] = host._serving()
        loading.die()
        with pytest.raises(StageLost):
            await preparing
        await host.until(lambda: host.state() == "serving")
        assert (first.alive, host.reserved_bytes()) == (True, before)
        await host.prepare(counter=3)
        assert first.alive, "it is still the stage with these layers"


async def test_a_stage_that_woke_before_its_network_goes_on_once_its_engine_answers(tmp_path: Path) -> None:
    answers = iter([None, None, Epoch(1, EngineId("engine-1"))])

    async def engine_epoch(node_id: str, pipeline_id: str) -> Epoch | None:
        assert (node_id, pipeline_id) == ("node-b", "p")
        return next(answers)

    async with running(tmp_path) as host:
        await host.prepare()
        [stage] = host._serving()
        host.host.pause()
        host.host.resume(engine_epoch)
        await host.until(lambda: len(stage.paused) == 2)
        assert [command.paused for command in stage.paused] == [True, False]
        assert stage.paused[1].epoch == Epoch(1, EngineId("engine-1"))


async def test_a_device_without_room_has_no_spare_beside_its_stage(tmp_path: Path) -> None:
    async with running(tmp_path, free_bytes=2 * GB) as host:
        await host.prepare()
        for _ in range(20):
            await asyncio.sleep(0)
        assert host.spares() == []


async def test_a_device_that_is_empty_again_is_measured_again(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        await host.prepare()
        await host.until(lambda: len(host.spares()) == 1)
        await host.host.release("p")
        await host.until(lambda: len(host.processes.started) == 3 and host.state() == "idle")
        assert [process.settings.device_profile for process in host.spares()] == [None]


async def test_a_layer_is_measured_as_soon_as_a_stage_has_left_the_device(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        await host.prepare()
        await host.until(lambda: len(host.spares()) == 1)
        with pytest.raises(BackendUnavailable, match="cannot measure now"):
            await host.host.profile_layer(MEASURE)
        await host.host.release("p")
        assert (await host.host.profile_layer(MEASURE)).decode == LAYER.decode
        asked = [process for process in host.processes.started if process.measured]
        assert asked == [host.processes.started[2]]  # not the one from beside the stage, which is on its way out


async def test_what_was_measured_beside_other_work_is_measured_again_and_the_shorter_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.5, 0.9, 0.1])
    monkeypatch.setattr(layer_measuring, "others_share", lambda before, after: next(shares))  # other programs' load
    async with running(tmp_path) as host:
        first = await host.host.profile_layer(UNLESS_KNOWN)
        assert first.busy
        assert first.measured_ms
        for child in host.processes.started:
            child.layer_factor = 3.0
        same = await host.host.profile_layer(UNLESS_KNOWN)
        assert same == first, "what is served a moment after a plan has the plan's figures"
        monkeypatch.setattr(layer_measuring, "_SAME_S", -1.0)  # a minute later
        assert await host.host.profile_layer(UNLESS_KNOWN) == first, "a plan takes what is known"
        again = await host.host.profile_layer(UNLESS_BUSY)
        assert (again.busy, again.decode) == (True, first.decode), "other programs make steps longer only"
        quiet = await host.host.profile_layer(UNLESS_BUSY)
        assert not quiet.busy
        assert quiet.decode != first.decode
        assert await host.host.profile_layer(UNLESS_BUSY) == quiet
        assert sum(process.measured for process in host.processes.started) == 3


async def test_while_a_device_serves_its_known_times_are_told(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        known = await host.host.profile_layer(MEASURE)
        await host.prepare()
        assert await host.host.profile_layer(MEASURE) == known
        assert sum(process.measured for process in host.processes.started) == 1


async def test_a_spare_that_cannot_start_beside_a_stage_is_no_failure_of_the_device(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        await host.prepare()
        await host.until(lambda: len(host.spares()) == 1)
        host.spares()[0].die()
        await host.until(lambda: len(host.processes.started) == 3)
        assert host.state() == "serving"
        assert host.host.state()[0].error is None


async def test_a_device_whose_driver_loads_late_is_used_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that starts with the machine may be there before its GPU is."""
    monkeypatch.setattr("edgepipe.daemon.device.device.SpareStage", partial(SpareStage, unavailable_s=0.05))
    processes, missing = Processes(free_bytes=20 * GB), BackendUnavailable("CUDA is not there")
    wait_started = processes.wait_started

    async def fail(_child: Process) -> ChildStarted:
        raise missing

    monkeypatch.setattr(processes, "wait_started", fail)
    async with asyncio.TaskGroup() as tasks:
        host = Host(processes, tasks, tmp_path)
        keeper = tasks.create_task(host.host.keep_spare())
        await until(lambda: len(processes.started) >= 2, timeout_s=30)
        assert host.state() == "failed"
        assert isinstance(host.host.state()[0].error, BackendUnavailable)
        monkeypatch.setattr(processes, "wait_started", wait_started)
        await until(lambda: host.state() == "idle", timeout_s=30)
        assert host.host.state()[0].error is None
        await host.host.release_all()
        keeper.cancel()


@pytest.mark.parametrize(("by_system", "share"), [(True, 0.8), (False, 1.0)])
async def test_r3_memory_that_the_system_takes_back_twice_is_used_less(
    tmp_path: Path, by_system: bool, share: float
) -> None:
    async with running(tmp_path) as host:
        before = host.host.state()[0].free_bytes
        for counter in (1, 2):
            await host.prepare(counter=counter)
            host.memory_kills = counter if by_system else 0
            (serving,) = [hold.child for hold in host.host._holds.values()]  # pyright: ignore[reportPrivateUsage]
            cast("Process", serving).die(-signal.SIGKILL)
            await host.until(lambda: host.host.pipelines() == [])
        assert host.host.state()[0].free_bytes == int(before * share)


async def test_stages_that_no_engine_claims_are_given_back(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        await host.prepare()
        host.host.orphaned_by("node-c")  # another's engine
        host.host.orphaned_by("node-b")
        await host.prepare(counter=2)  # a new engine claims it in time
        await until(lambda: not any(task.get_name().startswith("orphan:") for task in asyncio.all_tasks()))
        assert host.host.pipelines() == ["p"]
        host.host.orphaned_by("node-b")
        await host.until(lambda: host.host.pipelines() == [])
        assert host.host.state()[0].reserved_bytes == 0
