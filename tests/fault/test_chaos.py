"""Real nodes on loopback, faults in mid-answer: every stream goes on with the tokens that it would have had anyway.

Requests are drawn: greedy and seeded, one to three choices, stop strings, half characters, a grammar, shared prefixes;
one to four streams at once. Names are the cases of the fault catalogue. All trials of this file share one cluster.

Cases that are not tried here:

P14 P17   planned moves take longer than streams here: tests/fault/test_planned_changes.py, and long cases
P11 X4    the machine that holds the client is lost: its streams end
P12       a stage that never loads: a minute; tests/unit/daemon holds the watch to it
R1        an allocation that fails: tests/cluster/test_engine_failures.py
R2        a full KV cache: tests/unit/scheduler and the simulator's small pools
R3        stages that the system kills for want of memory: tests/unit/daemon/test_device.py
R4        a disk that fills up while tensors come: tests/unit/daemon/test_model_copies.py
R5 R8     disks that are full or cannot be written: tests/unit/daemon/test_full_disks.py
R6        few descriptors: tests/e2e/test_few_descriptors.py
R7        full load: scripts/bench faults load
R9        floods of log lines: one line each, by telemetry.log.Once
R10       half an hour of faults: scripts/bench faults --full
T1 T2 T4  by injected clocks: tests/unit/cluster/test_sleep.py
T3        certificates hold from 2020 to 2049: tests/unit/link/test_certificates.py
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.faults.chaos.cluster import chaos_cluster
from tests.support.faults.chaos.run import ChaosRun

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SEED = int(os.environ.get("EP_CHAOS_SEED", "11"))
LONG_ROUNDS = 3

CASES = {
    "P1 killed in prefill": ("kill stage", {"strike_at": 0.0}),
    "P2 P3 P4 killed at any moment": ("kill stage", {}),
    "P5 crash": ("crash stage", {}),
    "P6 two at once": ("kill two stages", {}),
    "P13 killed while recovering": ("kill stage twice", {}),
    "P15 storm, 8 streams": ("stage storm", {"num_streams": 8}),
    "P16 stage told to end": ("term stage", {}),
    "X1 X2 X3 X5 X8 many streams": ("kill stage", {"num_streams": 8}),
    "X6 a client leaves in the fault": ("kill stage", {"one_leaves": True, "num_streams": 3}),
    "N10 a node that stutters": ("blink node", {}),
    "another node's gateway": ("kill gateway", {}),
}
SLOW_CASES = {
    "P7 P8 stage hangs, thaws": ("stop stage", {}),
    "P10 engine killed": ("kill engine", {}),
    "P18 P19 daemon killed alone": ("kill daemon", {}),
    "a power cut": ("kill node", {}),
}
VERY_SLOW_CASES = {
    "P17 the engine's machine is shut down, 8 streams": ("term node", {"num_streams": 8}),
    "T5 sleep announced": ("announce sleep", {}),
    "P14 killed while stages move": ("kill stage in drain", {}),
    "the engine's node is drained": ("drain engine", {}),
    "P9 X7 node freezes, thaws": ("stop node", {}),
    "L1 a device breaks": ("break device", {}),
    "L2 a machine naps": ("nap", {}),
    "L3 a drain that is refused at first": ("refuse drain", {}),
    "L4 a step fails once, and a client leaves": ("fail step", {"one_leaves": True, "num_streams": 4}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosRun]:
    async with chaos_cluster(tmp_path_factory.mktemp("chaos")) as cluster:
        made = ChaosRun(cluster, seed=SEED)
        await made.prepare()
        yield made


@pytest.mark.parametrize("case", CASES)
async def test_streams_go_on(run: ChaosRun, case: str) -> None:
    fault, settings = CASES[case]
    await run.trial(fault, **settings)


@pytest.mark.parametrize("case", SLOW_CASES)
async def test_streams_outlive_what_is_noticed_late(run: ChaosRun, case: str) -> None:
    fault, settings = SLOW_CASES[case]
    await run.trial(fault, **settings)


@pytest.mark.long
@pytest.mark.parametrize("case", VERY_SLOW_CASES)
async def test_streams_outlive_a_node_that_comes_back(run: ChaosRun, case: str) -> None:
    fault, settings = VERY_SLOW_CASES[case]
    await run.trial(fault, **settings)


async def test_most_faults_met_streams_under_way(run: ChaosRun) -> None:
    in_time = [trial for trial in run.trials if trial.in_time]
    assert len(in_time) >= 0.7 * len(run.trials), [trial.fault for trial in run.trials if not trial.in_time]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(LONG_ROUNDS))
async def test_streams_go_on_in_many_rounds(run: ChaosRun, part: int) -> None:
    for fault, settings in (*CASES.values(), *CASES.values(), *SLOW_CASES.values(), *VERY_SLOW_CASES.values()):
        await run.trial(fault, **settings)
