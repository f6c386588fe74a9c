"""The demo model served by real nodes with KV as codes: what a user gets of ``edgepipe serve demo --kv 8bit``."""

from __future__ import annotations

import secrets
from importlib.util import find_spec

import httpx
import pytest

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, local_cluster, wait_until_joined
from edgepipe.cli.serve import serve_request, serve_with_progress
from edgepipe.store.store import StoredModel
from tests.support.processes.nodes import until_answers

pytestmark = [
    pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed"),
    pytest.mark.timeout(180),
]
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
JOIN_S = 60.0


@pytest.mark.parametrize(("kv", "share"), [("8bit", 0.6), pytest.param("4bit", 0.3, marks=pytest.mark.long)])
async def test_a_question_is_answered_from_kv_as_codes(demo_model: StoredModel, kv: str, share: float) -> None:
    nodes = [NodeToStart(name=name, backend="torch") for name in "ab"]
    plan = LocalCluster(
        cluster=f"packed-kv-{secrets.token_hex(4)}", nodes=nodes, models_dir=demo_model.path.parent, threads=1
    )
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=JOIN_S)
        request = serve_request("demo", plan="a:0-14,b:15-29", kv=kv)
        (engine,) = await serve_with_progress(admin, request)
        tokens = engine.num_blocks * engine.block_size
        kv_bytes = sum(stage.kv_bytes for stage in engine.stages)
        assert kv_bytes < share * tokens * demo_model.config.kv_bytes_per_token(form="bfloat16")
        await until_answers(started[1].http_port)
        prompt = demo_model.tokenizer().encode(QUESTION)
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 20}
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            response = await client.post(f"http://127.0.0.1:{started[1].http_port}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "The capital of France is Paris."
