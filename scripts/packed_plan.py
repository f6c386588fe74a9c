"""The planner's step times for packed models beside measured ones, on this machine's CPU.

The planner has the times of the node's own probe: made-up layers of the model's shape and formats. Steps are measured
through the backend, with the pause between them that a stage has while the host samples and plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from edgepipe_torch import TorchBackend
from figures import Row

from edgepipe.backend.cost import StepWork
from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.planner.profiles import measured_speed
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.tensors import WeightSource
from edgepipe.stage.made_up import MadeUpWeights
from edgepipe.stage.probe import probe_layer
from edgepipe.system import SystemClock
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import WeightTable, read_table
from edgepipe.weights.weights import open_weights

ALLOWED = 0.10
LARGE, LARGE_LAYERS = "llama-3.1-8b:q4_k_m", 4
ROUNDS = 2  # probes and measurements, in turns
PAUSE_S = 0.002
CONTEXT = 256  # tokens that each sequence attends to
_BLOCK = 16
_LEAST_RUNS, _RUNS, _ENOUGH_S = 3, 15, 1.0
_SIZES = (  # sequences, position of the first token, tokens of each
    (1, CONTEXT - 1, 1),
    (16, CONTEXT - 1, 1),
    (1, 0, 512),
)


class _Stage(NamedTuple):
    name: str
    config: ModelConfig
    table: WeightTable
    source: WeightSource
    part: Slice


def plan_rows(model: Path) -> list[Row]:
    """Planned over measured, each the least of a few rounds."""
    source = open_weights(model)
    (whole,) = make_slices([LayerRange(0, source.config.num_layers)], source.config.num_layers)
    config, table = named_model(LARGE)
    middle = Slice(index=1, layers=LayerRange(1, 1 + LARGE_LAYERS), embedding=False, head=False)
    stages = (
        _Stage("demo model", source.config, read_table(source), source, whole),
        _Stage(f"{LARGE_LAYERS} layers of {LARGE}", config, table, MadeUpWeights(config, table), middle),
    )
    return [row for stage in stages for row in _rows_of(stage)]


def _rows_of(stage: _Stage) -> list[Row]:
    taken = [(_probe(stage), _measured(stage)) for _ in range(ROUNDS)]
    rows: list[Row] = []
    for index, (count, position, tokens) in enumerate(_SIZES):
        logits = count if stage.part.head else 0
        work = StepWork.of_rows([position] * count, [tokens] * count, logit_rows=logits)
        planned_s = min(_planned_s(profile, stage, work) for profile, _ in taken)
        step_s = min(measured[index] for _, measured in taken)
        what = f"{tokens} tokens of a prompt" if tokens > 1 else f"{count} sequence{'s' * (count > 1)}"
        ratio = planned_s / step_s
        met = abs(ratio - 1) <= ALLOWED
        name = f"planned step, {stage.name}, {what}"
        rows.append(Row(name, 1e3 * planned_s, "ms", 1e3 * step_s, "measured", ratio, f"within {ALLOWED:.0%}", met))
    return rows


def _planned_s(profile: LayerProfile, stage: _Stage, work: StepWork) -> float:
    device = TorchBackend(BackendOptions(device="cpu")).profile()
    speed = measured_speed(profile, device, stage.config, weights=stage.table, dtype="float32")
    return speed.parts(work).slice_s(stage.part)


def _probe(stage: _Stage) -> LayerProfile:
    backend = _backend()
    packing = backend.profile().packing
    return probe_layer(backend, stage.config, SystemClock(), value_bytes=4, weights=stage.table, packing=packing)


def _measured(stage: _Stage) -> list[float]:
    """Return the median seconds of each kind of step."""
    backend = _backend()
    backend.load([stage.part], stage.source, lambda _progress: None)
    blocks = max(count * -(-(position + tokens) // _BLOCK) for count, position, tokens in _SIZES)
    backend.allocate_kv(num_blocks=blocks, block_size=_BLOCK)
    found = [_median_s(_step(backend, stage, *size)) for size in _SIZES]
    backend.close()
    return found


def _median_s(run: Callable[[], float]) -> float:
    """Return the median of up to _RUNS runs; of fewer if they are long."""
    run()
    taken: list[float] = []
    while len(taken) < _LEAST_RUNS or (len(taken) < _RUNS and sum(taken) < _ENOUGH_S):
        time.sleep(PAUSE_S)
        taken.append(run())
    return float(np.median(taken))


def _step(backend: TorchBackend, stage: _Stage, count: int, position: int, tokens: int) -> Callable[[], float]:
    blocks = -(-(position + tokens) // _BLOCK)
    rows = tuple(
        StepRow(
            sequence=SequenceId(index),
            position=position,
            num_tokens=tokens,
            runs=(BlockRun(index * blocks, blocks),),
        )
        for index in range(count)
    )
    logit_rows = np.arange(1, count + 1, dtype=np.int32) * tokens - 1 if stage.part.head else np.zeros(0, np.int32)
    step = Step(step=StepId(1), slice_index=stage.part.index, rows=rows, logit_rows=logit_rows)
    inputs: Any = np.full((count * tokens, stage.config.hidden_size), 0x3C00, np.uint16)
    if stage.part.embedding:
        inputs = np.random.default_rng(0).integers(0, stage.config.vocab_size, count * tokens).astype(np.int32)

    def run() -> float:
        prepared = backend.prepare(step)
        begun_s = time.perf_counter()
        backend.collect(backend.submit(prepared, inputs))
        return time.perf_counter() - begun_s

    return run


def _backend() -> TorchBackend:
    return TorchBackend(BackendOptions(device="cpu"))
