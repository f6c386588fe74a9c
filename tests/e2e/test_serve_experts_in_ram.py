"""A mixture that an emulated GPU is too small for, served by a real daemon with experts in host memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from edgepipe_emulated.oracle import next_token

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.weights.weights import EMULATED_KEY
from edgepipe.wire.engines import ServeSpec
from tests.support.models.experts import QWEN3_MOE, expert_config
from tests.support.processes.nodes import Nodes, idle

SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "moe_intermediate_size": 512,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}  # experts take 25 MB a layer in bf16
CONFIG = expert_config(**SHAPE)
PROMPT = [104, 101, 108, 108, 111]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()


def pull(models_dir: Path, source: Path) -> None:
    """Put the model without weights into the store."""
    write_model_folder(source, CONFIG)
    stored = QWEN3_MOE | SHAPE | {EMULATED_KEY: True, "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(stored))
    ModelStore(models_dir).pull(str(source))


async def test_auto_serves_what_the_device_alone_cannot_hold(nodes: Nodes, tmp_path: Path) -> None:
    pull(tmp_path / "models", tmp_path / "mix")
    options = "time_factor=0,memory=150MB,ram=1GB"
    node = await nodes.start("a", models_dir=str(tmp_path / "models"), backend_options=options)
    await node.until(lambda status: idle(status, 1))
    with pytest.raises(NoFeasiblePlacement, match="the model needs about") as refused:
        await node.serve("mix")
    assert "--experts-in-ram auto" in refused.value.next_step
    engine = await node.serve("mix", options=ServeSpec(model="mix", experts_in_ram="auto"))
    (stage,) = engine.stages
    assert 30 <= stage.ram_percent <= 80
    (device,) = (await node.status()).members[0].node.devices
    (held,) = device.reserved
    assert held.ram_bytes > 0
    assert held.num_bytes <= 150e6
    body = {"model": "mix", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        url = f"http://127.0.0.1:{node.http_port}/v1/completions"
        answer = await client.post(url, json={**body, "return_token_ids": True})
    ids = answer.json()["choices"][0]["token_ids"]
    for index in range(8):
        assert ids[index] == next_token([*PROMPT, *ids[:index]], CONFIG)
