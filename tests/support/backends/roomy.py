"""A backend whose sequences get the slots that a form of KV needs behind their tokens, whatever tables a test gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BlockRun, Step, StepRow, WindowRuns
from edgepipe.spec.kv_forms import REST_TOKENS


class RoomyBackend:
    """Passes everything on; its pools have blocks of their own behind each block that a test knows.

    A table that covers its row's tokens goes on with those of its last block. So it must not grow within a span.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._num_blocks: tuple[int, ...] = ()  # blocks of each memory class, as the test knows them
        self._block_size = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def allocate_kv(
        self, *, num_blocks: int, block_size: int, window_blocks: Sequence[int] = (), **others: Any
    ) -> None:
        self._num_blocks, self._block_size = (num_blocks, *window_blocks), block_size
        first, *windows = (count * (1 + self._more) for count in self._num_blocks)
        self._backend.allocate_kv(num_blocks=first, block_size=block_size, window_blocks=windows, **others)

    def prepare(self, step: Step) -> Any:
        return self._backend.prepare(replace(step, rows=tuple(map(self._roomy, step.rows))))

    @property
    def _more(self) -> int:
        return -(-REST_TOKENS // self._block_size)

    def _roomy(self, row: StepRow) -> StepRow:
        end = row.position + row.num_tokens
        windows = [
            WindowRuns(table.first, self._longer(table.runs, number, end - table.first * self._block_size))
            for number, table in enumerate(row.windows, start=1)
        ]
        return replace(row, runs=self._longer(row.runs, 0, end), windows=tuple(windows))

    def _longer(self, runs: Sequence[BlockRun], number: int, end: int) -> tuple[BlockRun, ...]:
        known = self._num_blocks[number] if number < len(self._num_blocks) else 0
        if any(run.start + run.count > known for run in runs):
            return tuple(replace(run, start=run.start + known * self._more) for run in runs)  # still beyond the pool
        if not runs or sum(run.count for run in runs) * self._block_size < end:
            return tuple(runs)
        last = runs[-1].start + runs[-1].count - 1
        return (*runs, BlockRun(known + last * self._more, self._more))
