"""Real weights the product's own way: ``edgepipe node start`` processes of one cluster, TLS between them, SmolLM2 cut
over torch and MLX stages, asked through HTTP and held against transformers.

The usual run takes one plan and some of the items: MLX's CPU device is for correctness, not speed (7 tokens/s here).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from edgepipe.cli.admin import connect
from edgepipe.cli.demo import even_layers
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, StartedNode, local_cluster, wait_until_joined
from edgepipe.cli.serve import serve_request, serve_with_progress
from edgepipe.daemon.machine.data_dir import log_path
from edgepipe.store.store import StoredModel
from edgepipe.wire.nodes import ClusterStatus
from tests.support.numerics.golden_ids import Item, assert_greedy, items
from tests.support.numerics.prompt_reference import ScoredText, scored_texts
from tests.support.processes.nodes import until_answers
from tests.support.processes.streams import Stream, serving_stage

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (find_spec("torch") and find_spec("mlx")), reason="torch and MLX are not both installed"),
]
TOLERANCE = {"float32": 1e-3, "bf16": 0.05}  # error of a prompt token's log-probability for each hop, by what travels
BF16_ROUNDING = 2.0**-8  # relative; unlikely tokens' log-probabilities (-15) are off by more than 0.05
KILL_AFTER_TOKENS = 3
JOIN_S = 120.0  # two backends are imported and measured at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and how much of the data goes through it."""

    backends: tuple[str, ...]  # one stage each
    activations: str
    names: frozenset[str]  # names of items
    num_tokens: int  # most of one answer
    num_texts: int
    num_kills: int  # stages killed, one after the other

    def __str__(self) -> str:
        return f"{'+'.join(self.backends)}, {self.activations}"

    @property
    def tolerance(self) -> float:
        """Of a log-probability: activations are rounded once for each hop between stages."""
        return TOLERANCE[self.activations] * (len(self.backends) - 1)

    @property
    def items(self) -> list[Item]:
        """Those that are asked."""
        return [item for item in items() if item.name in self.names]


def whole(backends: str, activations: str) -> Case:
    """A plan with all prompts, every stage killed once. MLX on a CPU is slow: shorter answers, fewer texts."""
    stages = tuple(backends.split("+"))
    slow = "mlx" in stages
    return Case(
        backends=stages,
        activations=activations,
        names=frozenset(item.name for item in items()),
        num_tokens=20 if slow else 64,
        num_texts=6 if slow else 20,
        num_kills=len(stages),
    )


