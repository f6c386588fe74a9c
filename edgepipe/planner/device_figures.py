"""The figures by which people compare a device with its data sheet, and their predictions. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import DeviceModel
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import WeightTable, only_layers

DENSE, EXPERTS, RECURRENT = "llama-3.1-8b:q4_k_m", "qwen3-30b-a3b:q4_k_m", "qwen3.6-35b-a3b:q4_k_m"
DECODE_ROWS, LAYER_ROWS = (1, 4, 16, 64), (1, 16)
PROMPT, CONTEXT = 512, 64
"""Tokens of the measured prompt, and tokens that each decoded row attends to."""


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A figure's place in tables."""

    title: str
    unit: str
    more_is_better: bool = True


FIGURES: Mapping[str, FigureKind] = {
    "memory": FigureKind("memory rate", "GB/s"),
    "products": FigureKind("rate of large products", "TFLOP/s"),
    **{f"decode_{rows}": FigureKind(f"{DENSE}, {rows} at once", "tok/s") for rows in DECODE_ROWS},
    "prompt": FigureKind(f"{DENSE}, prompt of {PROMPT}", "tok/s"),
    **{f"experts_{rows}": FigureKind(f"layer of {EXPERTS}, rows: {rows}", "us", False) for rows in LAYER_ROWS},
    **{
        f"recurrent_{rows}": FigureKind(f"recurrent layer of {RECURRENT}, rows: {rows}", "us", False)
        for rows in LAYER_ROWS
    },
    "step": FigureKind("step without its layers", "us", False),
    "gap": FigureKind("device waits for the host, a step", "us", False),
    "power": FigureKind("power while it decodes", "W", False),
}
"""Keys are those of measurements; tables have the same order."""


def dense_model() -> tuple[ModelConfig, WeightTable]:
    """Return the model whose decoding and prompt are measured."""
    return named_model(DENSE)


def expert_model() -> tuple[ModelConfig, WeightTable]:
    """Return the model whose layers with experts are measured."""
    return named_model(EXPERTS)


def recurrent_model() -> tuple[ModelConfig, WeightTable]:
    """Return the model whose recurrent layers are measured, and these layers alone."""
    config, table = named_model(RECURRENT)
    return only_layers(config, table, _is_recurrent)


def _is_recurrent(spec: LayerSpec) -> bool:
    return spec.recurrent is not None


def predicted_figures(device: DeviceModel, *, packing: str, dtype: str) -> dict[str, float]:
    """Predict figures from a data sheet. ``packing`` and ``dtype``: as in the device's profile."""
    found = {
        "memory": device.bandwidth_bytes_per_s / 1e9,
        "products": device.flops / 1e12,
        "step": 1e6 * device.step_overhead_s,
    }
    config, table = dense_model()
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    cost = CostModel(config, device, weights=table, kind=packing, dtype=dtype).slice_cost(whole)
    for rows in DECODE_ROWS:
        found[f"decode_{rows}"] = rows / cost.step_s(_decode(rows, logits=True))
    found["prompt"] = PROMPT / cost.step_s(StepWork.of_rows([0], [PROMPT], logit_rows=1))
    for name, (config, table) in (("experts", expert_model()), ("recurrent", recurrent_model())):
        layer = CostModel(config, device, weights=table, kind=packing, dtype=dtype).mean_cost(1, head=False)
        for rows in LAYER_ROWS:
            step_s = layer.step_s(_decode(rows, logits=False))
            found[f"{name}_{rows}"] = 1e6 * (step_s - device.step_overhead_s - rows * device.sequence_overhead_s)
    return found


def _decode(rows: int, *, logits: bool) -> StepWork:
    return StepWork.of_rows([CONTEXT - 1] * rows, [1] * rows, logit_rows=rows if logits else 0)
