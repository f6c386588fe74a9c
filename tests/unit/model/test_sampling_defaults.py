"""What ``generation_config.json`` says of sampling is kept in a model's card."""

import json
from pathlib import Path

import pytest

from edgepipe.errors import ModelInvalid
from edgepipe.model.sampling_defaults import checked_sampling, hf_sampling


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
