"""CPU threads beside the device: the last stage's logits become ids while the next step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from edgepipe.clock import Clock
from edgepipe.sampling import SampleRow

Sampler = Callable[[npt.NDArray[np.float32], Sequence[SampleRow]], npt.NDArray[np.int32]]
"""``(logits [R, V], rows [R]) -> ids [R]``: ``edgepipe.sampling.sample``."""

OnIds = Callable[[tuple[int, ...], int], None]  # ids, microseconds that it took


class SamplerPool:
    """Samples whole steps, several at a time."""

    def __init__(self, sampler: Sampler, *, num_threads: int, clock: Clock) -> None:
        self._sampler = sampler
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="sampler")

    def put(
        self,
        logits: npt.NDArray[np.float32],
        rows: tuple[SampleRow, ...],
        on_ids: OnIds,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Sample one step; ``on_ids`` or ``on_error`` is called on a sampler thread. Called on any thread."""
        self._threads.submit(self._sample, logits, rows, on_ids, on_error)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        self._threads.shutdown(wait=True)

    def _sample(
        self,
        logits: npt.NDArray[np.float32],
        rows: tuple[SampleRow, ...],
        on_ids: OnIds,
        on_error: Callable[[Exception], None],
    ) -> None:
        started_s = self._clock.monotonic_s()
        try:
            ids = tuple(self._sampler(logits, rows).tolist())
        except Exception as exc:
            on_error(exc)
        else:
            on_ids(ids, int((self._clock.monotonic_s() - started_s) * 1e6))
