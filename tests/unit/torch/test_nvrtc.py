"""NVRTC is loaded with the library that it opens by name when it compiles."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from edgepipe_torch.cuda.kernels import nvrtc
from edgepipe_torch.cuda.kernels.nvrtc import find_nvrtc
from edgepipe_torch.layers.compiled_code import KernelsUnavailable


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of libraries in the order of loading; none can be."""
    names: list[str] = []

    def load(name: str) -> Any:
        names.append(name)
        if "builtins" not in name:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(nvrtc, "_wheel_folders", lambda: iter(()))
    return names


def test_the_builtins_beside_nvrtc_are_loaded_first(tmp_path: Path, loaded: list[str]) -> None:
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / name).touch()
    with pytest.raises(KernelsUnavailable):
        find_nvrtc(13, tmp_path)
    assert loaded[:2] == [str(tmp_path / "libnvrtc-builtins.so.13.0"), str(tmp_path / "libnvrtc.so.13")]


def test_nothing_is_loaded_from_the_current_folder(
    tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnvrtc-builtins.so.13.0").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KernelsUnavailable):
        find_nvrtc(13)
    assert loaded == ["libnvrtc.so.13"]
