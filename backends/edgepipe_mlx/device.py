"""Choose and measure MLX's device."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import mlx.core as mx

from edgepipe.backend.machine_memory import machine_memory
from edgepipe.backend.types import DeviceProfile, SlowPath
from edgepipe.errors import BackendUnavailable, ConfigInvalid, StageError
from edgepipe.plain_words import plain
from edgepipe.spec.layer_spec import Attention

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
BLOCK_SIZES = (16, 256)  # any size works; these suit other devices
_MIB = 1024 * 1024
_CHECK_SIZE = 64  # exact in bf16
_FUSED_HEAD_DIMS = (64, 80, 96, 128)  # MLX prefers its unfused kernels for 192 and 256


def choose_device(name: str) -> mx.Device:
    """Return the device for ``auto``, ``cpu`` or ``gpu``; auto is the GPU if MLX has one.

    Raises ConfigInvalid, BackendUnavailable.
    """
    if name not in ("auto", "cpu", "gpu"):
        raise ConfigInvalid(
            f"the mlx backend has no device '{name}'", fact="it has: auto, cpu, gpu", next_step="use --device auto"
        )
    has_gpu = mx.is_available(mx.Device(mx.gpu))
    if name == "gpu" and not has_gpu:
        raise BackendUnavailable(
            "MLX finds no GPU", fact=f"{platform.system()} {platform.machine()}", next_step="use --device cpu"
        )
    return mx.Device(mx.gpu) if has_gpu and name != "cpu" else mx.Device(mx.cpu)


def choose_dtype(name: str, device: mx.Device) -> tuple[str, mx.Dtype]:
    """Return the compute dtype; auto is bfloat16 on GPUs, float32 on the CPU. Raises ConfigInvalid."""
    if name == "auto":
        name = "float32" if is_cpu(device) else "bfloat16"
    if name not in _DTYPES:
        raise ConfigInvalid(
            f"the mlx backend does not compute in '{name}'",
            fact=f"it computes in {', '.join(_DTYPES)}",
            next_step="use --dtype auto",
        )
    return name, _DTYPES[name]


def choose_packing(weights: str) -> tuple[bool, bool]:
    """Return whether packed weights stay packed, and whether K types keep their own size, by the setting ``weights``.

    Raises ConfigInvalid.
    """
    if weights not in ("auto", "mlx", "wide"):
        raise ConfigInvalid(
            f"the mlx backend cannot keep weights '{weights}'",
            fact="it knows: auto (packed as in the file), mlx (packed for MLX's own kernels), wide (floats)",
            next_step="use --backend-option weights=auto",
        )
    return weights != "wide", weights == "auto"


def choose_attention(attention: str) -> bool:
    """Return whether own kernels attend over pages, by the setting ``attention``. Raises ConfigInvalid."""
    if attention not in ("auto", "mlx"):
        raise ConfigInvalid(
            f"the mlx backend has no attention '{attention}'",
            fact="it knows: auto (own kernels for all sequences at once), mlx (MLX's own, one sequence after another)",
            next_step="use --backend-option attention=auto",
        )
    return attention == "auto"


def choose_sampling(sampling: str, device: mx.Device) -> bool:
    """Return whether the device picks candidates, by the setting ``sampling``. Raises ConfigInvalid."""
    if sampling not in ("auto", "device", "host"):
        raise ConfigInvalid(
            f"the mlx backend has no sampling '{sampling}'",
            fact="it knows: auto (device on GPUs), device (candidates picked there), host (whole rows of logits)",
            next_step="use --backend-option sampling=auto",
        )
    return sampling == "device" or (sampling == "auto" and not is_cpu(device))


def is_cpu(device: mx.Device) -> bool:
    """Return whether the device is MLX's CPU device."""
    return device.type == mx.cpu


def configure(device: mx.Device) -> None:
    """Configure MLX for the process, which belongs to one stage."""
    mx.set_default_device(device)
    mx.set_cache_limit(_cache_bytes(device))
    # Memory that macOS keeps for the GPU (macOS 15 and later). None by default: macOS may then take weights and KV away
    # from an idle model, and each command buffer makes its memory resident again. mlx-lm sets the same limit.
    mx.set_wired_limit(_recommended_bytes(device) or 0)
    if is_cpu(device):
        # A C++ compiler builds fused CPU kernels at run time in a folder under /tmp that any user may have created.
        # They bring no gain in this backend.
        mx.disable_compile()


def unwired_memory(*, on_gpu: bool, macos: str) -> SlowPath | None:
    """Return what an older macOS lacks; None: it keeps memory for the GPU, or is not known.

    macos  version, such as 14.5; empty on other systems
    """
    if not on_gpu or macos.partition(".")[0] != "14":  # MLX needs 14
        return None
    return SlowPath(
        what="macOS may take an idle model's memory away, and the first answer after a pause waits for it",
        cost="no Mac has measured it",
        reason=f"this is macOS {macos}, and MLX keeps memory for the GPU from macOS 15 on",
        remedy="update macOS",
    )


