"""Rotary frequencies of published configs against ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgepipe.spec.config import hf_config
from edgepipe.spec.longrope import served_config
from edgepipe.spec.rope import rotary_frequencies
from tests.support.models.specs import first_attention, first_rope

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_ropes.json").read_text())
SCALED = [model for model in PUBLISHED if "rope_scaling" in model["values"]]
LONGROPES = [model for model in SCALED if model["values"]["rope_scaling"].get("type") == "longrope"]
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.mark.parametrize("published", SCALED, ids=[model["model"] for model in SCALED])
def test_a_published_rope_turns_as_in_transformers(published: dict[str, Any]) -> None:
    _assert_turns_as_in_transformers(published, context=published["context"])


@pytest.mark.parametrize("published", LONGROPES, ids=[model["model"] for model in LONGROPES])
def test_a_published_longrope_within_its_trained_context(published: dict[str, Any]) -> None:
    _assert_turns_as_in_transformers(published, context=published["values"]["original_max_position_embeddings"])


def _assert_turns_as_in_transformers(published: dict[str, Any], *, context: int) -> None:
    """Compare in a served context; transformers chooses longrope's factors by the length of a sequence."""
    values = {**SHAPE, **published["values"]}
    config = served_config(hf_config(values), context)
    reference = LlamaConfig(**{key: value for key, value in values.items() if key != "architectures"})
    rope, dims = first_rope(config), first_attention(config).head_dim
    theirs, amplitude = ROPE_INIT_FUNCTIONS[rope.scaling](
        reference, seq_len=context if rope.scaling == "longrope" else None
    )
    ours, our_amplitude = rotary_frequencies(rope, dims=dims, context_length=config.context_length)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
    assert our_amplitude == pytest.approx(amplitude)
