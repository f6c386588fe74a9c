"""What a draft model brings to a lone chat with real weights: the demo model, drafted by itself and by a random model.

A part of ``scripts/alone_drafts.py`` (``models``). Drafts of the same model are right, and each costs as much as a
token: they pay where a turn takes long for other reasons, such as slow links. Drafts of random weights are wrong. Both
must change no token, and cost nothing where they do not pay.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench_foundation import HALVES, stored_demo
from figures import Row, at_least
from local_nodes import Answer, Node, complete, running_nodes
from safetensors.numpy import save_file

from edgepipe.spec.layout import model_tensors
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.testing.tiny_model import TinyWeights, tiny_config

_RANDOM = "random"
_TOKENS = 100
_PROMPTS = ("Write a short story about a lighthouse.", "Explain how rain forms.", "Describe an old clock.")
_CASES = (("ideal", 0.98, 0.98), ("1gbit,40ms", 1.5, 0.98))  # link; bars of the model itself and of the random one


def model_rows(full: bool) -> list[Row]:
    """Two stages of one thread each, with a link that takes no time and with a slow one."""
    with tempfile.TemporaryDirectory() as place:
        demo = stored_demo()
        models = Path(place) / "models"
        shutil.copytree(demo.path, models / demo.path.name)
        ModelStore(models).pull(str(_write_random(Path(place) / _RANDOM, demo)))
        tokenizer = demo.tokenizer()
        prompts = [tokenizer.encode(text) for text in _PROMPTS[: None if full else 1]]
        return [row for case in _CASES for row in _rows(models, prompts, *case, rounds=2 if full else 1)]


def _rows(
    models: Path, prompts: Sequence[list[int]], link: str, itself: float, wrong: float, *, rounds: int
) -> list[Row]:
    rates: dict[str, list[float]] = {"off": [], "demo": [], _RANDOM: []}
    ids: dict[str, list[tuple[int, ...]]] = {}
    with running_nodes(2, models_dir=models, threads=1, link="" if link == "ideal" else link) as nodes:
        for _ in range(rounds):
            for draft, found in rates.items():
                answers = _answers(nodes[0], prompts, draft)
                found.append(sum(map(_rate, answers)) / len(answers))
                ids[draft] = [each.token_ids for each in answers]
    plain = statistics.median(rates["off"])
    rows: list[Row] = []
    for draft, target in (("demo", itself), (_RANDOM, wrong)):
        name = f"demo drafted by {'itself' if draft == 'demo' else 'random weights'}, link {link}"
        rows.append(at_least(name, statistics.median(rates[draft]), "tok/s", plain, "off", target))
        same = sum(a == b for a, b in zip(ids["off"], ids[draft], strict=True))
        rows.append(Row("  equal answers", same, "answers", len(prompts), "all"))
    return rows


def _answers(node: Node, prompts: Sequence[list[int]], draft: str) -> list[Answer]:
    node.edgepipe("serve", "demo", "--plan", HALVES, "--context", "2048", "--draft", draft)
    complete(node, prompts[:1], max_tokens=60)  # the draft model loads meanwhile
    answers = [complete(node, [prompt], max_tokens=_TOKENS)[0] for prompt in prompts]
    node.edgepipe("stop", "demo")
    return answers


def _rate(answer: Answer) -> float:
    return (len(answer.token_times_s) - 1) / (answer.token_times_s[-1] - answer.token_times_s[0])


def _write_random(folder: Path, demo: StoredModel) -> Path:
    """Write a small model of random weights with the demo model's tokens."""
    config = tiny_config(
        num_layers=2,
        hidden_size=64,
        head_dim=16,
        vocab_size=demo.config.vocab_size,
        context_length=2048,
        tied_embeddings=True,
    )
    weights = TinyWeights(config)
    folder.mkdir()
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text("{}")
    shutil.copy(demo.tokenizer_path, folder / "tokenizer.json")
    save_file({name: weights.values(name) for name in model_tensors(config)}, folder / "model.safetensors")
    return folder
