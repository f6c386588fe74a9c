"""A stage that closes leaves no thread and no task behind, whatever was going on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edgepipe.backend.types import DEFAULT_SETTINGS, StageSettings
from edgepipe.errors import NoFeasiblePlacement, PeerClosed, StageError
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.tensors import WeightSource
from edgepipe.stage.stage import Stage
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.common import Hello
from tests.support.backends.timed import TimedBackend
from tests.support.engine.pipeline import epoch
from tests.support.engine.pipeline_engine import HeldBackend, SmallEngine, emulated, stages

PROMPT = [1, 2, 3]


def names() -> set[str]:
    """Threads and tasks that a stage makes."""
    threads = {thread.name for thread in threading.enumerate()}
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    return {name for name in threads | tasks if name.startswith(("compute", "sampler", "stage-", "ring-"))}


@pytest.mark.parametrize("over", ["grpc", "memory"])
async def test_nothing_is_left_after_work(over: str) -> None:
    async with stages(3, over=over) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        await engine.generate([[engine.new(PROMPT)]], 4)
        assert names(), "the test looks at the right names"
    assert not names()


async def test_nothing_is_left_when_closed_in_the_middle_of_a_step() -> None:
    backends = [HeldBackend(emulated()), HeldBackend(emulated())]
    async with stages(2, make_backend=backends.__getitem__) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        gate = backends[0].hold(1)
        for _ in range(3):
            engine.send(engine.new(PROMPT))
        assert await asyncio.to_thread(backends[0].submitted[1].wait, 30)
        closing = asyncio.ensure_future(local.stages[0].close())
        await driver.controls[0].reports.ended.wait()
        assert isinstance(driver.controls[0].reports.fault, PeerClosed)
        gate.set()
        await closing
        await local.stages[0].close()  # a second time
    assert not names()


async def test_an_engine_that_is_cancelled_ends_its_epoch() -> None:
    async with stages(2) as local:
        control = local.control(1, local.spec(1, epoch(1)))
        task = asyncio.ensure_future(control.run())
        await control.reports.opened.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with local.open(epoch(2)) as driver:
            engine = SmallEngine(driver)
            await engine.generate([[engine.new(PROMPT)]], 2)


async def test_a_stage_that_serves_does_not_load() -> None:
    async with stages(1) as local, local.open(epoch(1)):
        with pytest.raises(StageError, match="cannot load"):
            await local.stages[0].load(
                slices=local.slices, open_weights=_never, progress=lambda _: None, settings=DEFAULT_SETTINGS
            )


def _never() -> WeightSource:
    raise AssertionError("nothing is to be read")


async def test_a_backend_without_a_disk_refuses_one_before_it_reads_weights() -> None:
    stage = Stage(
        backend=TimedBackend(FakeClock()),
        clock=FakeClock(),
        hello=Hello(role="stage", node_id="a", node_name="a"),
        security=Plaintext(),
        name="stage of node a",
    )
    with pytest.raises(NoFeasiblePlacement, match="keeps no KV on disk") as refused:
        await stage.load(
            slices=make_slices([LayerRange(0, 2)], 2),
            open_weights=_never,
            progress=lambda _: None,
            settings=StageSettings(kv_disk="1000"),
        )
    assert refused.value.next_step == "serve without --kv-disk"
    await stage.close()
