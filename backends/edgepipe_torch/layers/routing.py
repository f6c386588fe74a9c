"""The router of a mixture chooses each row's experts.

T rows, H hidden, E experts, K of them used by each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.spec.layer_spec import Experts, Router
from edgepipe_torch.layers.linear import Linear

Choose = Callable[[Router, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""Computes as ``choose`` does."""


AddGated = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Computes as ``add_gated`` does."""


class RouterWeights:
    """The router's weights, in float32 whatever the compute dtype."""

    def __init__(
        self,
        weight: Tensor | Linear,
        bias: Tensor | None,
        correction: Tensor | None,
        input_scale: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> None:
        """weight [E, H], bias [E], correction [E], input_scale [H], expert_scale [E]; filled later.

        weight  or a product that gives a row the same bits in any batch, with the bias
        """
        self.weight = weight
        self.bias = bias
        self.correction = correction
        self.input_scale = input_scale
        self.expert_scale = expert_scale
        self.choose: Choose = choose

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        every = (self.bias, self.correction, self.input_scale, self.expert_scale)
        weight = self.weight.nbytes if isinstance(self.weight, Tensor) else self.weight.num_bytes
        return weight + sum(each.nbytes for each in every if each is not None)

    def logits(self, x: Tensor) -> Tensor:
        """Return each expert's logit [T, E] of x [T, H] float32, valid until the next call."""
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        return self.weight.rows(x)


def route(spec: Experts, router: RouterWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Choose each row's experts, in float32: their numbers [T, K] int64 and weights [T, K], of x [T, H]."""
    how, x = spec.router, x.float()
    if how.input_eps is not None:
        x = F.rms_norm(x, x.shape[-1:], router.input_scale, how.input_eps) * x.shape[-1] ** -0.5
    chosen, weights = router.choose(how, router.logits(x), router.correction, spec.used)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[chosen]
    return chosen, weights if how.scale == 1 else weights * how.scale


def choose(
    how: Router,
    logits: Tensor,
    correction: Tensor | None,
    used: int,
    *,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """Choose ``used`` experts of each row by logits [T, E]: their numbers [T, K] int64 and weights [T, K], unscaled."""
    scores = logits.softmax(-1) if how.score == "softmax" else sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if how.groups > 1:
        ranked = _within_groups(how, ranked)
    chosen = ranked.topk(used, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if how.normalised else weights


def add_gated(x: Tensor, gate: Tensor, added: Tensor, total: Tensor) -> None:
    """Add to total [T, H] the rows added [T, H] times sigmoid(x gate), of x [T, H] and gate [1, H]."""
    total.add_(added * torch.sigmoid(F.linear(x, gate)))


def _within_groups(router: Router, ranked: Tensor) -> Tensor:
    """Rank experts outside the best groups last. ranked [T, E]."""
    groups = ranked.unflatten(-1, (router.groups, -1))
    best = groups.amax(-1) if router.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    used = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(router.groups_used, dim=-1).indices, True)
    return groups.masked_fill(~used.unsqueeze(-1), -torch.inf).flatten(-2)
