"""Choose the device of a stage."""

from __future__ import annotations

import os

import torch

from edgepipe.backend.free_cores import ThreadChoice
from edgepipe.backend.kv_setting import checked_kv
from edgepipe.backend.machine_cores import compute_threads
from edgepipe.backend.types import BackendOptions
from edgepipe.errors import BackendUnavailable, ConfigInvalid
from edgepipe_torch.cpu.device import CpuDevice
from edgepipe_torch.cuda.device import CudaDevice
from edgepipe_torch.layers.device import Device

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_device(options: BackendOptions) -> Device:
    """Return the device that options name, which computes in the type they name.

    Raises BackendUnavailable if the device is missing, ConfigInvalid for an unknown device, dtype or setting.
    """
    place = _choose_place(options.device)
    is_cpu = place.type == "cpu"
    dtype = _choose_dtype(options.dtype, torch.float32 if is_cpu else torch.bfloat16)
    packed, kv, digits = _keeps_packed(options), checked_kv(options.kv), _input_digits(options)
    if is_cpu:
        threads = None if options.threads else ThreadChoice(compute_threads(), cores=os.cpu_count() or 1)
        return CpuDevice(dtype, packed=packed, kv=kv, digits=digits, threads=threads)
    return CudaDevice(place, dtype, packed=packed, kv=kv)


def host_device() -> Device:
    """Return the CPU as the place of experts in host memory."""
    return CpuDevice(torch.float32)


def _choose_place(name: str) -> torch.device:
    """Return the device for ``auto`` (first GPU or CPU), ``cpu``, ``cuda``, ``cuda:N``. Raises ConfigInvalid,
    BackendUnavailable."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise ConfigInvalid(
            f"the torch backend has no device '{name}'",
            fact="it has: auto, cpu, cuda, cuda:0, cuda:1 ...",
            next_step="use --device auto",
        )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise BackendUnavailable(
            f"torch cannot use '{name}'",
            fact=f"torch {torch.__version__} sees {count} CUDA devices",
            next_step="use --device cpu, or install a CUDA build of torch",
        )
    return torch.device("cuda", int(index or 0))


def _choose_dtype(name: str, auto: torch.dtype) -> torch.dtype:
    """Return the compute dtype. Raises ConfigInvalid."""
    if name == "auto":
        return auto
    if name not in _DTYPES:
        raise ConfigInvalid(
            f"the torch backend does not compute in '{name}'",
            fact=f"it computes in {', '.join(_DTYPES)}",
            next_step="use --dtype auto",
        )
    return _DTYPES[name]


def _keeps_packed(options: BackendOptions) -> bool:
    """Return whether packed weights stay packed, by the setting ``weights``. Raises ConfigInvalid."""
    wanted = options.settings.get("weights", "auto")
    if wanted not in ("auto", "wide"):
        raise ConfigInvalid(f"weights '{wanted}' are not known", next_step="choose auto or wide")
    return wanted == "auto"


def _input_digits(options: BackendOptions) -> int:
    """Return the bytes to which a CPU rounds inputs of packed weights, by the setting ``products``; 0: it does not.

    Raises ConfigInvalid.
    """
    digits = {"auto": 0, "int16": 2, "int8": 1}
    wanted = options.settings.get("products", "auto")
    if wanted not in digits:
        raise ConfigInvalid(f"products '{wanted}' are not known", next_step="choose auto, int16 or int8")
    return digits[wanted]
