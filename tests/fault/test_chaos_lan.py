"""Real nodes on the hosts of a LAN lab, links that fail in mid-answer. Names are the cases of the fault catalogue."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgepipe.testing.chaos import ChaosRun, chaos_cluster
from edgepipe.testing.lan import LanLab, lan_available

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
NOT_HERE = {
    "N6": "no false death in ten minutes of jitter: scripts/bench faults --only load --full",
    "N11": "a host of the lab keeps its address",
    "N12": "hosts of the lab have one interface",
    "N15": "a blocked port is the doctor's affair",
    "N16": "the lab speaks IPv4",
    "N17": "the lab's frames are all of one size",
    "N18": "two clusters on one network: tests/e2e/test_node_life.py",
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
async def test_streams_go_on(run: ChaosRun, case: str):
    fault, settings = CASES[case]
    await run.trial(fault, **settings)


@pytest.mark.parametrize("case", NOT_HERE)
async def test_what_is_not_tried_here(case: str):
    pytest.skip(f"{case}: {NOT_HERE[case]}")
