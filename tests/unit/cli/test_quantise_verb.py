"""``edgepipe models quantise``: what it prints with and without a backend that computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edgepipe.backend import divergence
from edgepipe.backend.types import BackendOptions
from edgepipe.errors import BackendUnavailable
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import byte_level_tokenizer
from tests.support.models.files import hf_values, write_hf_folder
from tests.support.processes.command_line import Run


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with the model ``tiny`` in F32; do not change it."""
    folder = write_hf_folder(tmp_path_factory.mktemp("sources") / "tiny", hf_values())
    byte_level_tokenizer(300).save(str(folder / "tokenizer.json"))
    root = tmp_path_factory.mktemp("models")
    ModelStore(root).pull(str(folder))
    return root


@pytest.fixture
def models(pulled: Path, tmp_path: Path) -> Path:
    """The folder of models, with the model ``tiny`` in F32."""
    return Path(shutil.copytree(pulled, tmp_path / "data" / "models"))


def without_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, _options: BackendOptions) -> None:
        raise BackendUnavailable(f"the {name} backend cannot be imported")

    monkeypatch.setattr(divergence, "create_backend", missing)


def test_it_prints_the_divergence(run: Run, models: Path) -> None:
    pytest.importorskip("torch", reason="a backend that computes")
    first = run("models", "quantise", "tiny", "--to", "q8")
    assert first.code == 0
    assert f"tiny-q8 is here: {models / 'tiny-q8'}" in first.out
    assert "mean KL divergence over 512 tokens" in first.out
    again = json.loads(run("models", "quantise", "tiny", "--to", "q8", "--json").out)
    assert again["already_here"]
    assert again["num_tokens"] == 512
    assert again["kl"] > 0
    assert again["size_bytes"] < again["original_bytes"] / 2


def test_without_a_backend_it_says_how_to_measure(run: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_backends(monkeypatch)
    result = run("models", "quantise", "tiny", "--to", "q4")
    assert result.code == 0
    assert "was not measured: no backend is installed" in result.out
    assert "edgepipe update --extra torch" in result.out
    assert (models / "tiny-q4").is_dir()
    found = json.loads(run("models", "quantise", "tiny", "--to", "q4", "--json").out)
    assert (found["kl"], found["num_tokens"]) == (None, 0)
    assert "no backend" in found["not_measured"]


def test_errors_name_the_next_step(run: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_backends(monkeypatch)
    assert models.is_dir()
    unknown = run("models", "quantise", "tiny", "--to", "q5")
    assert (unknown.code, "give q4 or q8" in unknown.err) == (2, True)
    run("models", "quantise", "tiny", "--to", "q8")
    packed = run("models", "quantise", "tiny-q8", "--to", "q4")
    assert (packed.code, "is packed already" in packed.err) == (2, True)


def test_matrices_that_cannot_be_packed_are_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_backends(monkeypatch)
    source = write_hf_folder(tmp_path / "narrow", hf_values(intermediate_size=48))
    ModelStore(tmp_path / "data" / "models").pull(str(source))
    said = run("models", "quantise", "narrow", "--to", "q4").out
    assert "not packed, but stored as in the original: the rows of 3 matrices have 48 values" in said
    assert len(json.loads(run("models", "quantise", "narrow", "--to", "q4", "--json").out)["unpacked"]) == 3
