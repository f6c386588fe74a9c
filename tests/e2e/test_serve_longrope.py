"""A tiny Phi-3 served by two nodes, torch and MLX, within its trained context: both stages use the short factors."""

from __future__ import annotations

import json
import secrets
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, local_cluster, wait_until_joined
from edgepipe.cli.serve import serve_request
from edgepipe.store.store import ModelStore
from edgepipe.text.tokenizer import Tokenizer
from tests.support.models.family_files import tiny_values, write_family_folder
from tests.support.models.files import gguf_text
from tests.support.processes.nodes import until_answers

pytestmark = [
    pytest.mark.long,  # the shortened forms: numerics/test_served_context.py, unit/stage/test_served_context.py
    pytest.mark.skipif(
        not all(map(find_spec, ("torch", "mlx", "transformers"))), reason="torch, MLX or transformers is not installed"
    ),
    pytest.mark.timeout(240),
]
TRAINED = 64  # tokens, of 256
PROMPT = np.random.default_rng(5).integers(3, 60, 40).tolist()
NUM_TOKENS = 20
JOIN_S = 120.0  # two backends are imported and measured at once


def reference_ids(folder: Path) -> list[int]:
    """What transformers answers; it uses short factors for so few tokens."""
    import torch
    from safetensors.torch import load_file
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(**tiny_values("phi3"), pad_token_id=0)
    model = Phi3ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


async def test_a_prompt_within_the_trained_context_gets_the_answer_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "phi"
    folder.mkdir()
    write_family_folder(folder, "phi3")
    Tokenizer.from_gguf(gguf_text()).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    ModelStore(tmp_path / "models").pull(str(folder))
    nodes = [NodeToStart(name="a", backend="torch"), NodeToStart(name="b", backend="mlx", device="cpu")]
    plan = LocalCluster(
        cluster=f"longrope-{secrets.token_hex(4)}", nodes=nodes, models_dir=tmp_path / "models", threads=1
    )
    request = serve_request("phi", plan="a:0-0,b:1-1", context=TRAINED, dtype="float32", activations="float32")
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=JOIN_S)
        notes = [event.note async for event in admin.serve(request)]
        assert any(note.startswith("short rotary factors: the context of 64 tokens") for note in notes)
        await until_answers(started[0].http_port)
        body = {"model": "phi", "prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            answer = await client.post(f"http://127.0.0.1:{started[0].http_port}/v1/completions", json=body)
    assert answer.json()["choices"][0]["token_ids"] == reference_ids(folder), answer.text
