"""Mixtures of experts: the router, and products of each row with the matrices of its experts.

T rows, H hidden, E experts, K of them used by each row, O out features, I inputs of a matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Protocol

import mlx.core as mx
import numpy as np

from edgepipe.spec.layer_spec import Experts, Router
from edgepipe_mlx.feed_forward import FeedForward, Product
from edgepipe_mlx.layer_graphs import MOST_ROWS
from edgepipe_mlx.matrices import JoiningMatrix, Linear, Matrix, PackedMatrix
from edgepipe_mlx.packing import MlxWeight

_SORTED_AT = 64
"""Products in a step from which rows are sorted by expert, so that Metal's kernels read a matrix once for its rows.

Below, the kernels that sort cost more. mlx-lm has the same number.
"""

_FUSED_EXPERTS = 8  # one fused kernel adds the outputs of so many: MLX gives such a kernel at most 24 arrays


class Stack(Protocol):
    """The matrices [O, I] of E experts, one below the other."""

    sorted_from: int  # products in a step from which it takes rows sorted by expert

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        ...

    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """Return ``x @ weight[expert].T`` for the expert of each row.

        x          [..., 1, I] in the compute dtype; its leading dimensions broadcast to those of ``experts``
        experts    [...] uint32
        is_sorted  ``experts`` [N] ascend
        returns    [..., 1, O] in the compute dtype
        """
        ...


class WideStack:
    """A stack of floats."""

    sorted_from = _SORTED_AT

    def __init__(self, weight: mx.array, *, in_float32: bool) -> None:
        """weight [E, O, I]. ``in_float32``: multiply in float32.

        MLX's CPU device multiplies gathered matrices in float32 only. A bf16 stack is widened for each product there.
        """
        self._weight = weight
        self._type = mx.float32 if in_float32 else weight.dtype

    @property
    def num_bytes(self) -> int:
        """See ``Stack``."""
        return self._weight.nbytes

    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """See ``Stack``."""
        matrices = self._weight.astype(self._type).swapaxes(-1, -2)
        rows = x.astype(self._type)
        return mx.gather_mm(rows, matrices, rhs_indices=experts, sorted_indices=is_sorted).astype(x.dtype)


class StackedRows(JoiningMatrix):
    """A packed weight [E * O, I], which is also a stack."""

    sorted_from = _SORTED_AT
    _count: int  # E

    def joins(self, other: JoiningMatrix) -> bool:
        """Return whether one kernel can multiply with these matrices and others, of as many rows."""
        return super().joins(other) and self.out_features == other.out_features

    @abstractmethod
    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """See ``Stack``."""

    @abstractmethod
    def parts_by(self, x: mx.array, experts: mx.array, parts: int, *, is_sorted: bool) -> list[mx.array]:
        """Return what ``multiply_by`` does in so many parts of equal size."""

    def _places(self, array: mx.array) -> mx.array:
        """Return an array of all experts as [E, O, n]."""
        return self._each(array)

    def _each(self, array: mx.array) -> mx.array:
        """Return an array of all experts as a view [E, O, ...]."""
        return array.reshape(self._count, -1, array.shape[-1])


class PackedStack(StackedRows, PackedMatrix):
    """A stack that MLX's kernels unpack as they multiply."""

    def __init__(self, planes: MlxWeight, *, count: int, dtype: mx.Dtype, in_float32: bool) -> None:
        """``count``: experts. See ``PackedMatrix``."""
        super().__init__(planes, dtype=dtype, in_float32=in_float32)
        self._count = count
        self._row_numbers: dict[tuple[int, ...], mx.array] = {}  # numbers of few rows, by their leading dimensions

    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """See ``Stack``."""
        return self._leaving(self._product_by(x, experts, is_sorted=is_sorted))

    def parts_by(self, x: mx.array, experts: mx.array, parts: int, *, is_sorted: bool) -> list[mx.array]:
        """See ``StackedRows``."""
        products = mx.split(self._product_by(x, experts, is_sorted=is_sorted), parts, axis=-1)
        return [self._leaving(product) for product in products]

    def _product_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        return mx.gather_qmm(
            self._entering(x),
            self._each(self._words),
            self._each(self._scales),
            None if self._biases is None else self._each(self._biases),
            lhs_indices=self._numbers(x.shape[:-2]),
            rhs_indices=experts,
            group_size=self._form.group,
            bits=self._form.bits,
            mode=self._form.mode,
            sorted_indices=is_sorted,
        )

    def _numbers(self, shape: tuple[int, ...]) -> mx.array | None:
        """Return the numbers of rows with these leading dimensions; None: MLX makes them, by a kernel in each call."""
        if prod(shape) >= _SORTED_AT:
            return None
        if shape not in self._row_numbers:
            self._row_numbers[shape] = mx.array(np.arange(prod(shape), dtype=np.uint32).reshape(shape))
        return self._row_numbers[shape]


