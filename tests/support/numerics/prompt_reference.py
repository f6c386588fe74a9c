"""transformers' log-probabilities of short texts under the demo model's own weights, kept in ``tests/data``.

The model is made from the exact values of the GGUF blocks, as stages multiply them, computed in float32. To write the
file again, after a change of its texts: ``python tests/support/numerics/prompt_reference.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import Weights
from tests.support.models.specs import first_attention, first_dense, first_rope

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel

FILE = Path(__file__).parents[2] / "data" / "prompt_logprobs_smollm2.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """A text, its tokens, and the log-probability of each token after the first."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural logarithms, one fewer than ids


def scored_texts() -> list[ScoredText]:
    """All texts of the file."""
    found = json.loads(FILE.read_text(encoding="utf-8"))["texts"]
    return [ScoredText(text=x["text"], ids=tuple(x["ids"]), logprobs=tuple(x["logprobs"])) for x in found]


def reference_model(weights: Weights) -> PreTrainedModel:
    """The demo model as transformers computes it, in float32 with eager attention."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = weights.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=first_dense(shape).inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=first_attention(shape).num_heads,
        num_key_value_heads=first_attention(shape).num_kv_heads,
        head_dim=first_attention(shape).head_dim,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=shape.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": first_rope(shape).theta},
        tie_word_embeddings=shape.tied_embeddings,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors = {name: torch.from_numpy(_exact(weights.load(name))) for name in weights.infos}
    loaded = model.load_state_dict(tensors, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["lm_head.weight"], []), "the head is the embedding"
    return model


def _exact(weight: StoredTensor | Packed) -> npt.NDArray[np.float32]:
    return weight.float32() if isinstance(weight, Packed) else as_float32(weight).copy()


def prompt_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    """The log-probability of each token after the first, given those before it."""
    import torch

    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def write(demo: StoredModel, texts: Sequence[str]) -> None:
    """Score the texts and write the file."""
    model, tokenizer = reference_model(demo.open_weights()), demo.tokenizer()
    encoded = [(text, tokenizer.encode(text)) for text in texts]
    scored = [
        {"text": text, "ids": ids, "logprobs": [round(value, 5) for value in prompt_logprobs(model, ids)]}
        for text, ids in encoded
    ]
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in scored)
    FILE.write_text(f'{{"texts": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    models_dir = Path(os.environ.get("EP_TEST_MODELS") or Path("~/.cache/edgepipe-tests").expanduser())
    write(ModelStore(models_dir).resolve("demo"), [entry.text for entry in scored_texts()])
