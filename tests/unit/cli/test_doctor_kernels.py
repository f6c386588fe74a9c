"""The doctor names what packed weights lack on a machine."""

from __future__ import annotations

import ctypes.util
import importlib.util
import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from edgepipe.cli.doctor import machine_findings
from edgepipe.cli.doctor.findings import Level
from edgepipe.cli.doctor.machine_findings import kernel_finding


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what is installed: packages with their files, and the driver."""

    def set_up(*files: str, driver: bool = True) -> None:
        def find_spec(name: str) -> ModuleSpec | None:
            if not (tmp_path / name).is_dir():
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path / name)]
            return spec

        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
        monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)

    return set_up


def test_a_machine_without_nvrtc_is_told_what_to_install(install: Callable[..., None]) -> None:
    install("torch/lib/libtorch.so")
    finding = kernel_finding()
    assert finding is not None
    assert finding.level is Level.WARNING
    assert "pip install nvidia-cuda-nvrtc" in finding.remedy


@pytest.mark.parametrize(
    "library",
    [
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll",
        "torch/lib/nvrtc64_120_0.dll",
    ],
)
def test_nvrtc_is_found_where_wheels_put_it(library: str, install: Callable[..., None]) -> None:
    install("torch/lib/c10.dll", library)
    finding = kernel_finding()
    assert finding is not None
    assert finding.level is Level.OK


def test_without_a_gpu_kernels_need_llvmlite(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_findings, "_cpu_flags", set[str])
    install("torch/lib/libtorch.so", driver=False)
    finding = kernel_finding()
    assert finding is not None
    assert (finding.level, finding.remedy) == (Level.WARNING, "edgepipe update --extra torch")
    assert "tens of times as fast" in finding.fact
    install("llvmlite/binding.py", driver=False)
    finding = kernel_finding()
    assert finding is not None
    assert finding.level is Level.OK


def test_an_old_cpu_has_no_kernels_and_no_remedy(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_findings, "_cpu_flags", lambda: {"avx", "sse4_2"})
    install("torch/lib/libtorch.so", "llvmlite/binding.py", driver=False)
    finding = kernel_finding()
    assert finding is not None
    assert (finding.level, finding.remedy) == (Level.NOTE, "")


def test_without_torch_kernels_are_no_topic(install: Callable[..., None]) -> None:
    install("llvmlite/binding.py", driver=False)
    assert kernel_finding() is None
