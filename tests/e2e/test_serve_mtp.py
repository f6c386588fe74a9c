"""A tiny hybrid model whose own layer drafts, served by nodes of torch and MLX: the same ids in fewer turns."""

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
from edgepipe.store.store import ModelStore
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.weights import open_weights
from edgepipe.wire.engines import DraftState, EngineState
from tests.support.gateways.batch_files import until_true
from tests.support.models.files import gguf_text
from tests.support.models.mtp_files import predictable_model, write_mtp_folder
from tests.support.numerics.spec_reference import float_weights, reference_logits
from tests.support.processes.nodes import until_answers

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (find_spec("torch") and find_spec("mlx")), reason="torch and MLX are not both installed"),
    pytest.mark.timeout(240),
]
FAMILY = "qwen35"
PROMPT = np.random.default_rng(5).integers(3, 60, 70).tolist()
NUM_TOKENS = 40
# The plan and --draft: torch or MLX holds the layer.
PLANS = [("b:0-1,a:2-3", "auto"), pytest.param(("a:0-1,b:2-3", "mtp"), marks=pytest.mark.long)]
LINK = "1gbit,50ms"  # a turn takes so long that drafts pay also on busy machines
JOIN_S = 120.0  # two backends are imported and measured at once
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Nodes that serve the model, and the reference."""

    nodes: list[StartedNode]
    engine: EngineState
    behind: list[int]  # the token that follows each token

    async def drafts(self) -> DraftState:
        """Counts of drafts since the model was loaded."""
        async with connect(self.nodes[0].data_dir) as admin:
            found = (await admin.status()).engines[0].drafts
        assert found is not None
        return found

    async def has_drafted_since(self, before: DraftState) -> bool:
        """Whether the engine has reported further drafts."""
        return (await self.drafts()).drafted > before.drafted

    async def ask(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """What the first node answers."""
        body = {"model": "hybrid", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= {"prompt": prompt, "max_tokens": num_tokens}
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            response = await client.post(f"http://127.0.0.1:{self.nodes[0].http_port}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What the reference in numpy gives: the last token decides."""
        ids = [self.behind[prompt[-1]]]
        while len(ids) < num_tokens:
            ids.append(self.behind[ids[-1]])
        return ids


def behind_each(folder: Path) -> list[int]:
    """The token that follows each token, by the reference."""
    source = open_weights(folder)
    tokens = list(range(source.config.vocab_size))
    return reference_logits(source.config, float_weights(source), tokens).argmax(-1).tolist()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PLANS)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    place = tmp_path_factory.mktemp("hybrid")
    folder = write_mtp_folder(place / "hybrid", FAMILY, predictable_model(FAMILY))
    Tokenizer.from_gguf(gguf_text()).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    ModelStore(place / "models").pull(str(folder))
    nodes = [NodeToStart(name="a", backend="torch"), NodeToStart(name="b", backend="mlx", device="cpu")]
    plan = LocalCluster(
        cluster=f"mtp-{secrets.token_hex(4)}", nodes=nodes, models_dir=place / "models", threads=1, link=LINK
    )
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=JOIN_S)
        held, draft = request.param
        wanted = serve_request("hybrid", plan=held, dtype="float32", activations="float32", draft=draft)
        (engine,) = await serve_with_progress(admin, wanted)
        await until_answers(started[0].http_port)
        yield Served(nodes=started, engine=engine, behind=behind_each(folder))


async def test_answers_are_those_of_single_tokens_and_drafts_are_right(served: Served) -> None:
    (last,) = served.engine.stages[-1].slices
    assert str(last.layers) == "2-4", "the stage with the head holds the layer, too"
    answer = await served.ask(PROMPT, NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == served.greedy(PROMPT, NUM_TOKENS)
    drafts = await served.drafts()
    assert drafts.accepted == drafts.drafted > 0, (
        "this model's layer knows the next token; how often it pays is measured"
    )


async def test_second_turns_from_cached_blocks_and_snapshots_go_on_exactly(served: Served) -> None:
    """The tokens of a first turn are cached, with the layer's keys; the next turn drafts behind them."""
    turn = [*PROMPT[::-1], 7, 8, 9]
    for length in (20, 33):
        answer = await served.ask(turn, length)
        ids = answer["choices"][0]["token_ids"]
        assert ids == served.greedy(turn, length)
        before = await served.drafts()
        turn = [*turn, *ids, 11, 12, 13]
        again = await served.ask(turn, 24)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["token_ids"] == served.greedy(turn, 24)
        await until_true(lambda before=before: served.has_drafted_since(before))  # engines report now and then
        after = await served.drafts()
        assert after.accepted - before.accepted == after.drafted - before.drafted
        turn += again["choices"][0]["token_ids"]


async def test_chats_beside_one_another_get_their_own_tokens(served: Served) -> None:
    prompts = [[*PROMPT[shift:], *PROMPT[:shift]] for shift in (3, 11, 29)]
    answers = await asyncio.gather(*(served.ask(prompt, 24) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == served.greedy(prompt, 24)
