"""Which model ``edgepipe demo`` starts with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.cli import demo, models
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.weights.manifest import CARD_FILE


def test_a_model_that_cannot_be_read_is_pulled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model_folder(tmp_path / "tiny", emulated_model_config(num_layers=2))
    kept = ModelStore(tmp_path / "models").pull(str(tmp_path / "tiny"))
    pulled: list[str] = []

    def pull(_: Path, source: str) -> SimpleNamespace:
        pulled.append(source)
        return SimpleNamespace(model_id=source)

    monkeypatch.setattr(models, "pull_model", pull)
    assert demo._fetch(tmp_path / "models", "tiny") == "tiny"  # pyright: ignore[reportPrivateUsage]
    assert not pulled
    (kept.path / CARD_FILE).write_text("{}")
    assert demo._fetch(tmp_path / "models", "tiny") == "tiny"  # pyright: ignore[reportPrivateUsage]
    assert pulled == ["tiny"]