class ExpertLinear:
    """The projections of all experts: a stack, and biases [E, O]."""

    def __init__(self, stack: Stack, bias: mx.array | None) -> None:
        self.stack = stack
        self.bias = bias

    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """See ``Stack``."""
        return _biased(self.stack.multiply_by(x, experts, is_sorted=is_sorted), self.bias, experts)


class JoinedExperts:
    """Gate and up projections of all experts, or ups alone: one kernel where their weights are of one kind."""

    def __init__(self, parts: Sequence[ExpertLinear]) -> None:
        """Evaluates a joined stack."""
        self._biases = [part.bias for part in parts]
        self._stacks: Sequence[Stack] = [part.stack for part in parts]
        self._joined: StackedRows | None = None
        packed = [stack for stack in self._stacks if isinstance(stack, StackedRows)]
        self.sorted_from = min(stack.sorted_from for stack in self._stacks)
        if len(packed) == len(parts) > 1 and all(packed[0].joins(other) for other in packed[1:]):
            self._joined, self._stacks = type(packed[0]).joined(packed), ()

    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> list[mx.array]:
        """Return each part's product [..., 1, O]. See ``Stack``."""
        if self._joined is None:
            products = [stack.multiply_by(x, experts, is_sorted=is_sorted) for stack in self._stacks]
        else:
            products = self._joined.parts_by(x, experts, len(self._biases), is_sorted=is_sorted)
        return [_biased(product, bias, experts) for product, bias in zip(products, self._biases, strict=True)]


def _biased(product: mx.array, bias: mx.array | None, experts: mx.array) -> mx.array:
    """Return a product [..., 1, O] with its experts' biases."""
    return product if bias is None else product + bias[experts][..., None, :]


class RouterWeights:
    """The router's weights, in float32 whatever the compute dtype."""

    def __init__(
        self,
        scores: Linear,
        correction: mx.array | None,
        input_scale: mx.array | None = None,
        expert_scale: mx.array | None = None,
    ) -> None:
        """``scores`` [E, H]; ``correction`` [E], ``input_scale`` [H], ``expert_scale`` [E]."""
        self.scores = scores
        self.correction = correction
        self.input_scale = input_scale
        self.expert_scale = expert_scale


class SharedExpert:
    """The part that every row uses, times a sigmoid of a learned product if it has a gate."""

    def __init__(self, part: FeedForward, gate: Matrix | None) -> None:
        """``gate`` [1, H]."""
        self._part = part
        self._gate = gate

    def rows(self, x: mx.array) -> mx.array:
        """See ``FeedForward``."""
        added = self._part.rows(x)
        return added if self._gate is None else added * mx.sigmoid(self._gate.multiply(x))


