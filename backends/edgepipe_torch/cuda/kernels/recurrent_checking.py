"""Check the step kernels of recurrent layers against torch's operations: when they load, and in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_torch.cuda.kernels.recurrent_step import MixerStep, StepForm
from edgepipe_torch.layers.linear import Linear
from edgepipe_torch.layers.recurrent import Convolution, DeltaNetMixer, Mamba2Mixer, Mixer, ShortConvMixer
from edgepipe_torch.layers.states import StepStates

_BF16_ROUNDING = 2.0**-8  # rounding of a result
_SUM_ROUNDING = 5e-6  # tolerance of float32 sums, relative to the largest one
NUM_SLOTS = 7  # states in checks
_NO_NUMBER = float("nan")
_CPU = torch.device("cpu")
_EPS = 1e-5  # epsilon of norms

Places = Sequence[tuple[int, int]]
"""The slots that each row reads and writes."""
MIXED_PLACES: Places = ((2, 2), (5, 0), (5, 3), (1, 4))
"""One row in place, two rows from one snapshot, and one that moves; slot 6 belongs to no row."""


def worst_step_error(kernels: MixerStep, form: StepForm, device: torch.device) -> float:
    """Return the largest error of two mixers of a form, in units of its bound; NaN counts as infinite."""
    return max(
        step_error(kernels, form, spec, device, large=large)
        for spec in (_spec(form, groups=2, shared=2), _spec(form, groups=3, shared=2, tiled=True))
        for large in (False, True)
    )


def _spec(form: StepForm, *, groups: int, shared: int, tiled: bool = False) -> Recurrent:
    """Return a small mixer; ``shared``: heads of a group."""
    if form.kind == "gate":
        return ShortConv(channels=150 * groups, taps=form.taps)
    heads = groups * shared
    if form.kind == "delta":
        return DeltaNet(
            key_heads=groups,
            value_heads=heads,
            key_dim=form.rows,
            value_dim=form.columns,
            taps=form.taps,
            tiled=tiled,
        )
    return Mamba2(
        heads=heads,
        head_dim=form.rows,
        groups=groups,
        state_dim=form.columns,
        taps=form.taps,
        dt_limits=(0.01, 0.5) if tiled else (0.0, float("inf")),
    )


def step_error(
    kernels: MixerStep,
    form: StepForm,
    spec: Recurrent,
    device: torch.device,
    *,
    places: Places = MIXED_PLACES,
    large: bool = False,
    seed: int = 6,
) -> float:
    """Return the largest error of results and states of one step, in units of its bound.

    What no row may read is no number: other slots, and numbers beside the rows. What none may write stays.

    large  inputs whose exponentials overflow float32
    """
    made = torch.Generator().manual_seed(seed)
    mixer = random_mixer(spec, made, device)
    width = _made_width(spec)
    rows = torch.full((len(places), width + 8), _NO_NUMBER)
    rows[:, :width] = torch.randn(len(places), width, generator=made) * (60.0 if large else 1.0)
    dtype = torch.float32 if form.wide else torch.bfloat16
    rows = rows.to(dtype)
    read, write = (torch.tensor(part, dtype=torch.int64) for part in zip(*places, strict=True))
    states = tuple(torch.full((NUM_SLOTS, *shape), _NO_NUMBER) for shape in spec.state_shapes)
    for each in states:
        each[read] = torch.randn(NUM_SLOTS, *each.shape[1:], generator=made)[read]
    wanted, placed = (tuple(each.to(place, copy=True) for each in states) for place in (_CPU, device))
    slots = StepStates(rows=None, read=read, write=write, only=None, long=(), zeros=NUM_SLOTS)
    expected = random_mixer(spec, made.manual_seed(seed), _CPU).rows(rows[:, :width].float(), wanted, slots)
    found = kernels.of(mixer).run(rows.to(device)[:, :width], placed, read.to(device), write.to(device), threads=1)
    rounding = _SUM_ROUNDING if form.wide else _BF16_ROUNDING
    worst = _error(found, expected, rounding * expected.abs() + _SUM_ROUNDING * _largest(expected))
    for each, new in zip(placed, wanted, strict=True):
        worst = max(worst, _error(each, new, _SUM_ROUNDING * _largest(new)))
    return worst


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(0.0).abs().max())


def _error(found: Tensor, expected: Tensor, bound: Tensor | float) -> float:
    """Return the largest error; where a number is expected and none is found, or the reverse, infinity."""
    computed = found.float().cpu()
    if not torch.equal(computed.isnan(), expected.isnan()):
        return float("inf")
    return float(((computed - expected).abs() / bound).nan_to_num(0.0).max())


def _made_width(spec: Recurrent) -> int:
    """Return the width of a row's input product."""
    match spec:
        case DeltaNet():
            return spec.channels + spec.value_heads * (spec.value_dim + 2)
        case Mamba2():
            return spec.channels + spec.heads * (spec.head_dim + 1)
        case ShortConv():
            return 3 * spec.channels


def random_mixer(spec: Recurrent, made: torch.Generator, device: torch.device) -> Mixer:
    """Return a mixer without an input product."""

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=made)).to(device)

    bias = None if isinstance(spec, DeltaNet) else drawn(spec.channels, scale=0.3)
    convolution = Convolution(drawn(spec.channels, spec.taps, scale=0.5), bias)
    product = cast(Linear, None)  # its results are given
    if isinstance(spec, ShortConv):
        return ShortConvMixer(spec, product, convolution)
    if isinstance(spec, DeltaNet):
        mixer = DeltaNetMixer(spec, product, convolution, eps=_EPS, device=device)
    else:
        mixer = Mamba2Mixer(spec, product, convolution, eps=_EPS, device=device)
        mixer.skips.copy_(drawn(*mixer.skips.shape))
    mixer.dt_bias.copy_(drawn(*mixer.dt_bias.shape))
    mixer.rates.copy_(drawn(*mixer.rates.shape, scale=0.7).exp())
    mixer.norm.copy_(1 + drawn(*mixer.norm.shape, scale=0.3))
    return mixer
