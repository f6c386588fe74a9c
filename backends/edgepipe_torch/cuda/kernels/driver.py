"""Load cubins and launch kernels by the CUDA driver, on torch's current stream and in torch's context.

Functions and their arguments: CUDA driver API, "Module Management" and "Execution Control".
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch

from edgepipe_torch.layers.compiled_code import KernelsUnavailable

THREADS = 256  # threads of every block
SHARED_BYTES = 99 * 1024  # shared memory that a block may have on every device from sm_80 on

_MAX_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute


class Module(Protocol):
    """Compiled kernels of one form."""

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        """Queue a kernel on the current stream. ``arguments``: ctypes values in the order of its parameters."""
        ...


class CudaModule:
    """A cubin on one device. Memory of the module is freed with the process."""

    def __init__(self, cubin: bytes, functions: Sequence[str], device: torch.device, *, compiler: str) -> None:
        """``compiler``: version of the NVRTC that made the cubin, such as 12.9. Raises KernelsUnavailable."""
        driver = _driver()
        self._device = device
        self._cubin = cubin
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context current
            module = ctypes.c_void_p()
            if result := driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(cubin)):
                raise refusal(_message(result), driver=_driver_version(), compiler=compiler)
            self._functions: dict[str, ctypes.c_void_p] = {}
            for name in functions:
                found = self._functions[name] = ctypes.c_void_p()
                _check(driver.cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
                _check(driver.cuFuncSetAttribute(found, _MAX_DYNAMIC_SHARED_BYTES, SHARED_BYTES))

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        """See Module. Raises RuntimeError, as torch does for a failed launch."""
        addresses = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        result = _driver().cuLaunchKernel(
            self._functions[function], blocks, 1, 1, THREADS, 1, 1, shared_bytes, stream, addresses, None
        )
        if result:
            raise RuntimeError(f"{function} was not launched: {_message(result)}")


@cache
def _driver() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as exc:
        raise KernelsUnavailable(f"the NVIDIA driver's library {name} was not found") from exc


def _check(result: int) -> None:
    if result:
        raise KernelsUnavailable(f"the driver refused the kernels: {_message(result)}")


def refusal(message: str, *, driver: str, compiler: str) -> KernelsUnavailable:
    """Return the reason why a driver did not load a cubin: it may be older than what made that.

    driver    highest CUDA version that the driver knows
    compiler  version of NVRTC
    """
    if _parts_of(driver) >= _parts_of(compiler):
        return KernelsUnavailable(f"the driver refused the kernels: {message}")
    return KernelsUnavailable(
        f"the NVIDIA driver knows CUDA up to {driver}, and NVRTC {compiler} compiled the kernels: {message}",
        remedy=f"update the NVIDIA driver, or install a torch for CUDA {driver} or older",
    )


def _parts_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _driver_version() -> str:
    number = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(number)))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _message(result: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(result, ctypes.byref(text))
    return (text.value or b"unknown error").decode()
