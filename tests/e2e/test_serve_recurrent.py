"""A tiny model with recurrent layers served by real nodes, one of torch and one of MLX: the ids are the reference's."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, StartedNode, local_cluster, wait_until_joined
from edgepipe.cli.serve import serve_request, serve_with_progress
from edgepipe.spec.config import hf_config
from edgepipe.store.store import ModelStore
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.weights import open_weights
from edgepipe.wire.nodes import ClusterStatus
from tests.support.models.files import gguf_text
from tests.support.models.recurrent_files import tiny_values, write_recurrent_folder
from tests.support.numerics.spec_reference import float_weights, reference_logits
from tests.support.processes.nodes import until_answers
from tests.support.processes.streams import Stream, serving_stage

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (find_spec("torch") and find_spec("mlx")), reason="torch and MLX are not both installed"),
    pytest.mark.timeout(240),
]
FAMILY = "qwen35"
PROMPT = np.random.default_rng(5).integers(3, 60, 90).tolist()
NUM_TOKENS = 80  # half a second: a kill comes in time
LEAST_GAP = 1e-3  # share of the largest logit, between the two best: float32 decides it
JOIN_S = 120.0  # two backends are imported and measured at once
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Nodes that serve the model, and the ids that they must give."""

    nodes: list[StartedNode]
    folder: Path
    ids: list[int]  # after PROMPT

    async def status(self, index: int = 0) -> ClusterStatus:
        """The cluster as a node sees it."""
        async with connect(self.nodes[index].data_dir) as admin:
            return await admin.status()

    async def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """What the first node answers."""
        body = {"model": "hybrid", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            response = await client.post(f"http://127.0.0.1:{self.nodes[0].http_port}/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def greedy_ids(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What the reference in numpy gives; every choice is a clear one."""
    source = open_weights(folder)
    weights = float_weights(source)
    ids: list[int] = []
    for _ in range(count):
        logits = reference_logits(source.config, weights, [*prompt, *ids])[-1]
        second, best = np.sort(logits)[-2:]
        assert best - second > LEAST_GAP * float(np.abs(logits).max()), "choose another prompt"
        ids.append(int(logits.argmax()))
    return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    place = tmp_path_factory.mktemp("hybrid")
    folder = place / "hybrid"
    folder.mkdir()
    write_recurrent_folder(folder, FAMILY)
    Tokenizer.from_gguf(gguf_text()).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    ModelStore(place / "models").pull(str(folder))
    assert hf_config(tiny_values(FAMILY)).state_bytes()
    nodes = [NodeToStart(name="a", backend="torch"), NodeToStart(name="b", backend="mlx", device="cpu")]
    plan = LocalCluster(cluster=f"hybrid-{secrets.token_hex(4)}", nodes=nodes, models_dir=place / "models", threads=1)
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=JOIN_S)
        request = serve_request("hybrid", plan="a:0-1,b:2-3", dtype="float32", activations="float32")
        (engine,) = await serve_with_progress(admin, request)
        assert [stage.backend for stage in engine.stages] == ["torch", "mlx"]
        await until_answers(started[0].http_port)
        yield Served(nodes=started, folder=folder, ids=greedy_ids(folder, PROMPT, NUM_TOKENS))


async def test_a_prompt_is_answered_and_then_known_up_to_its_snapshot(served: Served) -> None:
    known: list[int] = []
    for _ in range(2):
        answer = await served.ask("completions", prompt=PROMPT, max_tokens=NUM_TOKENS)
        assert answer["choices"][0]["token_ids"] == served.ids
        known.append(answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0))
    assert known == [0, len(PROMPT) // 16 * 16]


async def test_an_answer_goes_on_after_each_stage_was_killed(served: Served) -> None:
    for victim in range(2):
        before = (await served.status()).engines[0].epoch.counter
        stage = serving_stage(await served.status(victim))
        streams = [Stream(PROMPT, NUM_TOKENS, model="hybrid") for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(served.nodes[0].http_port))
            await asyncio.gather(*(stream.has(3) for stream in streams))
            stage.kill()
        for stream in streams:
            assert stream.error is None, stream.error
            assert stream.ids == served.ids
        assert (await served.status()).engines[0].epoch.counter > before, "the answers were complete before the kill"


async def test_a_chat_is_answered(served: Served) -> None:
    messages = [{"role": "user", "content": "abc"}]
    answer = await served.ask("chat/completions", messages=messages, max_tokens=4)
    prompt = answer["prompt_token_ids"]
    assert prompt == [12, 5], "ab, c"
    assert answer["choices"][0]["token_ids"] == greedy_ids(served.folder, prompt, 4)
