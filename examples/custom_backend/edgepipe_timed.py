"""A backend that passes every call to another backend and logs how long steps take.

It implements the whole protocol of ``edgepipe.backend.protocol``. Replace the calls of ``self._inner`` with your own
arithmetic to support another library or device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgepipe.backend.devices import number_setting
from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.loader import create_backend
from edgepipe.backend.protocol import Prepared, Ticket
from edgepipe.backend.types import (
    Activations,
    BackendOptions,
    DeviceProfile,
    LoadProgress,
    LogitEdits,
    PackedProducts,
    Step,
    StepOutput,
    TokenIds,
)
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.tensors import WeightSource

logger = logging.getLogger(__name__)


class TimedBackend:
    """Wraps the backend of the setting ``inner`` and logs a line after ``every`` steps."""

    def __init__(self, options: BackendOptions) -> None:
        settings = dict(options.settings)
        name = settings.pop("inner", "torch")
        self._every = max(1, int(number_setting(settings.pop("every", "100"))))
        self._inner = create_backend(name, replace(options, settings=settings))
        self.block_sizes: tuple[int, ...] = self._inner.block_sizes
        self.max_submitted: int = self._inner.max_submitted
        self._tokens: list[int] = []  # of the steps since the last line
        self._times_s: list[float] = []  # from submit to collect, of the same steps

    @property
    def picks_candidates(self) -> bool:
        """Whether the inner backend picks candidates."""
        return self._inner.picks_candidates

    @property
    def draft_model(self) -> DraftModel | None:
        """Return what drafts for the inner backend's model."""
        return self._inner.draft_model

    def profile(self) -> DeviceProfile:
        """Return the device of the inner backend."""
        return self._inner.profile()

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors."""
        self._inner.load(slices, weights, progress)

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return what multiplies with packed weights."""
        return self._inner.packed_products()

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one KV block."""
        return self._inner.kv_block_bytes(config, slices, block_size)

    def allocate_kv(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] = (),
        state_slots: int = 0,
        host_places: Sequence[int] = (),
    ) -> None:
        """Allocate the KV pool and the state slots."""
        self._inner.allocate_kv(
            num_blocks=num_blocks,
            block_size=block_size,
            window_blocks=window_blocks,
            state_slots=state_slots,
            host_places=host_places,
        )

    def prepare(self, step: Step) -> Prepared:
        """Build the step's host arrays. May run on any thread."""
        return self._inner.prepare(step), step.num_tokens

    def submit(self, prepared: Prepared, inputs: TokenIds | Activations, edits: LogitEdits | None = None) -> Ticket:
        """Start computing the step."""
        inner, num_tokens = prepared
        submitted_s = time.perf_counter()
        return self._inner.submit(inner, inputs, edits), num_tokens, submitted_s

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the step."""
        inner, num_tokens, submitted_s = ticket
        output = self._inner.collect(inner)
        self._note(num_tokens, time.perf_counter() - submitted_s)
        return output

    def check(self) -> None:
        """Run a small test step."""
        self._inner.check()

    def close(self) -> None:
        """Free all memory."""
        self._inner.close()

    def _note(self, num_tokens: int, step_s: float) -> None:
        self._tokens.append(num_tokens)
        self._times_s.append(step_s)
        if len(self._times_s) < self._every:
            return
        mean_ms, slowest_ms = 1e3 * sum(self._times_s) / self._every, 1e3 * max(self._times_s)
        tokens = sum(self._tokens)
        logger.info("steps=%d tokens=%d mean=%.2f ms slowest=%.2f ms", self._every, tokens, mean_ms, slowest_ms)
        self._tokens.clear()
        self._times_s.clear()
