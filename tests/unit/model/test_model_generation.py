"""What a model's makers advise for sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgepipe.model.generation import sampling_advice


@pytest.mark.parametrize(
    ("told", "advice"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 2},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": 0.0, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"temperature": "hot", "top_p": True, "top_k": 2.5, "min_p": 7}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_usable_advice_is_taken(tmp_path: Path, told: dict[str, Any], advice: dict[str, float]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    assert sampling_advice(tmp_path) == advice


def test_a_missing_or_broken_file_advises_nothing(tmp_path: Path) -> None:
    assert sampling_advice(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert sampling_advice(tmp_path) == {}
