"""NVRTC is loaded with the library that it opens by name when it compiles."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels import library, nvrtc
from edgepipe_torch.cuda.kernels.driver import refusal
from edgepipe_torch.cuda.kernels.nvrtc import Nvrtc, find_nvrtc
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


class Compiler:
    """NVRTC's library, as far as a compilation calls it: the cubin is the chosen architecture."""

    def __init__(self) -> None:
        self.chosen = b""

    def nvrtcCreateProgram(self, *_given: Any) -> int:
        return 0

    def nvrtcDestroyProgram(self, *_given: Any) -> int:
        return 0

    def nvrtcCompileProgram(self, _program: Any, _count: int, arguments: Any) -> int:
        self.chosen = arguments[0].removeprefix(b"--gpu-architecture=")
        return 0

    def nvrtcGetCUBINSize(self, _program: Any, size: Any) -> int:
        size._obj.value = len(self.chosen)
        return 0

    def nvrtcGetCUBIN(self, _program: Any, cubin: Any) -> int:
        cubin.raw = self.chosen
        return 0


def compiler_for(*architectures: int) -> Nvrtc:
    found = object.__new__(Nvrtc)
    found._library, found.version, found.architectures = Compiler(), "12.9", architectures
    return found


@pytest.mark.parametrize(("card", "chosen"), [(89, b"sm_89"), (121, b"sm_120"), (87, b"sm_86")])
def test_a_card_newer_than_the_compiler_gets_the_code_of_an_older_minor_architecture(card: int, chosen: bytes) -> None:
    assert compiler_for(80, 86, 89, 90, 120).compile("", architecture=card, options=[]) == chosen


@pytest.mark.parametrize("card", [75, 100, 130])
def test_a_card_of_an_unknown_architecture_is_named(card: int) -> None:
    with pytest.raises(KernelsUnavailable, match=f"NVRTC 12.9 does not compile for sm_{card}"):
        compiler_for(80, 86, 89, 90, 120).compile("", architecture=card, options=[])


def test_a_driver_older_than_the_compiler_is_named_with_both_versions() -> None:
    found = refusal("device kernel image is invalid", driver="12.4", compiler="13.0")
    assert str(found) == (
        "the NVIDIA driver knows CUDA up to 12.4, and NVRTC 13.0 compiled the kernels: device kernel image is invalid"
    )
    assert found.remedy == "update the NVIDIA driver, or install a torch for CUDA 12.4 or older"


@pytest.mark.parametrize("driver", ["12.9", "12.10", "13.0"])
def test_a_driver_that_is_new_enough_is_not_blamed(driver: str) -> None:
    found = refusal("out of memory", driver=driver, compiler="12.9")
    assert (str(found), found.remedy) == ("the driver refused the kernels: out of memory", "")


def test_two_cards_of_different_kinds_get_code_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {0: (8, 9, 128), 1: (12, 0, 170)}
    loaded: list[tuple[bytes, int]] = []

    def properties(device: Any) -> SimpleNamespace:
        major, minor, count = cards[device.index]
        return SimpleNamespace(name="card", major=major, minor=minor, multi_processor_count=count)

    def module(cubin: bytes, _functions: Any, device: Any, *, compiler: str) -> None:
        assert compiler == "12.9"
        loaded.append((cubin, device.index))

    monkeypatch.setattr(library.torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(library, "find_nvrtc", lambda *_given: compiler_for(80, 86, 89, 90, 120))
    monkeypatch.setattr(library, "CudaModule", module)
    for index in (0, 1, 0):
        found = library.CudaLibrary(library.torch.device("cuda", index), tmp_path)
        found._modules.load(("common.cuh",), {}, ())
    assert loaded == [(b"sm_89", 0), (b"sm_120", 1), (b"sm_89", 0)]


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
