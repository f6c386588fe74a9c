"""What fewer bits of KV do to a real model: its predictions over a text, and facts that it finds again in a long one.

Each form of KV runs through the backend's own path, and is compared with KV in the compute type.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from edgepipe_torch import TorchBackend
from figures import ROOT
from safetensors.numpy import save_file

from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.kv_forms import KV_4BIT, KV_8BIT, REST_TOKENS
from edgepipe.spec.layout import stored_shapes
from edgepipe.spec.tensors import WeightSource
from edgepipe.store.quantise import REFERENCE_TEXT
from edgepipe.store.store import StoredModel
from edgepipe.weights.weights import open_weights
from tests.support.backends.steps import make_step, run_step, step_row, token_ids
from tests.support.models.recurrent_files import tiny_values
from tests.support.numerics.harness import Pipeline

FORMS: Mapping[str, str] = {"8 bits": KV_8BIT, "4 bits": KV_4BIT}
BLOCK, CHUNK = 32, 128  # tokens
FACTS: Mapping[str, str] = {
    "The password of the old library in Oslo is": "tulip",
    "Uncle Bernard keeps his spare keys under the": "piano",
    "My grandmother's first horse was called": "Pepper",
    "The ferry to the island of Brenna leaves every": "Thursday",
    "Captain Morris painted his wooden boat bright": "orange",
    "The treasure of the abbey was found in a barrel of": "salt",
    "Doctor Lindqvist plays every evening on her": "violin",
    "The winner of the village race received a large": "pumpkin",
    "Our neighbour's parrot always repeats the word": "banana",
    "The secret meeting will take place behind the": "bakery",
}

_HYBRID: Mapping[str, Any] = {
    **tiny_values("qwen35"),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "head_dim": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "mtp_num_hidden_layers": 0,
}
_HEAD_SIZE = 3.0  # standard deviation of its logits: some tokens are much likelier than others, as with trained weights

Floats = npt.NDArray[np.float64]


class Quality(NamedTuple):
    """Predictions with a form of KV, against those with wide KV."""

    kl: float  # mean over the tokens of KL(wide || form), nats
    same_token: float  # share of tokens with the same most likely next one


def qualities(model: StoredModel, tokens: Sequence[int], *, threads: int = 1) -> dict[str, Quality]:
    """Return the quality of each form over one text, which all read side by side."""
    wide = loaded(model, "", len(tokens), threads)
    made = {name: loaded(model, form, len(tokens), threads) for name, form in FORMS.items()}
    sums = {name: np.zeros(2) for name in FORMS}
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        exact = _log_probabilities(wide, part, start, len(tokens))
        for name, backend in made.items():
            found = _log_probabilities(backend, part, start, len(tokens))
            sums[name] += (np.exp(exact) * (exact - found)).sum(), (exact.argmax(-1) == found.argmax(-1)).sum()
    for backend in (wide, *made.values()):
        backend.close()
    return {name: Quality(*(total / len(tokens)).tolist()) for name, total in sums.items()}


def hybrid_qualities(num_tokens: int) -> dict[str, Quality]:
    """Return the quality of each form with a model of random weights: three layers in four keep a state, one KV."""
    tokens = np.random.default_rng(1).integers(0, _HYBRID["vocab_size"], num_tokens).tolist()
    with tempfile.TemporaryDirectory() as folder:
        weights = open_weights(_write_hybrid(Path(folder)))
        exact = _hybrid_logits(weights, "", tokens)
        found = {name: _hybrid_logits(weights, form, tokens) for name, form in FORMS.items()}
    qualities: dict[str, Quality] = {}
    for name, own in found.items():
        kl = (np.exp(exact) * (exact - own)).sum(-1).mean()
        qualities[name] = Quality(float(kl), float((exact.argmax(-1) == own.argmax(-1)).mean()))
    return qualities


def _write_hybrid(folder: Path) -> Path:
    random = np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(_HYBRID), encoding="utf-8")
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in stored_shapes(hf_config(_HYBRID)).items():
        size = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        size *= _HEAD_SIZE if name.startswith("lm_head") else 1.0
        tensor = (random.standard_normal(shape) * size).astype(np.float32)
        tensors[name] = tensor[:, None, :] if "conv1d.weight" in name else tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def _hybrid_logits(weights: WeightSource, kv: str, tokens: Sequence[int]) -> Floats:
    """Return the logarithms of probabilities [T, V] behind each token of one sequence."""
    options = BackendOptions(device="cpu", dtype="float32", kv=kv, activation_type=ActivationType.FLOAT32, threads=1)
    pipeline = Pipeline.build([TorchBackend(options)], weights, num_blocks=blocks_of(len(tokens)), block_size=BLOCK)
    sequence = pipeline.add(len(tokens))
    parts = [tokens[start : start + CHUNK] for start in range(0, len(tokens), CHUNK)]
    logits = np.concatenate([pipeline.step([(sequence, part)], all_logits=True) for part in parts]).astype(np.float64)
    pipeline.close()
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def facts_found(model: StoredModel, kv: str, num_tokens: int, *, threads: int = 1) -> list[str]:
    """Return the facts that a model with a form of KV gives back out of a text of ``num_tokens``.

    Each tenth of the text ends with a fact. A fact counts if every token of its answer is the most likely one.
    """
    tokenizer = model.tokenizer()
    filler = tokenizer.encode(REFERENCE_TEXT + (ROOT / "docs" / "usage.md").read_text(encoding="utf-8"))
    text: list[int] = []
    for index, (beginning, end) in enumerate(FACTS.items()):
        fact = tokenizer.encode(f"\n\n{beginning} {end}.\n\n", add_special=False)
        length = num_tokens * (index + 1) // len(FACTS) - len(text) - len(fact)
        text += [*filler[:length], *fact]
        filler = filler[length:]
    assert len(text) == num_tokens, "the reference text is too short"
    backend = loaded(model, kv, num_tokens + 64, threads)
    blocks = blocks_of(num_tokens + 64)
    for start in range(0, num_tokens, 4 * CHUNK):
        part = text[start : start + 4 * CHUNK]
        run_step(backend, make_step([step_row(start, len(part), (0, blocks))], logit_rows=[]), token_ids(part))
    found: list[str] = []
    for beginning, end in FACTS.items():
        question = tokenizer.encode(f"\n\n{beginning}", add_special=False)
        answer = tokenizer.encode(f" {end}", add_special=False)
        asked = [*question, *answer[:-1]]
        wanted = range(len(question) - 1, len(asked))
        step = make_step([step_row(num_tokens, len(asked), (0, blocks))], logit_rows=wanted)
        if run_step(backend, step, token_ids(asked)).argmax(-1).tolist() == answer:
            found.append(end)
    backend.close()
    return found


def loaded(model: StoredModel, kv: str, num_tokens: int, threads: int) -> TorchBackend:
    """Return a backend on the CPU with all layers, and KV in a form for one sequence of ``num_tokens``."""
    options = BackendOptions(
        device="cpu", dtype="float32", kv=kv, activation_type=ActivationType.FLOAT32, threads=threads
    )
    backend, config = TorchBackend(options), model.config
    whole = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    backend.load(whole, model.open_weights(), lambda _: None)
    backend.allocate_kv(num_blocks=blocks_of(num_tokens), block_size=BLOCK)
    return backend


def blocks_of(num_tokens: int) -> int:
    """Return the blocks of a sequence, with those that a form of KV needs behind its tokens."""
    return -(-(num_tokens + REST_TOKENS) // BLOCK)


def _log_probabilities(backend: TorchBackend, part: Sequence[int], start: int, num_tokens: int) -> Floats:
    """Read tokens from a position on; return the logarithms of all tokens' probabilities behind each [T, V]."""
    row = step_row(start, len(part), (0, blocks_of(num_tokens)))
    logits = run_step(backend, make_step([row]), token_ids(part)).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
