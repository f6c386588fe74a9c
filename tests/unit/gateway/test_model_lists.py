"""What lists of models say: facts of the files, the same at every request; and what a user set for a served model."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgepipe.cli.serve import serve_request
from edgepipe.errors import ConfigInvalid
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.model_facts import ModelFacts, read_facts
from edgepipe.spec.config import hf_config
from edgepipe.store.store import ModelStore
from edgepipe.text.template_defaults import keywords_in
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import ClusterView
from edgepipe.wire.v1 import engine_pb2, node_pb2
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine, view_of
from tests.support.gateways.server import serving
from tests.support.gateways.template_traits import TURNS, traits_of
from tests.support.models.files import TOKENS, hf_values, random_tensors, source_folder, write_gguf

PULLED_S = 1_700_000_123


class TickingClock:
    """A clock that never says the same time twice."""

    def __init__(self) -> None:
        self._s = 1_790_000_000.0

    def monotonic_s(self) -> float:
        return self.wall_s()

    def wall_s(self) -> float:
        self._s += 61.7
        return self._s


def _pulled(tmp_path: Path) -> Path:
    """A GGUF model in a store, pulled some time ago."""
    config = hf_config(hf_values(vocab_size=len(TOKENS)))
    source = write_gguf(tmp_path / "tiny.gguf", random_tensors(config), config, scheme="Q8_0", tokens=TOKENS)
    path = ModelStore(tmp_path / "store").pull(str(source)).path
    os.utime(path / "edgepipe.json", (PULLED_S, PULLED_S))
    return path


def _with(view: ClusterView, *, path: str = "/nowhere", **engine: Any) -> ClusterView:
    (model,) = view.served
    return replace(view, served=(replace(model, model_path=path, engine=replace(model.engine, **engine)),))


async def test_lists_say_the_same_at_every_request_and_what_a_gguf_is(tmp_path: Path) -> None:
    change = partial(_with, path=str(_pulled(tmp_path)))
    async with serving(FakeEngine(), clock=TickingClock(), change=change) as served:
        for path in ("/v1/models", "/api/tags", "/api/ps"):
            first = (await served.http.get(path)).json()
            assert (await served.http.get(path)).json() == first
        (model,) = (await served.http.get("/v1/models")).json()["data"]
        assert model["created"] == PULLED_S
        (tag,) = (await served.http.get("/api/tags")).json()["models"]
        assert tag["modified_at"] == "2023-11-14T22:15:23Z"
        details = tag["details"]
        assert (details["format"], details["family"], details["families"]) == ("gguf", "llama", ["llama"])
        assert details["quantization_level"] == "Q8_0"
        assert details["parameter_size"]
        (loaded,) = (await served.http.get("/api/ps")).json()["models"]
        assert loaded["expires_at"] == "2200-01-01T00:00:00Z"
        shown = (await served.http.post("/api/show", json={"model": "tiny"})).json()
        assert (shown["details"], shown["modified_at"]) == (details, tag["modified_at"])


def test_facts_of_a_folder_and_of_nothing(tmp_path: Path) -> None:
    path = ModelStore(tmp_path / "store").pull(str(source_folder(tmp_path))).path
    facts = read_facts(path)
    assert (facts.format, facts.family, facts.quantisation) == ("safetensors", "llama", "F32")
    assert read_facts(tmp_path / "nothing") == ModelFacts()


class ThinkingAssets(ByteAssets):
    """A template that knows a switch of reasoning, and an effort."""

    traits = traits_of("{{ enable_thinking }}{{ reasoning_effort }}" + TURNS)
    chat = detect_format("{{ enable_thinking }}{{ reasoning_effort }}")


async def test_a_served_model_s_keywords_hold_where_a_request_does_not_say() -> None:
    change = partial(_with, template_keywords='{"enable_thinking":false,"reasoning_effort":"low"}')
    async with serving(FakeEngine(), load=lambda path: ThinkingAssets(), change=change) as served:

        async def prompt(**fields: Any) -> str:
            assert (await served.chat(**fields)).status_code == 200
            return bytes(served.engine.submits[-1].prompt).decode().partition("user:")[0]

        assert await prompt() == "[enable_thinking=False][reasoning_effort=low]"
        assert await prompt(enable_thinking=True) == "[enable_thinking=True][reasoning_effort=low]"
        assert await prompt(reasoning={"effort": "high"}) == "[enable_thinking=True][reasoning_effort=high]"
        assert (await served.http.get("/v1/models/tiny")).json()["template_keywords"] == {
            "enable_thinking": False,
            "reasoning_effort": "low",
        }


def test_the_flag_travels_to_the_gateway() -> None:
    spec = serve_request("m", template_keywords='{ "enable_thinking": false }').options
    assert from_wire(to_wire(spec, node_pb2.ServeSpec), ServeSpec).template_keywords == '{"enable_thinking":false}'
    (model,) = view_of("127.0.0.1:1").served
    state = replace(model.engine, template_keywords=spec.template_keywords)
    received = from_wire(to_wire(state, engine_pb2.EngineState), EngineState).template_keywords
    assert keywords_in(received) == {"enable_thinking": False}


@pytest.mark.parametrize(
    "text", ["{", "3", '{"messages": []}', '{"tools": []}', '{"date_string": "' + "x" * 5000 + '"}']
)
def test_keywords_that_no_template_takes_are_refused_and_never_believed(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="--template-keywords"):
        serve_request("m", template_keywords=text)
    assert keywords_in(text) == {}
