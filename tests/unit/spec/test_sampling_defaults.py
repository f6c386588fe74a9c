"""What ``generation_config.json`` says of sampling is kept in a model's card."""

import json
import logging
from pathlib import Path

import pytest

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.spec.sampling_defaults import checked_sampling, gguf_sampling, hf_sampling
from edgepipe.store.store import ModelStore
from tests.support.models.files import TOKENS, hf_values, random_tensors, write_gguf


def test_values_that_can_be_used_are_read(tmp_path: Path) -> None:
    assert hf_sampling(tmp_path) == {}
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": [1], "min_p": 0}
    odd = {"temperature": "warm", "top_k": -1, "top_p": 0, "repetition_penalty": 1.05}
    greedy = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05}
    for given, found in (
        (greedy, {"repetition_penalty": 1.05}),
        ({"temperature": 0.0}, {}),
        (values, {"temperature": 0.6, "top_k": 20, "min_p": 0}),
        (odd, {"repetition_penalty": 1.05}),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
        assert hf_sampling(tmp_path) == found


def test_a_card_of_a_peer_has_none_out_of_bounds() -> None:
    with pytest.raises(ModelInvalid):
        checked_sampling({"temperature": 1e9})


def test_values_in_a_gguf_file_are_the_model_s_defaults(tmp_path: Path) -> None:
    """Written by the ``gguf`` package, as 32-bit floats."""
    config = hf_config(hf_values())
    tokens = TOKENS + [f"t{index}" for index in range(300 - len(TOKENS))]
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05, "penalty_last_n": 64}
    file = write_gguf(tmp_path / "a.gguf", random_tensors(config), config, tokens=tokens, sampling=sampling)
    store = ModelStore(tmp_path / "store")
    store.pull(str(file))
    assert store.resolve("a").card.sampling == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"temp": 0.0, "top_k": 40}, {}),
        ({"temp": float("nan"), "top_k": -1, "top_p": 1e9, "min_p": "x"}, {}),
        ({"temp": float("inf"), "penalty_repeat": 1.1}, {"repetition_penalty": 1.1}),
        ({"temp": 1, "top_k": [3]}, {"temperature": 1.0}),
    ],
)
def test_values_in_a_gguf_file_are_checked_as_those_of_a_folder(
    given: dict[str, object], found: dict[str, float]
) -> None:
    assert gguf_sampling({f"general.sampling.{key}": value for key, value in given.items()}, name="a") == found


def test_recommended_samplers_that_are_not_used_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gguf_sampling({"general.sampling.mirostat": 0, "general.sampling.xtc_probability": 0.0}, name="a")
    assert not caplog.messages
    gguf_sampling({"general.sampling.mirostat": 2, "general.sampling.xtc_probability": 0.5}, name="a")
    assert caplog.messages == ["the file recommends mirostat and xtc_probability, which is not used model=a"]
