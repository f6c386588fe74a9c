"""Measured layers outlive the node."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from edgepipe.daemon.device.layer_profiles import LayerProfiles, profile_key
from edgepipe.errors import ModelInvalid
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.spec.config_json import config_to_json
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.weights.mixes import mix_table
from tests.support.processes.waiting import until

PROFILE = LayerProfile(
    base_s=0.5, decode=(Point(1, 2),), prefill=(), head=(), kv_token_s=0.0, decode_context=64, measured_ms=5
)


def key(backend: str = "torch", **changes: Any) -> str:
    return profile_key(backend, {"a": "b"}, model_config=json.dumps(config_to_json(tiny_config(**changes))))


async def test_what_was_measured_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    profiles = LayerProfiles(path)
    profiles.keep("x", PROFILE)
    writer = asyncio.create_task(profiles.run())
    await until(path.exists)
    writer.cancel()
    assert LayerProfiles(path).get("x") == PROFILE
    assert LayerProfiles(path).get("y") is None


@pytest.mark.parametrize("text", ['{"x": 3}', '{"x": {}}', '{"x": {"decode": [], "prefill": [], "head": []}}', "[]"])
async def test_a_damaged_file_is_measured_anew(text: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(text)
    path.chmod(0o600)
    assert LayerProfiles(path).get("x") is None


def test_keys_tell_devices_and_shapes_apart_and_nothing_else() -> None:
    assert key() == key(context_length=512)
    assert len({key(), key("mlx"), key(hidden_size=128)}) == 3


def test_a_format_has_times_of_its_own() -> None:
    config = tiny_config()
    shape = json.dumps(config_to_json(config))
    tables = ["", mix_table(config, "q8_0").to_json(), mix_table(config, "mxfp4").to_json()]
    assert len({profile_key("torch", model_config=shape, model_weights=table) for table in tables}) == 3
    assert profile_key("torch", model_config=shape) == profile_key("torch", model_config=shape, model_weights="")
    with pytest.raises(ModelInvalid):
        profile_key("torch", model_config=shape, model_weights="[")
