"""HTTP clients that leave, before an engine with real stages: every stage's KV is free again at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from edgepipe.errors import PeerClosed
from edgepipe.gateway.assets import ModelAssets
from edgepipe.gateway.service import Gateway, listen
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.system import RandomIds, SystemClock
from edgepipe.text.encoding import LongTextEncoder
from edgepipe.text.template import ChatTemplate, TemplateRenderer
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import byte_level_tokenizer
from edgepipe.wire.nodes import ClusterView, ServedModel
from tests.support.engine.lab import CONFIG, EngineLab, engine_lab

SLOW: dict[str, Any] = {"device": "m4", "time_factor": "20"}
FREED_S = 2.0  # what is promised
REQUEST = {"prompt": [3, 1, 4], "stream": True, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}


@asynccontextmanager
async def door(lab: EngineLab) -> AsyncGenerator[httpx.AsyncClient]:
    """A gateway's HTTP, in front of the engine."""
    gateway = Gateway(
        node_id="gateway-node",
        node_name="a",
        security=Plaintext(),
        clock=SystemClock(),
        ids=RandomIds(),
        new_seed=lambda: 7,
        load=_load,
    )
    sock = listen(host="127.0.0.1", port=0)
    tasks = [asyncio.create_task(gateway.run()), asyncio.create_task(gateway.serve(sock))]
    served = ServedModel(engine=lab.engine.state(), model_path="/nowhere")
    gateway.update(ClusterView(cluster_id="lab", served=(served,)))
    try:
        base = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=20, trust_env=False, verify=False) as http:
            yield http
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _load(path: Path) -> ModelAssets:
    tokenizer = Tokenizer(byte_level_tokenizer(CONFIG.vocab_size))
    return ModelAssets(tokenizer, TemplateRenderer(ChatTemplate(sources={})), LongTextEncoder(path / "tokenizer.json"))


@asynccontextmanager
async def answer_from(http: httpx.AsyncClient, lab: EngineLab, *, num_events: int) -> AsyncGenerator[None]:
    """In the middle of an answer, which its client leaves with the block."""
    async with http.stream("POST", "/v1/completions", json=REQUEST) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        for _ in range(num_events):
            await anext(lines)
        yield


def _held(lab: EngineLab) -> bool:
    state = lab.engine.state()
    return bool(state.running and state.free_blocks < state.num_blocks)


def _free(lab: EngineLab) -> bool:
    state = lab.engine.state()
    return not (state.running or state.waiting or state.in_flight) and state.free_blocks == state.num_blocks


async def test_a_client_that_leaves_frees_its_blocks_within_two_seconds() -> None:
    async with engine_lab(**SLOW) as lab, door(lab) as http:
        for num_events in (1, 2, 40):
            async with answer_from(http, lab, num_events=num_events):
                await lab.until(lambda: _held(lab))
            async with asyncio.timeout(FREED_S):
                await lab.until(lambda: _free(lab))


async def test_a_client_that_leaves_before_the_answer_begins_frees_its_blocks() -> None:
    async with engine_lab(**SLOW) as lab, door(lab) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=REQUEST | {"stream": False}))
        await lab.until(lambda: _held(lab))
        asking.cancel()
        async with asyncio.timeout(FREED_S):
            await lab.until(lambda: _free(lab))


async def test_who_leaves_while_the_model_recovers_is_not_computed_again() -> None:
    async with engine_lab(**SLOW) as lab, door(lab) as http:
        async with answer_from(http, lab, num_events=5):
            await lab.until(lambda: _held(lab))
            for node in lab.nodes:
                node.hold = asyncio.Event()
            session = lab.stages.stages[1]._current
            assert session is not None
            session.fault(PeerClosed("the stage is shutting down"))
            await lab.until(lambda: all(len(node.prepared) == 2 for node in lab.nodes))
        async with asyncio.timeout(FREED_S):
            while lab.engine._table._choices:
                await http.get("/health")  # every look is a request of its own
        num_states = len(lab.states)
        for node in lab.nodes:
            assert node.hold is not None
            node.hold.set()
        await lab.until(lambda: lab.states[-1].state == "ready")
        async with asyncio.timeout(FREED_S):
            await lab.until(lambda: _free(lab))
        assert not any(state.running for state in itertools.islice(lab.states, num_states, None))
        answer = await http.post("/v1/completions", json=REQUEST | {"stream": False, "max_tokens": 3})
        assert len(answer.json()["choices"][0]["token_ids"]) == 3
