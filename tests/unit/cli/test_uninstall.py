"""``edgepipe uninstall`` removes what edgepipe made and nothing else, whatever folders it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgepipe.weights.manifest import FileEntry, Manifest
from tests.support.daemon.node_files import make_node
from tests.support.processes.command_line import Run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a service."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def _make_model(folder: Path) -> None:
    entry = FileEntry(name="weights/a.safetensors", num_bytes=3000, sha256="0" * 64, metadata=False)
    manifest = Manifest(model_id=folder.name, source="", tensors=(), files=(entry,))
    (folder / "repacked").mkdir(parents=True)
    (folder / "weights").mkdir()
    (folder / "weights" / "a.safetensors").write_bytes(bytes(3000))
    (folder / "repacked" / "x.repacked").write_bytes(bytes(2000))
    (folder / "edgepipe.json").write_text("{}")
    (folder / "template_traits.json").write_text("{}")
    (folder / "manifest.json").write_bytes(manifest.to_json())


def test_it_lists_and_removes_all_but_models(run: Run, home: Path) -> None:
    data, models = home / "data", home / "data" / "models"
    make_node(data)
    _make_model(models / "org--a")
    settings = home / "config" / "edgepipe" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("")
    kernels = home / "cache" / "edgepipe" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "code.o").write_bytes(bytes(100))
    listed = run("uninstall", "--dry-run").out
    assert all(str(path) in listed for path in (data, models, settings, kernels, models / "org--a" / "repacked"))
    assert "2.0 KB  weights in this CPU's layout" in listed
    assert "not made by edgepipe" not in listed
    assert (data / "identity").exists()
    assert run("uninstall").code == 2  # nobody is there to ask
    assert run("uninstall", "--yes").code == 0
    assert [path.name for path in data.iterdir()] == ["models"]
    assert not settings.parent.exists()
    assert not kernels.parent.exists()
    assert (models / "org--a" / "weights" / "a.safetensors").exists()
    assert not (models / "org--a" / "repacked").exists()
    assert run("uninstall", "--yes", "--purge-models").code == 0
    assert not data.exists()
    assert "keeps nothing" in run("uninstall").out


def test_a_folder_where_no_node_ever_ran_keeps_every_file(run: Run, home: Path) -> None:
    documents = home / "documents"
    for name in ("thesis.tex", "chats/family.txt", "identity/passport.pdf", "node.log", "trust/will.pdf"):
        path = documents / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = sorted(documents.rglob("*"))
    options = ("--data-dir", str(documents), "--purge-models", "--models-dir", str(documents))
    result = run("uninstall", "--yes", *options)
    assert result.code == 0
    assert "keeps nothing" in result.out
    assert "not made by edgepipe, stays" in result.out
    assert sorted(documents.rglob("*")) == before


def test_files_beside_a_node_and_beside_models_stay(run: Run, home: Path) -> None:
    data, models = home / "data", home / "models"
    make_node(data)
    (data / "photos").mkdir()
    (data / "photos" / "a.jpg").write_bytes(b"a")
    _make_model(models / "org--a")
    (models / "org--a" / "notes.txt").write_text("mine")
    (models / ".pulling-org--b").mkdir()
    (models / ".pulling-org--b" / "part").write_bytes(bytes(10))
    (models / "checkpoint").mkdir()
    (models / "checkpoint" / "model.safetensors").write_bytes(bytes(10))
    (models / "other.gguf").write_bytes(bytes(10))
    (models / "link").symlink_to(home / "elsewhere")
    options = ("--purge-models", "--models-dir", str(models))
    listed = run("uninstall", "--dry-run", *options).out
    foreign = listed.split("not made by edgepipe, stays:")[1]
    assert sorted(line.strip() for line in foreign.strip().splitlines()) == [
        str(path)
        for path in (
            data / "photos",
            models / "checkpoint",
            models / "link",
            models / "org--a" / "notes.txt",
            models / "other.gguf",
        )
    ]
    assert "an unfinished download" in listed
    assert run("uninstall", "--yes", *options).code == 0
    left = sorted(str(path.relative_to(home)) for top in (data, models) for path in top.rglob("*"))
    assert left == [
        "data/photos",
        "data/photos/a.jpg",
        "models/checkpoint",
        "models/checkpoint/model.safetensors",
        "models/link",
        "models/org--a",
        "models/org--a/notes.txt",
        "models/other.gguf",
    ]


def test_a_trial_node_takes_only_its_own(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = home / "config" / "edgepipe" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'models_dir = "{home / "models"}"\n')
    kernels = home / "cache" / "edgepipe" / "kernels"
    kernels.mkdir(parents=True)
    _make_model(home / "models" / "org--a")
    make_node(home / "data")
    make_node(home / "trial")
    shown = run("uninstall", "--yes", "--purge-models", "--data-dir", str(home / "trial")).out
    assert str(home / "trial") in shown
    assert not any(str(path) in shown for path in (settings, kernels, home / "data", home / "models"))
    assert not (home / "trial").exists()
    assert all(path.exists() for path in (settings, kernels, home / "data" / "node.log", home / "models" / "org--a"))


def test_a_folder_of_models_that_is_a_link_is_counted_right(run: Run, home: Path) -> None:
    data, elsewhere = home / "data", home / "disk2"
    make_node(data)
    elsewhere.mkdir()
    (data / "models").symlink_to(elsewhere)
    _make_model(data / "models" / "org--a")
    listed = run("uninstall", "--dry-run", "--purge-models").out
    assert " -" not in "".join(line for line in listed.splitlines() if " B " in line or "KB" in line)
    assert run("uninstall", "--yes", "--purge-models").code == 0
    assert list(elsewhere.iterdir()) == []
