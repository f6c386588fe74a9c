"""The faults of ``test_chaos`` on a model with recurrent layers, whose states nothing but their tokens can rebuild."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import StageSettings
from edgepipe.wire.engines import ServeSpec
from tests.fault.test_chaos import CASES, SEED, SLOW_CASES, VERY_SLOW_CASES
from tests.support.faults.chaos.cluster import MODEL, chaos_cluster
from tests.support.faults.chaos.run import ChaosRun

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

STATES = emulated_model_config(num_layers=6, context_length=4096, attention_every=3)
# Streams push one another out of the device: engines that are lost leave them in the stages' RAM.
OPTIONS = ServeSpec(model=MODEL, kv_tokens=384, settings=StageSettings(kv_ram="50000000"))
SHORT = ("P2 P3 P4 killed at any moment", "P13 killed while recovering")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosRun]:
    async with chaos_cluster(tmp_path_factory.mktemp("chaos"), config=STATES, options=OPTIONS) as cluster:
        made = ChaosRun(cluster, seed=SEED)
        await made.prepare()
        yield made


@pytest.mark.parametrize("case", SHORT)
async def test_streams_of_recurrent_layers_go_on(run: ChaosRun, case: str) -> None:
    fault, settings = CASES[case]
    await run.trial(fault, **settings)


async def test_an_engine_that_is_lost_leaves_the_states(run: ChaosRun) -> None:
    """The second one finds what the streams of the first one pushed out."""
    for _ in range(2):
        await run.trial("kill engine", num_streams=3)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_streams_of_recurrent_layers_go_on_in_every_case(run: ChaosRun) -> None:
    for fault, settings in (*CASES.values(), *SLOW_CASES.values(), *VERY_SLOW_CASES.values()):
        await run.trial(fault, **settings)
