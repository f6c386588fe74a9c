"""Settings of a served model reach the backend of every stage and of every measurement. A new one gets a value here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path

import pytest

from edgepipe.backend.types import ActivationType, StageSettings
from edgepipe.spec.config import EMULATED_KEY
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.longrope import served_config
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.engines import ServeSpec
from tests.support.backends.recording import BLOCK_SIZE, NAME, install, recorded
from tests.support.models.family_files import tiny_values
from tests.support.models.for_nodes import CONFIG
from tests.support.processes.nodes import Nodes, idle

SETTINGS = StageSettings(
    dtype="bfloat16",
    kv="8bit",
    activation_type=ActivationType.FLOAT32,
    context_length=64,  # the short factors of a model whose own context has the long ones
    block_size=BLOCK_SIZE,  # chosen by the nodes
    most_slots=9,
    kv_ram="1000000",
    kv_disk="2000000",
    draft_model="other",
    draft_hash="abc",
)


def texts(settings: StageSettings) -> dict[str, str]:
    return {each.name: str(getattr(settings, each.name)) for each in fields(settings)}


@pytest.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    for name, value in install(tmp_path / "recorded").items():
        monkeypatch.setenv(name, value)
    made = Nodes(folder=tmp_path, cluster=f"settings-{tmp_path.name}-{id(tmp_path)}", forks=False)  # PYTHONPATH counts
    yield made
    await made.end()


def pull_longrope(models_dir: Path, source: Path) -> ModelConfig:
    """A model without weights whose rotary factors depend on the context; its config."""
    write_model_folder(source, CONFIG)
    values = tiny_values("phi3") | {"vocab_size": CONFIG.vocab_size, EMULATED_KEY: True}
    (source / "config.json").write_text(json.dumps(values))
    store = ModelStore(models_dir)
    store.pull(str(source))
    return store.resolve(source.name).config


def test_every_setting_differs_from_its_default() -> None:
    same = [each.name for each in fields(StageSettings) if getattr(SETTINGS, each.name) == each.default]
    assert not same, "give each new setting another value than its default"


async def test_every_setting_reaches_every_stage_and_every_measurement(nodes: Nodes, tmp_path: Path) -> None:
    config = pull_longrope(tmp_path / "a" / "models", tmp_path / "tiny")
    a, b = [await nodes.start(name, backend=NAME) for name in "ab"]
    await a.until(lambda status: idle(status, 2))
    async with b.admin() as admin:
        survey = await admin.survey("tiny", SETTINGS)
    assert survey.settings == SETTINGS
    assert all(machine.layer is not None for machine in survey.machines), "both were measured"
    measured = recorded(tmp_path / "recorded")
    engine = await b.serve("tiny", options=ServeSpec(model="tiny", settings=SETTINGS, num_nodes=2))
    assert len(engine.stages) == 2
    served = [note for note in recorded(tmp_path / "recorded") if note["served"]]
    assert len(served) == 2
    expected = texts(SETTINGS.of_backend()) | {"config": repr(served_config(config, 64)), "block_size": str(BLOCK_SIZE)}
    assert [note | expected for note in served] == served
    assert config != served_config(config, 64)
    assert len(measured) == 2
    expected = texts(SETTINGS.of_layer()) | {"block_size": str(BLOCK_SIZE)}
    assert [note | expected for note in measured] == measured
