"""Compare compiled steps of recurrent layers with torch's in float64 when they are compiled; see ``checking``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_torch.cpu.calls import KernelCalls, Native
from edgepipe_torch.cpu.recurrent import CompiledStep
from edgepipe_torch.cpu.recurrent_code import StepForm
from edgepipe_torch.layers.linear import PlainLinear, Workspace
from edgepipe_torch.layers.recurrent import Convolution, DeltaNetMixer, Mamba2Mixer, ShortConvMixer

_BOUND = 2.0**-17  # tolerance relative to the largest value of a tensor
_EPS = 1e-5
_HEADS, _GROUPS = 4, 2
_CHANNELS = 136  # channels of a short convolution: more than a thread convolves at once
_SLOTS = 5
_READ, _WRITE = (4, 2, 1), (0, 2, 3)  # the second row in place
_CPU = torch.device("cpu")


def recurrent_error(kernels: KernelCalls, form: StepForm, function: Native) -> float:
    """Return the largest error of a step's outputs and states, on one thread and on two, in units of the bound."""
    rng = np.random.default_rng(8)
    worst = 0.0
    for spec, threads in itertools.product(_specs(form), (1, 2) if kernels.parallel else (1,)):
        mixer, made = _mixer(spec, rng)
        states = tuple(_normal(rng, _SLOTS, *shape) for shape in spec.state_shapes)
        kept = [each.double() for each in states]
        step = CompiledStep(kernels, function, spec, mixer.weights, Workspace(torch.float32, _CPU), eps=_EPS)
        out = step.run(made, states, torch.tensor(_READ), torch.tensor(_WRITE), threads=threads)
        _widen(mixer)
        expected, after = mixer.step(made.double(), tuple(each[list(_READ)] for each in kept))
        for each, new in zip(kept, after, strict=True):
            each[list(_WRITE)] = new
        worst = max(worst, _error((out, *states), (expected, *kept)))
    return worst


def _specs(form: StepForm) -> Sequence[Recurrent]:
    """Return small mixers of a form, with and without what the code branches on."""
    if form.kind == "short":
        return [ShortConv(channels=_CHANNELS, taps=form.taps, bias=biased) for biased in (True, False)]
    if form.kind == "delta":
        sizes = {"key_heads": _GROUPS, "value_heads": _HEADS, "key_dim": form.inner, "value_dim": form.outer}
        return [DeltaNet(taps=form.taps, tiled=tiled, **sizes) for tiled in (True, False)]
    plain = Mamba2(heads=_HEADS, head_dim=form.inner, groups=_GROUPS, state_dim=form.outer, taps=form.taps)
    return [plain, replace(plain, conv_bias=False, dt_limits=(0.5, 1.5))]


def _mixer(spec: Recurrent, rng: np.random.Generator) -> tuple[DeltaNetMixer | Mamba2Mixer | ShortConvMixer, Tensor]:
    """Return a mixer with random weights, and a random input product of the rows."""
    biased = spec.bias if isinstance(spec, ShortConv) else isinstance(spec, Mamba2) and spec.conv_bias
    bias = _normal(rng, spec.channels) if biased else None
    convolution = Convolution(_normal(rng, spec.channels, spec.taps), bias)
    unused = PlainLinear(1, [1], dtype=torch.float32, device=_CPU)
    if isinstance(spec, ShortConv):
        return ShortConvMixer(spec, unused, convolution), _normal(rng, len(_READ), 3 * spec.channels)
    if isinstance(spec, DeltaNet):
        mixer, heads = DeltaNetMixer(spec, unused, convolution, eps=_EPS, device=_CPU), spec.value_heads
        features = spec.channels + spec.value_heads * (spec.value_dim + 2)
    else:
        mixer, heads = Mamba2Mixer(spec, unused, convolution, eps=_EPS, device=_CPU), spec.heads
        features = spec.channels + spec.heads * (spec.head_dim + 1)
        mixer.skips = _normal(rng, heads)
    mixer.dt_bias, mixer.rates, mixer.norm = (
        _normal(rng, heads),
        _normal(rng, heads).abs(),
        _normal(rng, *mixer.norm.shape),
    )
    return mixer, _normal(rng, len(_READ), features)


def _widen(mixer: DeltaNetMixer | Mamba2Mixer | ShortConvMixer) -> None:
    """Make a mixer's weights float64."""
    own = mixer.convolution
    own.weight, own.bias = own.weight.double(), None if own.bias is None else own.bias.double()
    if not isinstance(mixer, ShortConvMixer):
        mixer.dt_bias, mixer.rates, mixer.norm = mixer.dt_bias.double(), mixer.rates.double(), mixer.norm.double()
    if isinstance(mixer, Mamba2Mixer):
        mixer.skips = mixer.skips.double()


def _error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest error of tensors, in units of the bound; infinite with a NaN."""
    errors = [float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, right, strict=True)]
    return math.inf if any(math.isnan(each) for each in errors) else max(errors) / _BOUND


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))
