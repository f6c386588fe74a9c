"""The choice between longrope's short and long factors, by the served context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.longrope import depends_on_context, factors_in_words, served_config
from edgepipe.spec.rope import rotary_frequencies
from tests.support.models.family_files import tiny_values
from tests.support.models.specs import attention_of

PHI = hf_config(tiny_values("phi3"))  # trained on 64 tokens, stretched to 256
SHORT, LONG = (1.0, 1.25, 1.5), (1.5, 2.0, 4.0)


def factors_of(config: ModelConfig) -> tuple[float, ...]:
    rope = attention_of(config.layers[0]).rope
    assert rope is not None
    stretched, _ = rotary_frequencies(rope, dims=6, context_length=config.context_length)
    plain, _ = rotary_frequencies(replace(rope, scaling="default"), dims=6, context_length=config.context_length)
    return tuple(round(float(factor), 9) for factor in plain / stretched)


@pytest.mark.parametrize(("context", "factors"), [(1, SHORT), (64, SHORT), (65, LONG), (256, LONG), (0, LONG)])
def test_the_served_context_decides(context: int, factors: tuple[float, ...]) -> None:
    assert factors_of(served_config(PHI, context)) == factors


def test_a_choice_is_final() -> None:
    assert served_config(served_config(PHI, 64), 256) == served_config(PHI, 64)


def test_the_words_name_the_context_that_uses_the_other_factors() -> None:
    assert factors_in_words(PHI, 0) == (
        "long rotary factors: the context of 256 tokens is more than the 64 of the model's first training; "
        "for shorter chats, --context 64 uses the short factors"
    )
    assert factors_in_words(PHI, 64).startswith("short rotary factors: the context of 64 tokens")


def test_other_models_have_no_choice() -> None:
    llama = hf_config(tiny_values("llama"))
    assert not depends_on_context(llama)
    assert served_config(llama, 64) is llama
    assert factors_in_words(llama, 64) == ""
