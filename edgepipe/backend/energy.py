"""Energy that a device has used, where its driver counts it: NVIDIA's NVML, or RAPL of Linux for processors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

_NVML = "libnvidia-ml.so.1"
_RAPL = Path("/sys/class/powercap")


class EnergyMeter(Protocol):
    """A counter of energy."""

    def joules(self) -> float:
        """Return the joules since some moment."""
        ...


class _Nvml:
    """The counter of this machine's only NVIDIA GPU."""

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        self._library = library
        self._device = device

    def joules(self) -> float:
        """See ``EnergyMeter``. Raises OSError if the driver does not tell."""
        millijoules = ctypes.c_ulonglong()
        _checked(self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)))
        return millijoules.value / 1e3


class _Rapl:
    """The sum over processor packages. Each counter begins anew behind its range."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._last = [0.0] * len(folders)
        self._total = 0.0
        self.joules()
        self._total = 0.0

    def joules(self) -> float:
        """See ``EnergyMeter``. Raises OSError, ValueError if a counter cannot be read."""
        for index, folder in enumerate(self._folders):
            now = _microjoules(folder / "energy_uj")
            passed = now - self._last[index]
            self._total += passed if passed >= 0 else passed + _microjoules(folder / "max_energy_range_uj")
            self._last[index] = now
        return self._total / 1e6


def open_meter(device: str, *, load: Callable[[str], Any] = ctypes.CDLL, rapl: Path = _RAPL) -> EnergyMeter | None:
    """Return the meter of a backend's device, ``cuda:0`` or ``cpu``; None if nothing counts its energy alone."""
    try:
        if device.startswith("cuda"):
            return _open_nvml(load(_NVML))
        return _open_rapl(rapl) if device == "cpu" else None
    except (OSError, ValueError, AttributeError):  # no driver, no right to read it, or an old one
        return None


def _open_nvml(library: Any) -> _Nvml | None:
    _checked(library.nvmlInit_v2())
    count, device = ctypes.c_uint(), ctypes.c_void_p()
    _checked(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    if count.value != 1:  # NVML and CUDA may number several GPUs differently
        return None
    _checked(library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)))
    found = _Nvml(library, device)
    found.joules()
    return found


def _open_rapl(rapl: Path) -> _Rapl | None:
    folders = [path for path in sorted(rapl.glob("intel-rapl:*")) if _is_package(path)]
    return _Rapl(folders) if folders else None


def _is_package(folder: Path) -> bool:
    return (folder / "name").read_text(encoding="utf-8").startswith("package")


def _microjoules(file: Path) -> float:
    return float(file.read_text(encoding="utf-8"))


def _checked(status: int) -> None:
    if status:
        raise OSError(f"NVML answers {status}")
