"""Check and measure a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgepipe.backend.machine_cores import compute_threads
from edgepipe.errors import StageError
from edgepipe.plain_words import plain

_MEASURE_S = 0.4  # time per figure
_CHECK_SIZE = 64  # exact in bf16
# Messages of CUDA's runtime and of CPUs' allocators.
_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name: ``float32`` or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def set_threads(threads: int | None) -> None:
    """Set the CPU threads of the process, which belongs to one stage; None: as many as compute fastest."""
    torch.set_num_threads(threads or compute_threads())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sizes of the products that measure a kind of device."""

    weights: int  # matrices that no cache holds
    shape: tuple[int, int]  # each matrix: in and out features
    square: int  # rows and columns of both matrices of a square product


CPU_MEASURED = Measured(weights=1024, shape=(512, 48), square=768)


def bandwidth(
    device: torch.device, dtype: torch.dtype, sizes: Measured, synchronise: Callable[[], None] = lambda: None
) -> float:
    """Measure bytes per second of a product of one row with a weight larger than any cache, as in decoding."""
    weight = torch.zeros(sizes.weights, *sizes.shape, dtype=dtype, device=device)
    x = torch.zeros(sizes.weights, 1, sizes.shape[0], dtype=dtype, device=device)
    return weight.nbytes / _best_time_s(lambda: torch.bmm(x, weight), synchronise)


def matrix_rate(
    device: torch.device, dtype: torch.dtype, sizes: Measured, synchronise: Callable[[], None] = lambda: None
) -> float:
    """Measure FLOP/s of a square product."""
    a = torch.randn(sizes.square, sizes.square, device=device).to(dtype)  # a GPU multiplies zeros faster than numbers
    return 2 * sizes.square**3 / _best_time_s(lambda: torch.mm(a, a), synchronise)


def _best_time_s(work: Callable[[], object], synchronise: Callable[[], None]) -> float:
    """Return the shortest run within the time for one figure, after a warm-up run."""
    best, spent = float("inf"), 0.0
    with torch.inference_mode():
        work()
        while spent < _MEASURE_S:
            synchronise()
            start = time.perf_counter()
            work()
            synchronise()
            taken = time.perf_counter() - start
            best, spent = min(best, taken), spent + taken
    return best
