"""A backend whose steps take known times of a clock that tests turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.types import DeviceProfile, LoadProgress, PackedProducts, Step, StepOutput
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.tensors import WeightSource
from edgepipe.testing.clock import FakeClock


class TimedBackend:
    """1 ms a step, 2 ms a layer, 0.1 ms a layer and token, 5 ms the head, 1 us a layer and token of context."""

    block_sizes: tuple[int, ...] = (16,)
    max_submitted = 1
    picks_candidates = False
    draft_model: DraftModel | None = None

    def __init__(self, clock: FakeClock, *, counts: bool = False, prompts_s: Callable[[int], float] | None = None):
        """``counts``: steps that decode read a hundredth of the experts per row.

        ``prompts_s``: the seconds of a layer and a prompt of so many tokens, beside the usual ones.
        """
        self.closed = False
        self._prompts_s = prompts_s
        self._clock = clock
        self._counts = counts
        self._layers, self._head = 0, False

    def profile(self) -> DeviceProfile:
        raise NotImplementedError

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        for part in slices:
            for info in weights.tensors(part):
                assert weights.read(info.name).data.nbytes == info.num_bytes
        self._layers, self._head = len(slices[0].layers), slices[0].head

    def packed_products(self) -> Sequence[PackedProducts]:
        """See Backend."""
        return ()

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        return 1

    def allocate_kv(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] = (),
        state_slots: int = 0,
        host_places: Sequence[int] = (),
    ) -> None:
        self._blocks = num_blocks

    def prepare(self, step: Step) -> Step:
        assert all(run.start + run.count <= self._blocks for row in step.rows for run in row.runs)
        return step

    def submit(self, prepared: Step, inputs: object, edits: object = None) -> Step:
        return prepared

    def collect(self, ticket: Step) -> StepOutput:
        context = sum(row.position + row.num_tokens for row in ticket.rows if row.num_tokens == 1)
        seconds = 1e-3 + self._layers * (2e-3 + 1e-4 * ticket.num_tokens + 1e-6 * context)
        if self._prompts_s and ticket.num_tokens > len(ticket.rows):
            seconds += self._layers * self._prompts_s(ticket.num_tokens)
        self._clock.advance(seconds + (5e-3 if self._head else 0.0))
        share = 0.01 * ticket.num_tokens if self._counts and len(ticket.rows) == ticket.num_tokens > 1 else 0.0
        return StepOutput(logits=np.zeros((1, 1), dtype=np.float32), expert_share=share)

    def check(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True
