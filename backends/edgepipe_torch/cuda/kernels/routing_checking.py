"""Check what surrounds products with experts: when it loads, and in tests. Products check the sorted pairs."""

from __future__ import annotations

import torch

from edgepipe.spec.layer_spec import Router
from edgepipe_torch.cuda.kernels.experts import RoutingKernels
from edgepipe_torch.layers.routing import choose

_BF16_ROUNDING = 2.0**-8  # rounding of a sum
_FLOAT32_ROUNDING = 1e-5  # tolerance of a weight
_CPU = torch.device("cpu")
_SHAPES = ((3, 5, 2), (2, 300, 8))  # rows, experts, experts that a row uses: fewer and more than a block's threads
_ROUTERS = (
    (Router(score="softmax", normalised=True), False),
    (Router(score="softmax", normalised=False), True),
    (Router(score="sigmoid", normalised=True), True),
)
"""Each router, and whether its scores are corrected."""


def worst_routing_error(routing: RoutingKernels, device: torch.device) -> float:
    """Return the largest error of weights and sums, in units of its bound. Another choice or NaN counts as infinite."""
    made = torch.Generator().manual_seed(9)
    errors = [_sum_error(routing, device, made), _gated_error(routing, device, made)]
    for rows, experts, used in _SHAPES:
        logits, added = 3 * torch.randn(rows, experts, generator=made), torch.randn(experts, generator=made)
        for how, corrected in _ROUTERS:
            correction = added if corrected else None
            placed = None if correction is None else correction.to(device)
            chosen, weights = (each.to(_CPU) for each in routing.choose(how, logits.to(device), placed, used))
            expected, wanted = choose(how, logits, correction, used)
            same = torch.equal(chosen, expected)
            errors.append(_largest(weights - wanted, _FLOAT32_ROUNDING * wanted.abs()) if same else float("inf"))
    return max(errors)


def _sum_error(routing: RoutingKernels, device: torch.device, made: torch.Generator) -> float:
    """Sum three results of each row; one of weight 0 is no number."""
    results = torch.randn(12, 40, generator=made).to(torch.bfloat16)
    weights, total = torch.rand(4, 3, generator=made), torch.randn(4, 40, generator=made).to(torch.bfloat16)
    weights[1, 2], results[5] = 0.0, float("nan")
    known = results.nan_to_num(0.0).double().view(4, 3, 40)
    expected = total.double() + (known * weights.double().unsqueeze(-1)).sum(1)
    size = total.double().abs() + (known * weights.double().unsqueeze(-1)).abs().sum(1)
    found = total.to(device)
    routing.add_weighted(results.to(device), weights.to(device), found)
    return _largest(found.to(_CPU).double() - expected, _BF16_ROUNDING * size)


def _gated_error(routing: RoutingKernels, device: torch.device, made: torch.Generator) -> float:
    """Add rows with gates of every size; what lies beside them is no number and stays."""
    x, added, total = (torch.randn(5, size, generator=made).to(torch.bfloat16) for size in (300, 45, 45))
    gate = (torch.randn(1, 300, generator=made) / 4).to(torch.bfloat16)
    factors = torch.sigmoid(x.double() @ gate.double().t())
    expected = total.double() + factors * added.double()
    size = total.double().abs() + factors * added.double().abs()
    buffer = torch.full((5, 64), float("nan"), dtype=torch.bfloat16, device=device)
    found = buffer[:, 9:54]
    found.copy_(total)
    routing.add_gated(x.to(device), gate.to(device), added.to(device), found)
    beside = buffer.isnan().sum() == 5 * (64 - 45)
    return _largest(found.to(_CPU).double() - expected, _BF16_ROUNDING * size) if bool(beside) else float("inf")


def _largest(error: torch.Tensor, bound: torch.Tensor) -> float:
    return float((error.abs() / (bound + 1e-30)).nan_to_num(float("inf")).max())
