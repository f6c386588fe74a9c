"""The context that a model is served with: published configs, GGUF metadata, cards of earlier pulls, what users ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.config import gguf_config, hf_config
from edgepipe.spec.shape_limits import MAX_CONTEXT
from tests.support.models.files import hf_values
from tests.support.models.specs import first_rope, windows_of

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_ropes.json").read_text())
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN25: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}


def test_qwen25_with_yarn_takes_131072_tokens() -> None:
    assert hf_config(hf_values(**QWEN25, rope_scaling=YARN)).context_length == 131_072


@pytest.mark.parametrize("published", PUBLISHED, ids=[model["model"] for model in PUBLISHED])
def test_a_published_config_has_the_context_that_its_page_names(published: dict[str, Any]) -> None:
    assert hf_config(hf_values(**published["values"])).context_length == published["context"]


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({}, 32_768),
        ({"context_length": 131_072}, 131_072),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 32_768),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32_768}, 131_072),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, 131_072),
        (
            {
                "context_length": 131_072,
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 32_768,
            },
            131_072,
        ),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 32_768),
    ],
)
def test_a_gguf_file_with_yarn_takes_the_stretched_context(scaling: dict[str, Any], context: int) -> None:
    assert gguf_config(gguf_metadata(scaling), {"token_embd.weight": (300, 32)}).context_length == context


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_a_gguf_file_that_names_a_factor_and_no_type_is_scaled_linearly(key: str) -> None:
    rope = first_rope(gguf_config(gguf_metadata({key: 4.0}), {"token_embd.weight": (300, 32)}))
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


def gguf_metadata(changes: dict[str, Any]) -> dict[str, object]:
    """Metadata of a tiny qwen2 trained on 32,768 tokens; keys of ``changes`` stand below ``qwen2.rope``."""
    values: dict[str, object] = {
        "block_count": 2,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": changes.get("context_length", 32_768),
    }
    values |= {f"rope.{key}": value for key, value in changes.items() if key != "context_length"}
    return {"general.architecture": "qwen2"} | {f"qwen2.{key}": value for key, value in values.items()}


def test_a_window_between_both_contexts_is_kept() -> None:
    values = hf_values(**QWEN25, use_sliding_window=True, sliding_window=65_536, max_window_layers=1)
    assert windows_of(hf_config(values)) == (None,) * 3
    assert windows_of(hf_config({**values, "rope_scaling": YARN})) == (None, 65_536, 65_536)


def test_a_yarn_factor_left_out_is_the_ratio_of_both_contexts() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 4096}
    config = hf_config(hf_values(max_position_embeddings=16_384, rope_scaling=scaling))
    assert (first_rope(config).factor, config.context_length) == (4.0, 16_384)


def test_an_absurd_factor_makes_no_absurd_context() -> None:
    scaling = {"type": "yarn", "factor": 1e6, "original_max_position_embeddings": 32_768}
    assert hf_config(hf_values(rope_scaling=scaling)).context_length == MAX_CONTEXT


def test_more_context_than_the_model_takes_is_refused_with_the_number_it_takes() -> None:
    config = hf_config(hf_values(**QWEN25, rope_scaling=YARN))
    assert (config.context_for(0), config.context_for(100_000)) == (131_072, 100_000)
    with pytest.raises(ConfigInvalid) as caught:
        config.context_for(131_073)
    assert "131072" in caught.value.fact