class Mixture:
    """Experts, of which each row uses K, by the router's choice."""

    def __init__(
        self,
        spec: Experts,
        router: RouterWeights,
        gate_up: JoinedExperts,
        down: ExpertLinear,
        activation: Product,
        around: tuple[Linear, Linear] | None = None,
    ) -> None:
        """``around``: products from H features to those of the experts, and back."""
        self.spec = spec
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._around = around
        self._sorted_from = min(gate_up.sorted_from, down.stack.sorted_from)
        self.chosen: mx.array | None = None  # [T, K] uint32: experts of the last call's rows, until they are counted

    def rows(self, x: mx.array, asked: mx.array | None = None) -> mx.array:
        """See ``FeedForward``. A row's experts are added in float32.

        asked [T, H]: what the router reads, where that is not x
        """
        chosen, factors = route(self.spec, self._router, x if asked is None else asked)
        self.chosen = chosen
        if self._around is not None:
            x = self._around[0].multiply(x)
        if chosen.size < self._sorted_from:
            outputs = self._experts(x[:, None, None], chosen, is_sorted=False)  # [T, K, 1, H]
        else:
            experts = chosen.flatten()
            order = mx.argsort(experts)
            rows = x[order // self.spec.used][:, None]
            outputs = self._experts(rows, experts[order], is_sorted=True)[mx.argsort(order)]
            outputs = outputs.reshape(*chosen.shape, 1, -1)
        mixed = _mixed(outputs, factors).astype(x.dtype)
        return mixed if self._around is None else self._around[1].multiply(mixed)

    def _experts(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """Return the outputs [..., 1, H] of an expert for each row of x. See ``Stack``."""
        entering = self._gate_up.multiply_by(x, experts, is_sorted=is_sorted)
        inner = self._activation(entering[0], entering[-1])
        return self._down.multiply_by(inner, experts, is_sorted=is_sorted)


def _mixed(outputs: mx.array, factors: mx.array) -> mx.array:
    """Return the sum [T, H] of outputs [T, K, 1, H] of the experts, times factors [T, K], in float32.

    MLX fuses products and sums of few rows with what comes behind them, and no sum over an axis.
    """
    rows, used = factors.shape
    if rows > MOST_ROWS or used > _FUSED_EXPERTS:
        return (outputs * factors[..., None, None]).sum(axis=1).squeeze(1)
    terms = [outputs[:, index, 0] * factors[:, index, None] for index in range(used)]
    while len(terms) > 1:
        pairs = [one + other for one, other in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


def route(spec: Experts, router: RouterWeights, x: mx.array) -> tuple[mx.array, mx.array]:
    """Choose each row's experts, in float32: their numbers [T, K] uint32 and weights [T, K], of x [T, H]."""
    how = spec.router
    x = x.astype(mx.float32)
    if how.input_eps is not None:
        x = mx.fast.rms_norm(x, router.input_scale, how.input_eps) * x.shape[-1] ** -0.5
    logits = router.scores.multiply(x)
    if how.score == "softmax" and how.normalised and router.correction is None and how.groups_used == how.groups:
        chosen = _highest(logits, spec.used)  # their shares of a softmax over all are one over these
        weights = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)
        return chosen, _scaled(weights, chosen, how, router)
    scores = mx.softmax(logits, axis=-1) if how.score == "softmax" else mx.sigmoid(logits)
    ranked = scores if router.correction is None else scores + router.correction
    if how.groups_used < how.groups:
        ranked = _within_groups(how, ranked)
    chosen = _highest(ranked, spec.used)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if how.normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return chosen, _scaled(weights, chosen, how, router)


def _scaled(weights: mx.array, chosen: mx.array, how: Router, router: RouterWeights) -> mx.array:
    """Return the weights [T, K] of chosen experts, scaled."""
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[chosen]
    return weights if how.scale == 1 else weights * how.scale


def _within_groups(router: Router, ranked: mx.array) -> mx.array:
    """Rank experts outside the best groups last. ranked [T, E]."""
    groups = ranked.reshape(ranked.shape[0], router.groups, -1)
    best = groups.max(axis=-1) if router.group_score == "max" else mx.topk(groups, 2, axis=-1).sum(axis=-1)
    others = _highest(-best, router.groups - router.groups_used)
    return mx.put_along_axis(groups, others[..., None], mx.array(-mx.inf), axis=-2).reshape(ranked.shape)


def _highest(values: mx.array, count: int) -> mx.array:
    """Return the places [..., count] of the highest values [..., n], in an order that depends on these alone."""
    return mx.argpartition(values, -count, axis=-1)[..., -count:]
