"""One decoder layer of an 8B Llama at Q4_K on a CPU: packed, widened, the bytes' memory time, and ggml where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from edgepipe_torch import TorchBackend
from figures import Row

from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.model.facts import LayerRange, Slice
from edgepipe.model.shapes import named_shape
from tests.support.packed_models import PackedTinyModel

ROUNDS = 15
ROWS = (1, 5, 16)
_READ_BYTES = 1 << 30


def shape_rows() -> list[Row]:
    """Milliseconds of one layer for each number of rows, least of many, in turns."""
    config = named_shape("llama-3.1-8b")
    part = Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=False)
    source = PackedTinyModel(config, {"": "Q4_K"})
    source_bytes = sum(info.num_bytes for info in source.tensors(part))
    rows: list[Row] = []
    for threads in (1, 2):
        packed, wide = _backend(source, part, threads, "auto"), _backend(source, part, threads, "wide")
        memory_s = source_bytes / _read_rate(threads)
        for count in ROWS:
            steps = [_step(backend, config.hidden_size, count) for backend in (packed, wide)]
            own_s, wide_s = np.min([[step() for step in steps] for _ in range(ROUNDS)], axis=0)
            name = (
                f"8B layer, Q4_K, {count} row{'s' if count > 1 else ''}, {threads} thread{'s' if threads > 1 else ''}"
            )
            rows.append(Row(name, 1e3 * own_s, "ms", 1e3 * wide_s, "widened (fp16)", own_s / wide_s))
            rows.append(Row(name, 1e3 * own_s, "ms", 1e3 * memory_s, "packed bytes / read rate", own_s / memory_s))
    return rows


def _backend(source: PackedTinyModel, part: Slice, threads: int, weights: str) -> TorchBackend:
    backend = TorchBackend(BackendOptions(device="cpu", threads=threads, settings={"weights": weights}))
    backend.load([part], source, lambda _progress: None)
    backend.allocate_kv(num_blocks=max(ROWS), block_size=16)
    return backend


def _step(backend: TorchBackend, hidden: int, count: int) -> Callable[[], float]:
    inputs: Any = np.full((count, hidden), 0x3C00, np.uint16)
    rows = tuple(
        StepRow(sequence=SequenceId(index), position=0, num_tokens=1, runs=(BlockRun(index, 1),))
        for index in range(count)
    )
    step = Step(step=StepId(1), slice_index=1, rows=rows, logit_rows=np.zeros(0, np.int32))

    def run() -> float:
        prepared = backend.prepare(step)
        begun_s = time.perf_counter()
        backend.collect(backend.submit(prepared, inputs))
        return time.perf_counter() - begun_s

    return run


def _read_rate(threads: int) -> float:
    """Return bytes per second of reading memory with so many threads."""
    torch.set_num_threads(threads)
    data = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    taken: list[float] = []
    for _ in range(5):
        begun_s = time.perf_counter()
        data.sum()
        taken.append(time.perf_counter() - begun_s)
    return _READ_BYTES / min(taken)
