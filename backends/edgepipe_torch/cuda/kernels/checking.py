"""Check kernels against the weights' exact values: at load, on a small random weight, and in tests of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from edgepipe.spec.layer_spec import Activation
from edgepipe.spec.packed import GroupValues, Packed, split_planes
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from edgepipe_torch.cuda.kernels.experts import ExpertKernels, RoutingKernels
from edgepipe_torch.cuda.kernels.forms import TILE_INPUTS, WIDE_FORM, FloatKind, KernelForm
from edgepipe_torch.cuda.kernels.products import Products, WeightStruct, weight_struct, wide_struct
from edgepipe_torch.cuda.packed_tiles import TiledWeight

_SHARED_INPUTS = 2048  # several blocks share as many inputs of a few row tiles
_BF16_ROUNDING = 2.0**-8  # rounding of a value, and a little of its sum
_FLOAT32_SUMS = 2.0**-18  # tolerance relative to the sum of all products' sizes


def worst_product_error(products: Products, form: KernelForm, device: torch.device) -> float:
    """Return the largest error of all that a form's products do, on small weights; see worst_error.

    That includes blocks that share the inputs of 64 rows, which takes more inputs than a group or span.
    """
    few = _in_features(form)
    many = few * -(-_SHARED_INPUTS // few)
    return max(
        worst_error(products, form, device),
        worst_error(products, form, device, in_features=many, rows=(33, 64)),
        worst_gated_error(products, form, device),
        worst_gated_error(products, form, device, in_features=many, rows=(64,)),
    )


def worst_error(
    products: Products,
    form: KernelForm,
    device: torch.device,
    *,
    out_features: int = 40,
    in_features: int = 0,
    rows: Sequence[int] = (1, 11, 20, 64),
) -> float:
    """Return the largest error of products and widened values of a random weight, in units of its bound.

    The bound is one rounding to bf16 and the error of float32 sums. ``in_features`` 0: two groups or spans, and more
    than one tile.
    """
    rng = np.random.default_rng(5)
    weight = random_packed(form, out_features, in_features or _in_features(form), rng)
    tiled = TiledWeight(form, *weight.shape, device)
    tiled.fill(0, weight)
    exact = weight.float32().astype(np.float64)
    widened = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
    products.dequantise(tiled, range(out_features), widened)
    errors = [np.abs(widened.double().cpu().numpy() - exact) / (_BF16_ROUNDING * np.abs(exact) + 1e-30)]
    for count in rows:
        x = torch.from_numpy(rng.standard_normal((count, weight.shape[1]), np.float32)).to(torch.bfloat16)
        out = torch.empty(count, out_features, dtype=torch.bfloat16, device=device)
        products.affine_mm(tiled, x.to(device), out, bias=None, add=False)
        inputs = x.double().numpy()
        expected = inputs @ exact.T
        bound = _BF16_ROUNDING * np.abs(expected) + _FLOAT32_SUMS * (np.abs(inputs) @ np.abs(exact).T)
        errors.append(np.abs(out.double().cpu().numpy() - expected) / bound)
    return _largest(errors)


def worst_gated_error(
    products: Products,
    form: KernelForm,
    device: torch.device,
    *,
    features: int = 48,
    in_features: int = 0,
    rows: Sequence[int] = (1, 20),
) -> float:
    """Return the largest error of the activations of random gates and ups, in units of its bound; see worst_error.

    features  of gates, and of ups
    """
    rng = np.random.default_rng(7)
    weight = random_packed(form, 2 * features, in_features or _in_features(form), rng)
    tiled = TiledWeight(form, *weight.shape, device)
    tiled.fill(0, weight)
    exact = weight.float32().astype(np.float64)
    bias = torch.from_numpy(rng.standard_normal(2 * features, np.float32)).to(torch.bfloat16)
    size = np.abs(exact).sum(axis=1).mean()  # this size puts gates where their activations bend
    errors: list[npt.NDArray[np.float64]] = []
    for count in rows:
        x = torch.from_numpy(rng.standard_normal((count, weight.shape[1]), np.float32) * 16 / size).to(torch.bfloat16)
        inputs = x.double().numpy()
        sums = inputs @ exact.T + bias.double().numpy()
        noise = _FLOAT32_SUMS * (np.abs(inputs) @ np.abs(exact).T + np.abs(bias.double().numpy()))
        for activation, activated in EXACT_ACTIVATIONS.items():
            out = torch.empty(count, features, dtype=torch.bfloat16, device=device)
            products.affine_mm(tiled, x.to(device), out, bias=bias.to(device), add=False, activation=activation)
            expected = activated(sums[:, :features], sums[:, features:])
            steep = 1.2 * (1 + np.abs(sums))  # an upper bound of each activation's slopes
            lost = steep[:, features:] * noise[:, :features] + steep[:, :features] * noise[:, features:]
            errors.append(np.abs(out.double().cpu().numpy() - expected) / (_BF16_ROUNDING * np.abs(expected) + lost))
    return _largest(errors)


def _gelu_tanh(gate: npt.NDArray[np.float64], up: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def _clamped(gate: npt.NDArray[np.float64], up: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


EXACT_ACTIVATIONS: Mapping[
    Activation, Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64]], npt.NDArray[np.float64]]
] = {"silu": lambda gate, up: gate / (1 + np.exp(-gate)) * up, "gelu_tanh": _gelu_tanh, "clamped_swiglu": _clamped}
"""Activations of gates and ups in float64."""


def worst_expert_error(
    products: ExpertKernels,
    routing: RoutingKernels,
    form: KernelForm,
    device: torch.device,
    *,
    experts: int = 5,
    used: int = 2,
    features: int = 48,
    in_features: int = 0,
    rows: Sequence[int] = (1, 11, 40),
) -> float:
    """Return the largest error of random experts' products with their rows, in units of its bound; see worst_error."""
    rng = np.random.default_rng(6)
    inputs = in_features or _in_features(form)
    struct, exact, _kept = random_experts(form, experts * features, inputs, rng, device)
    errors = []
    for count in rows:
        x = torch.from_numpy(rng.standard_normal((count, inputs), np.float32)).to(torch.bfloat16)
        chosen = np.argsort(rng.random((count, experts)), axis=1)[:, :used]
        found = torch.zeros(2, dtype=torch.int32, device=device)
        runs = routing.sort(torch.from_numpy(chosen.copy()).to(device), experts, found)
        out = torch.empty(count * used, features, dtype=torch.bfloat16, device=device)
        products.expert_mm(struct, experts, runs, x.to(device), out, bias=None)
        for expert in range(experts):
            pairs = np.flatnonzero(chosen == expert)
            given, own = x.double().numpy()[pairs // used], exact[expert * features : (expert + 1) * features]
            expected = given @ own.T
            bound = _BF16_ROUNDING * np.abs(expected) + _FLOAT32_SUMS * (np.abs(given) @ np.abs(own).T)
            errors.append((np.abs(out.double().cpu().numpy()[pairs] - expected) / bound).reshape(-1))
    return _largest(errors)


def random_experts(
    form: KernelForm, rows: int, in_features: int, rng: np.random.Generator, device: torch.device
) -> tuple[WeightStruct, npt.NDArray[np.float64], object]:
    """Return a random weight [rows, I] for kernels, its values, and what must be kept while it is used."""
    if form == WIDE_FORM:
        values = torch.from_numpy(rng.standard_normal((rows, in_features), np.float32)).to(torch.bfloat16)
        placed = values.to(device)
        return wide_struct(placed), values.double().numpy(), placed
    weight = random_packed(form, rows, in_features, rng)
    tiled = TiledWeight(form, *weight.shape, device)
    tiled.fill(0, weight)
    return weight_struct(tiled), weight.float32().astype(np.float64), tiled


def _largest(errors: Sequence[npt.NDArray[np.float64]]) -> float:
    """NaN counts as infinite."""
    return max(float(np.max(np.where(np.isnan(error), np.inf, error), initial=0)) for error in errors)


def random_packed(form: KernelForm, out_features: int, in_features: int, rng: np.random.Generator) -> Packed:
    """Return a weight with random codes, scales, offsets and zeros."""
    group = form.group or in_features
    codes = rng.integers(0, 2**form.bits, (out_features, in_features)).astype(np.uint8)
    if form.codebook:
        codes[~np.isfinite(CODEBOOKS[form.codebook][codes])] = 0
    low, high = split_planes(codes, form.bits)
    zero: int | npt.NDArray[np.uint8] | None = None
    if form.offset == "zero":
        zero = 2 ** (form.bits - 1)
    elif form.offset == "zeros":
        zero = rng.integers(0, 2**form.bits, (out_features, in_features // group)).astype(np.uint8)

    def floats(kind: FloatKind) -> GroupValues:
        factor = None
        if kind.factor:
            info = np.iinfo(kind.factor)
            factor = rng.integers(info.min, info.max, (out_features, in_features // group)).astype(kind.factor)
        values = rng.uniform(-0.02, 0.02, (out_features, in_features // (form.span or group))).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return GroupValues(base=bits if kind.base == "uint16" else values.astype(kind.base), factor=factor)

    return Packed(
        name="random",
        shape=(out_features, in_features),
        form=PackedForm(
            bits=form.bits,
            group=group,
            span=form.span,
            base_bits=32 if form.scale.base == "float32" else 16,
            offset=form.offset,
            codebook=form.codebook,
        ),
        low=low,
        high=high,
        scale=floats(form.scale),
        offset=floats(form.added) if form.offset == "added" else None,
        zero=zero,
    )


def _in_features(form: KernelForm) -> int:
    unit = max(form.span, form.group, TILE_INPUTS)
    return 2 * unit if form.span or form.group >= TILE_INPUTS else 3 * TILE_INPUTS + 16 * max(1, form.group // 16)
