"""How long a device waits for the experts that a CPU computes beside it. PURE.

A step reads D of a layer's E experts, of which n are in host memory. Each set of D experts counts as equally likely,
so the number read in host memory is hypergeometric. Both places compute at once: a layer takes the longer of both. The
mean of the longer exceeds the longer mean: a layer that reads an expert more than the mean from the slow place waits,
and one that reads an expert less gains nothing.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt


def mean_wait_s(read: int, count: int, in_ram: int, *, ram_s: float, device_s: float, beside_s: float) -> float:
    """Return the mean seconds by which experts in host memory outlast what the device computes meanwhile.

    read      experts of a layer that a step reads, of ``count``, of which ``in_ram`` are in host memory
    ram_s     of each expert that is read in host memory
    device_s  of each that is read on the device
    beside_s  of what else the device computes meanwhile
    """
    found = np.arange(read + 1)
    waits = np.maximum(0.0, found * ram_s - (read - found) * device_s - beside_s)
    return float(_odds(read, count, in_ram) @ waits)


@lru_cache(maxsize=4096)
def _odds(read: int, count: int, in_ram: int) -> npt.NDArray[np.float64]:
    """Return the probabilities [read + 1] that so many of the experts read are in host memory."""
    ways, on_device = comb(count, read), count - in_ram
    return np.array([comb(in_ram, found) * comb(on_device, read - found) / ways for found in range(read + 1)])