USUAL = Case(
    backends=("mlx", "torch"),
    activations="bf16",
    names=frozenset({"chat_capital", "chat_haiku", "raw_numbers"}),
    num_tokens=6,
    num_texts=3,
    num_kills=1,
)
LONG = [
    *(whole("torch+torch", activations) for activations in TOLERANCE),
    whole("torch+mlx", "float32"),
    whole("mlx+torch", "bf16"),
    whole("torch+mlx+torch", "bf16"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes that serve the demo model, one stage each."""

    case: Case
    nodes: list[StartedNode]

    async def status(self, index: int = 0) -> ClusterStatus:
        """The cluster as a node sees it."""
        async with connect(self.nodes[index].data_dir) as admin:
            return await admin.status()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """The one choice of a greedy completion, asked at the first node."""
        body = {"model": "demo", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        async with httpx.AsyncClient(timeout=300, trust_env=False, verify=False) as client:
            response = await client.post(f"http://127.0.0.1:{self.nodes[0].http_port}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(USUAL, marks=pytest.mark.timeout(300)),
        *(pytest.param(case, marks=[pytest.mark.long, pytest.mark.timeout(900)]) for case in LONG),
    ],
    ids=lambda case: f"{case}, some" if case is USUAL else str(case),
)
async def cluster(request: pytest.FixtureRequest, demo_model: StoredModel) -> AsyncIterator[Cluster]:
    """One for all tests of a case."""
    case: Case = request.param
    nodes = [NodeToStart(name=name, backend=kind) for name, kind in zip("abc", case.backends, strict=False)]
    plan = LocalCluster(cluster=f"golden-{id(case)}", nodes=nodes, models_dir=demo_model.path.parent, threads=1)
    layers = even_layers(demo_model.config.num_layers, [node.name for node in nodes])
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=len(nodes), timeout_s=JOIN_S)
        (engine,) = await serve_with_progress(admin, serve_request("demo", plan=layers, activations=case.activations))
        assert [stage.backend for stage in engine.stages] == list(case.backends)
        await until_answers(started[0].http_port)
        yield Cluster(case=case, nodes=started)


@pytest.fixture(autouse=True)
def logs(cluster: Cluster, tmp_path: Path) -> None:
    """Show the nodes' logs beside a failure."""
    for node in cluster.nodes:
        (tmp_path / f"{node.plan.name}.log").symlink_to(log_path(node.data_dir))


async def test_a_prompt_asked_alone_is_answered_with_the_references_tokens(cluster: Cluster) -> None:
    for item in cluster.case.items:
        choice = await cluster.complete(
            prompt=item.prompt_ids, max_tokens=max(1, min(cluster.case.num_tokens, item.num_decided))
        )
        assert choice["prompt_token_ids"] == list(item.prompt_ids)
        assert choice["finish_reason"] == "length"
        assert_greedy(choice["token_ids"], item)


async def test_prompts_asked_at_once_are_answered_with_the_references_tokens(cluster: Cluster) -> None:
    streams = [answer_to(item, cluster.case.num_tokens) for item in cluster.case.items]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(cluster.nodes[0].http_port))
    for stream, item in zip(streams, cluster.case.items, strict=True):
        assert_decided(stream, item)


async def test_log_probabilities_of_an_echoed_prompt_are_those_of_transformers(cluster: Cluster) -> None:
    texts = scored_texts()[: cluster.case.num_texts]
    choices = await asyncio.gather(
        *(cluster.complete(prompt=text.text, echo=True, logprobs=0, max_tokens=1) for text in texts)
    )
    for choice, text in zip(choices, texts, strict=True):
        assert choice["text"].startswith(text.text)
        assert choice["prompt_token_ids"] == list(text.ids)
        assert_scored(choice["logprobs"]["token_logprobs"][: len(text.ids)], text, cluster.case.tolerance)


async def test_answers_go_on_as_the_reference_does_after_a_stage_was_killed(cluster: Cluster) -> None:
    for victim in range(cluster.case.num_kills):
        before = (await cluster.status()).engines[0].epoch.counter
        streams = [answer_to(item, cluster.case.num_tokens) for item in cluster.case.items]
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(cluster.nodes[0].http_port))
            await asyncio.gather(*(stream.has(KILL_AFTER_TOKENS) for stream in streams))
            serving_stage(await cluster.status(victim)).kill()
        for stream, item in zip(streams, cluster.case.items, strict=True):
            assert_decided(stream, item)
        assert (await cluster.status()).engines[0].epoch.counter > before, "the answers were complete before the kill"


def answer_to(item: Item, num_tokens: int) -> Stream:
    """A stream that begins behind the reference's tokens of all steps before the longest decided run."""
    start, run = item.longest_decided.start, len(item.longest_decided)
    return Stream((*item.prompt_ids, *item.greedy_ids[:start]), min(num_tokens, run), model="demo")


def assert_decided(stream: Stream, item: Item) -> None:
    """Its ids are the reference's, and it ended once."""
    assert stream.error is None, stream.error
    start = item.longest_decided.start
    assert stream.ids == list(item.greedy_ids[start : start + stream.max_tokens]), item.name
    assert stream.finish == "length"


def assert_scored(found: list[float | None], text: ScoredText, tolerance: float) -> None:
    """The first token has no log-probability, all others are near the reference's."""
    assert found[0] is None
    relative = BF16_ROUNDING if tolerance >= TOLERANCE["bf16"] else 0
    assert found[1:] == pytest.approx(text.logprobs, abs=tolerance, rel=relative), text.text
