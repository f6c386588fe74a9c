"""Real nodes on the hosts of a LAN lab, links that fail in mid-answer. Names are the cases of the fault catalogue.

Cases that are not tried here:

N6   no false death in ten minutes of jitter: scripts/bench faults load --full
N12  hosts of the lab have one interface
N15  a blocked port: tests/lan/test_cluster_lan.py and test_doctor.py
N16  the lab speaks IPv4
N17  the lab's frames are all of one size
N18  two clusters on one network: tests/e2e/test_node_life.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgepipe.cluster.absence import missed
from tests.support.faults.chaos.cluster import chaos_cluster
from tests.support.faults.chaos.run import ChaosRun
from tests.support.network.lan import LanLab, lan_available
from tests.support.network.relay import relay
from tests.support.processes.streams import PROMPT, Stream
from tests.support.processes.waiting import LOOK_S, until

pytestmark = [pytest.mark.lan, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SEED = 12
CASES = {
    "N1 N4 a cable is pulled": ("cut node", {}),
    "N3 a node is not heard": ("cut one way", {}),
    "N13 two nodes lose each other": ("cut pair", {}),
    "N10 a loose contact": ("flap node", {}),
    "N14 all links blink": ("blink links", {}),
    "N7 5 % loss": ("lossy links", {}),
    "N5 N8 N9 slow links": ("slow links", {}),
}
LONG_CASES = {
    "N11 a node gets another address": ("change address", {}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosRun]:
    if not (available := lan_available()):
        pytest.skip(available.reason)
    async with LanLab(hosts=3) as lab:
        lab.shape(delay_s=0.0005, bytes_per_s=125e6)
        async with chaos_cluster(tmp_path_factory.mktemp("chaos-lan"), lab=lab) as cluster:
            made = ChaosRun(cluster, seed=SEED)
            await made.prepare()
            yield made


@pytest.mark.parametrize("case", CASES)
async def test_streams_go_on(run: ChaosRun, case: str) -> None:
    fault, settings = CASES[case]
    await run.trial(fault, **settings)


@pytest.mark.long
async def test_two_sides_of_a_partition_serve_and_one_engine_is_left_when_they_meet_again(run: ChaosRun) -> None:
    cluster, lab = run.cluster, run.cluster.lab
    assert lab is not None
    await cluster.until_ready()
    ((engine_node, _),) = await cluster.children("engine")
    far = next(name for name in cluster.names if name != engine_node)
    enough = asyncio.Event()
    served: dict[str, int] = {engine_node: 0, far: 0}

    async def keep_asking(name: str) -> None:
        async with relay(lab.host(name), cluster.running[name].http_port) as port:
            while not enough.is_set():
                stream = Stream((*PROMPT, served[name] % 256), 120)
                await stream.run(port)
                stream.assert_right()
                served[name] += 1

    async def serves(name: str) -> None:
        """Until streams end there that have begun since."""
        wanted = served[name] + 2
        await until(lambda: served[name] >= wanted, timeout_s=40)

    async def one_gives_way() -> None:
        """Until both sides know of the same engine, and of no other."""
        async with asyncio.timeout(40):
            while True:
                statuses = [await cluster.running[name].status() for name in served]
                if len({engine.epoch.engine_id for status in statuses for engine in status.engines}) == 1:
                    return
                await asyncio.sleep(LOOK_S)

    async with asyncio.TaskGroup() as asking:
        for name in served:
            asking.create_task(keep_asking(name), name=f"asks:{name}")
            await serves(name)
        lab.cut(engine_node)
        await cluster.running[far].until(lambda status: bool(missed(status.absent)))
        for name in served:
            await serves(name)
        statuses = [await cluster.running[name].status() for name in served]
        engines = [status.engines[0].epoch.engine_id for status in statuses]
        assert engines[0] != engines[1], "each side has an engine of its own"
        lab.heal(engine_node)
        await cluster.until_ready()
        await one_gives_way()
        for name in served:
            await serves(name)
        enough.set()
    statuses = [await cluster.running[name].status() for name in served]
    assert len({engine.epoch.engine_id for status in statuses for engine in status.engines}) == 1, "one is left"


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_CASES)
async def test_streams_go_on_in_cases_that_take_longer(run: ChaosRun, case: str) -> None:
    fault, settings = LONG_CASES[case]
    await run.trial(fault, **settings)
