"""Choose torch's device and dtype, and measure them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import BackendUnavailable, ConfigInvalid, StageError
from edgepipe.plain_words import plain

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MEASURE_S = 0.4  # per figure
_CHECK_SIZE = 64  # exact in bf16
_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")  # of CUDA's runtime, and CPUs' allocators


def choose_device(name: str) -> torch.device:
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


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype; auto is float32 on CPUs, bfloat16 on GPUs. Raises ConfigInvalid."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigInvalid(
            f"the torch backend does not compute in '{name}'",
            fact=f"it computes in {', '.join(_DTYPES)}",
            next_step="use --dtype auto",
        )
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name: ``float32`` or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def set_threads(threads: int | None) -> None:
    """Set the CPU threads of the process, which belongs to one stage."""
    torch.set_num_threads(threads or psutil.cpu_count(logical=False) or 1)


def free_bytes(device: torch.device) -> int:
    """Return the available memory of the device, with what torch's cache there gives back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # CUDA counts it as used
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def lacks_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, for which torch also raises plain RuntimeErrors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply two small matrices of ones on the device. Raises StageError if it fails or the product is wrong."""
    try:
        ones = torch.ones(_CHECK_SIZE, _CHECK_SIZE, device=device, dtype=dtype)
        lowest, highest = (float(value) for value in torch.aminmax(torch.mm(ones, ones)))
    except RuntimeError as exc:  # after a GPU fault, every call of the process fails so
        raise StageError(f"{device} does not compute", fact=plain(exc)) from exc
    if lowest != _CHECK_SIZE or highest != _CHECK_SIZE:
        raise StageError(
            f"{device} computes wrong numbers", fact=f"{lowest} to {highest} instead of {_CHECK_SIZE} everywhere"
        )


def measure(device: torch.device, dtype: torch.dtype, *, block_sizes: tuple[int, ...]) -> DeviceProfile:
    """Return the device's profile with measured bandwidth and matrix rate. ``block_sizes``: tokens per KV block.

    Takes 2.2 GB of a GPU meanwhile, in bf16.
    """
    is_cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if is_cuda else psutil.virtual_memory().total
    found = DeviceProfile(
        backend="torch",
        device=str(device),
        name=torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        compute_dtype=dtype_name(dtype),
        memory_total_bytes=total,
        memory_free_bytes=min(free_bytes(device), total),
        bandwidth_bytes_per_s=_bandwidth(device, dtype),
        flops=_matrix_rate(device, dtype),
        block_sizes=block_sizes,
        contiguous_kv=not is_cuda,
    )
    if is_cuda:
        torch.cuda.empty_cache()  # the measured matrices, whose memory other processes may need
    return found


def with_ram(profile: DeviceProfile) -> DeviceProfile:
    """Return a GPU's profile with the host's memory, and the rate at which its CPU reads experts there."""
    memory = psutil.virtual_memory()
    return replace(
        profile,
        ram_total_bytes=memory.total,
        ram_free_bytes=memory.available,
        ram_bytes_per_s=_bandwidth(torch.device("cpu"), torch.float32),
    )


def _bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Measure bytes per second of a product of one row with a weight larger than any cache, as in decoding."""
    rows, width = (8192, 4096) if device.type == "cuda" else (512, 48)
    weight = torch.zeros(32 if device.type == "cuda" else 1024, rows, width, dtype=dtype, device=device)
    x = torch.zeros(weight.shape[0], 1, rows, dtype=dtype, device=device)
    return weight.nbytes / _best_time_s(lambda: torch.bmm(x, weight), device)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure FLOP/s of a square product."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.randn(size, size, device=device).to(dtype)  # a GPU multiplies zeros faster than numbers
    return 2 * size**3 / _best_time_s(lambda: torch.mm(a, a), device)


def _best_time_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest run within the time for one figure, after a warm-up run."""
    best, spent = float("inf"), 0.0
    with torch.inference_mode():
        work()
        while spent < _MEASURE_S:
            _synchronise(device)
            start = time.perf_counter()
            work()
            _synchronise(device)
            taken = time.perf_counter() - start
            best, spent = min(best, taken), spent + taken
    return best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
