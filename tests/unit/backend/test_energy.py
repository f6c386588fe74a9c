"""Counters of energy: a driver's, and those of processor packages."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from edgepipe.backend.energy import open_meter


class Driver:
    """NVML with some GPUs that have used some millijoules."""

    def __init__(self, gpus: int, *, counts: bool = True) -> None:
        self._gpus = gpus
        self._counts = counts
        self.millijoules = 5000

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = self._gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        return 0 if self._counts else 3


def test_a_gpu_tells_the_energy_that_it_used() -> None:
    driver = Driver(1)
    meter = open_meter("cuda:0", load=lambda _name: driver)
    assert meter is not None
    before = meter.joules()
    driver.millijoules += 1500
    assert meter.joules() - before == pytest.approx(1.5)


@pytest.mark.parametrize("driver", [Driver(2), Driver(1, counts=False), object()])
def test_nothing_is_counted_where_the_driver_does_not_tell(driver: Any) -> None:
    assert open_meter("cuda:0", load=lambda _name: driver) is None


def test_nothing_is_counted_without_a_driver() -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    assert open_meter("cuda:0", load=load) is None
    assert open_meter("gpu", load=load) is None


def package(folder: Path, number: int, used: int, *, name: str = "package-0") -> Path:
    made = folder / f"intel-rapl:{number}"
    made.mkdir()
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{used}\n")
    (made / "max_energy_range_uj").write_text("10000000\n")
    return made


def test_packages_count_together_and_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    first, second = package(tmp_path, 0, 9_000_000), package(tmp_path, 1, 100, name="package-1")
    package(tmp_path, 2, 100, name="psys")
    meter = open_meter("cpu", rapl=tmp_path)
    assert meter is not None
    assert meter.joules() == 0
    (first / "energy_uj").write_text("1000000")
    (second / "energy_uj").write_text("500100")
    assert meter.joules() == pytest.approx(2.5)


def test_counters_that_may_not_be_read_count_nothing(tmp_path: Path) -> None:
    (package(tmp_path, 0, 1) / "energy_uj").unlink()
    assert open_meter("cpu", rapl=tmp_path) is None
    assert open_meter("cpu", rapl=tmp_path / "missing") is None
