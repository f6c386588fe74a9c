"""Recurrent layers on an NVIDIA GPU: exactness of the step kernels, decode steps in graphs, and prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from edgepipe_torch.cuda.kernels.library import cuda_library
from edgepipe_torch.cuda.kernels.recurrent_checking import worst_step_error
from edgepipe_torch.cuda.kernels.recurrent_step import step_form
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from figures import Row, at_least, at_most, below
from gpu_layers import Layers

from edgepipe.config import kernel_dir
from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv

MODEL = "qwen3.6-35b-a3b:q4_k_m"
PROMPT = 2048  # tokens
MIXERS: dict[str, Recurrent] = {
    "qwen3.6-35b-a3b": DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),
    "nemotron-3-nano": Mamba2(heads=64, head_dim=64, groups=8, state_dim=128, taps=4),
    "lfm2": ShortConv(channels=2048, taps=3),
}
_FEW, _MANY = 2, 8  # layers: the difference of their steps has no share of the host


def recurrent_exact_rows() -> Iterator[Row]:
    """Step kernels against torch's operations: the largest error in units of its bound."""
    device = torch.device("cuda", 0)
    library = cuda_library(device, kernel_dir())
    if isinstance(library, KernelsUnavailable):
        raise library
    for name, spec in MIXERS.items():
        for dtype in (torch.bfloat16, torch.float32):
            form = step_form(spec, dtype)
            worst = worst_step_error(library.mixer_step(form), form, device)
            kind = str(dtype).removeprefix("torch.")
            yield below(f"one token by own kernel, mixer of {name}, {kind}", worst, "bounds", 1.0)


def recurrent_layer_rows() -> Iterator[Row]:
    """A layer with gated DeltaNet: a token against memory time, and a prompt against a layer with attention."""
    many, few = (Layers(MODEL, count, among=lambda spec: spec.recurrent is not None) for count in (_MANY, _FEW))
    for count in (1, 16):
        few.first_step(count)
        memory_s = many.first_step(count) / _MANY / many.bandwidth
        layer_s = (many.step_s(count) - few.step_s(count)) / (_MANY - _FEW)
        name = f"recurrent layer of {MODEL}, {count} row{'s' if count > 1 else ''}"
        if count == 1:
            yield at_most(name, 1e6 * layer_s, "us", 1e6 * memory_s, "memory time", 1.5)
        else:
            yield Row(name, 1e6 * layer_s, "us", 1e6 * memory_s, "memory time", layer_s / memory_s)
    recurrent_s = _prompt_s(many, few)
    attention_s = _prompt_s(
        *(Layers(MODEL, count, among=lambda spec: spec.attention is not None) for count in (_MANY, _FEW))
    )
    rate, attention = PROMPT / recurrent_s, PROMPT / attention_s
    name = f"prompt of {PROMPT}, recurrent layer of {MODEL}"
    yield at_least(name, rate, "tok/s", attention, "attention layer", 0.7)


def _prompt_s(many: Layers, few: Layers) -> float:
    """Return the seconds of one layer, and release both."""
    found = (many.prompt_s(PROMPT) - few.prompt_s(PROMPT)) / (_MANY - _FEW)
    many.close()
    few.close()
    return found
