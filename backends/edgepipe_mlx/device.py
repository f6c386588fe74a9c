"""Choosing MLX's device and measuring it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import mlx.core as mx
import psutil

from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import BackendUnavailable, ConfigInvalid, StageError

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
BLOCK_SIZES = (16, 256)  # any would do; these are what other devices ask for
_MIB = 1024 * 1024
_CHECK_SIZE = 64  # exact in bf16


def choose_device(name: str) -> mx.Device:
    """``auto``, ``cpu`` or ``gpu`` to a device; auto is the GPU where MLX has one.

    Raises ConfigInvalid, BackendUnavailable.
    """
    if name not in ("auto", "cpu", "gpu"):
        raise ConfigInvalid(
            f"the mlx backend has no device '{name}'", fact="it has: auto, cpu, gpu", next_step="use --device auto"
        )
    has_gpu = mx.is_available(mx.Device(mx.gpu))
    if name == "gpu" and not has_gpu:
        raise BackendUnavailable(
            "MLX finds no GPU here", fact=f"{platform.system()} {platform.machine()}", next_step="use --device cpu"
        )
    return mx.Device(mx.gpu) if has_gpu and name != "cpu" else mx.Device(mx.cpu)


def choose_dtype(name: str, device: mx.Device) -> tuple[str, mx.Dtype]:
    """The compute dtype: bfloat16 on GPUs, float32 on the CPU, unless told. Raises ConfigInvalid."""
    if name == "auto":
        name = "float32" if is_cpu(device) else "bfloat16"
    if name not in _DTYPES:
        raise ConfigInvalid(
            f"the mlx backend does not compute in '{name}'",
            fact=f"it computes in {', '.join(_DTYPES)}",
            next_step="use --dtype auto",
        )
    return name, _DTYPES[name]


def is_cpu(device: mx.Device) -> bool:
    """Whether the device is MLX's CPU device."""
    return device.type == mx.cpu


def configure(device: mx.Device) -> None:
    """Settings of the whole process, which is a stage's own."""
    mx.set_default_device(device)
    # Freed buffers that MLX may keep for reuse, unbounded by default; on Metal making new ones costs more.
    mx.set_cache_limit((128 if is_cpu(device) else 256) * _MIB)
    if is_cpu(device):
        # Fused CPU kernels are built by a C++ compiler at run time and loaded from a folder under /tmp that anybody
        # on the machine may have made; they bring nothing here.
        mx.disable_compile()


def score_bytes(device: mx.Device) -> int:
    """Room for the attention scores of one product. MLX starts some products ahead, so several may be held at once.

    The CPU device always keeps scores; Metal does so only for head sizes that its fused kernel lacks, and wants large
    products.
    """
    return (16 if is_cpu(device) else 256) * _MIB


def free_bytes(device: mx.Device) -> int:
    """Memory that we may still take: what the system has, on Metal at most what it recommends for one process."""
    available = psutil.virtual_memory().available
    recommended = _info(device).get("max_recommended_working_set_size")
    if not isinstance(recommended, int):
        return available
    return max(0, min(available, recommended - mx.get_active_memory()))


def check_device(device: mx.Device, dtype: mx.Dtype) -> None:
    """Multiply two small matrices of ones on the device. Raises StageError if it cannot, or if the product is wrong."""
    try:
        ones = mx.ones((_CHECK_SIZE, _CHECK_SIZE), dtype=dtype)
        product = mx.matmul(ones, ones, stream=device)
        lowest, highest = mx.min(product).item(), mx.max(product).item()
    except RuntimeError as exc:
        raise StageError("MLX's device does not compute", fact=str(exc).splitlines()[0]) from exc
    if lowest != _CHECK_SIZE or highest != _CHECK_SIZE:
        raise StageError(
            "MLX's device computes wrong numbers", fact=f"{lowest} to {highest} instead of {_CHECK_SIZE} everywhere"
        )


def measure(device: mx.Device, dtype_name: str, dtype: mx.Dtype) -> DeviceProfile:
    """Profile the device in well under 2 s."""
    info = _info(device)
    total = info.get("memory_size", info.get("total_memory"))
    return DeviceProfile(
        backend="mlx",
        device="cpu" if is_cpu(device) else "gpu",
        name=str(info.get("device_name") or platform.processor() or platform.machine()),
        compute_dtype=dtype_name,
        memory_total_bytes=total if isinstance(total, int) else psutil.virtual_memory().total,
        memory_free_bytes=free_bytes(device),
        bandwidth_bytes_per_s=_bandwidth_bytes_per_s(device, dtype),
        flops=_flops(device, dtype),
        block_sizes=BLOCK_SIZES,
    )


def _info(device: mx.Device) -> dict[str, str | int]:
    """MLX's facts of the device; what is missing from them is asked of the system."""
    try:
        return dict(mx.device_info(device))
    except (RuntimeError, TypeError):  # MLX knows no facts of this kind of device
        return {}


def _bandwidth_bytes_per_s(device: mx.Device, dtype: mx.Dtype) -> float:
    """Rate at which a matrix is read when multiplied by one row: what decoding does with its weights."""
    side = 3072 if is_cpu(device) else 8192
    weights = mx.ones((side, side), dtype)
    row = mx.ones((1, side), dtype)
    return weights.nbytes / _best_s(lambda: row @ weights.T)


def _flops(device: mx.Device, dtype: mx.Dtype) -> float:
    """Rate of a dense product with enough rows to be bound by arithmetic."""
    rows, side = (64, 1024) if is_cpu(device) else (2048, 4096)
    weights = mx.ones((side, side), dtype)
    x = mx.ones((rows, side), dtype)
    return 2.0 * rows * side * side / _best_s(lambda: x @ weights.T)


def _best_s(compute: Callable[[], mx.array], repeats: int = 4) -> float:
    """Shortest of a few runs, seconds, after one that is not counted."""
    mx.eval(compute())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(compute())
        best = min(best, time.perf_counter() - start)
    return best