def _cache_bytes(device: mx.Device) -> int:
    """Return the limit of freed buffers that MLX keeps for reuse; by default, it has none.

    Metal gives back the buffers of some layers at once, when a command buffer ends, and new ones are expensive: one
    layer of Qwen3-30B-A3B needs 130 MB of them for 512 tokens.
    """
    if is_cpu(device):
        return 128 * _MIB
    return max(256 * _MIB, min(1024 * _MIB, (_recommended_bytes(device) or 0) // 32))


def score_bytes(device: mx.Device) -> int:
    """Return the memory for the attention scores of one product; several products may be in flight.

    Metal needs large products.
    """
    return (16 if is_cpu(device) else 256) * _MIB


def stores_scores(device: mx.Device, spec: Attention) -> bool:
    """Return whether attention over a prompt keeps the scores of all heads in memory.

    Metal's fused kernels keep none. They know these sizes of heads, and no capped scores.
    """
    return is_cpu(device) or bool(spec.softcap) or spec.latent is not None or spec.head_dim not in _FUSED_HEAD_DIMS


def free_bytes(device: mx.Device) -> int:
    """Return the available memory: the system's, on Metal at most the recommended maximum of one process."""
    available = machine_memory().available_bytes
    recommended = _recommended_bytes(device)
    if recommended is None:
        return available
    return max(0, min(available, recommended - mx.get_active_memory()))


def _recommended_bytes(device: mx.Device) -> int | None:
    """Return the most memory that one process should use on the device; None where MLX names none."""
    recommended = _info(device).get("max_recommended_working_set_size")
    return recommended if isinstance(recommended, int) else None


def check_device(device: mx.Device, dtype: mx.Dtype) -> None:
    """Multiply two small matrices of ones on the device. Raises StageError if it fails or the product is wrong."""
    try:
        ones = mx.ones((_CHECK_SIZE, _CHECK_SIZE), dtype=dtype)
        product = mx.matmul(ones, ones, stream=device)
        lowest, highest = mx.min(product).item(), mx.max(product).item()
    except RuntimeError as exc:
        raise StageError("MLX's device does not compute", fact=plain(exc)) from exc
    if lowest != _CHECK_SIZE or highest != _CHECK_SIZE:
        raise StageError(
            "MLX's device computes wrong numbers", fact=f"{lowest} to {highest} instead of {_CHECK_SIZE} everywhere"
        )


def measure(device: mx.Device, dtype_name: str, dtype: mx.Dtype) -> DeviceProfile:
    """Profile the device in well under 2 s. Leaves none of the memory that it takes for that."""
    info = _info(device)
    total, machine = info.get("memory_size", info.get("total_memory")), machine_memory().total_bytes
    found = DeviceProfile(
        backend="mlx",
        device="cpu" if is_cpu(device) else "gpu",
        name=str(info.get("device_name") or platform.processor() or platform.machine()),
        compute_dtype=dtype_name,
        memory_total_bytes=min(total, machine) if isinstance(total, int) else machine,
        memory_free_bytes=free_bytes(device),
        bandwidth_bytes_per_s=_bandwidth_bytes_per_s(device, dtype),
        flops=_flops(device, dtype),
        block_sizes=BLOCK_SIZES,
    )
    mx.clear_cache()
    return found


def _info(device: mx.Device) -> dict[str, str | int]:
    """Return MLX's facts of the device; callers take missing ones from the system."""
    try:
        return dict(mx.device_info(device))
    except (RuntimeError, TypeError):  # MLX has no facts of this kind of device
        return {}


def _bandwidth_bytes_per_s(device: mx.Device, dtype: mx.Dtype) -> float:
    """Measure the rate of reading a matrix in a product with one row, as in decoding."""
    side = 3072 if is_cpu(device) else 8192
    weights = mx.ones((side, side), dtype)
    row = mx.ones((1, side), dtype)
    return weights.nbytes / _best_s(lambda: row @ weights.T)


def _flops(device: mx.Device, dtype: mx.Dtype) -> float:
    """Measure the rate of a dense product with enough rows to be bound by arithmetic."""
    rows, side = (64, 1024) if is_cpu(device) else (2048, 4096)
    weights = mx.ones((side, side), dtype)
    x = mx.ones((rows, side), dtype)
    return 2.0 * rows * side * side / _best_s(lambda: x @ weights.T)


def _best_s(compute: Callable[[], mx.array]) -> float:
    """Return the shortest time of a few runs in seconds, after a warm-up run."""
    mx.eval(compute())
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        mx.eval(compute())
        best = min(best, time.perf_counter() - start)
    return best
