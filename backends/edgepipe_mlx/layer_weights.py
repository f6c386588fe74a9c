"""Weights of a layer as its parts take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.spec import layer_spec
from edgepipe_mlx.experts import ExpertLinear, JoinedExperts, StackedRows, WideStack
from edgepipe_mlx.joined import JoinedLinear
from edgepipe_mlx.matrices import JoiningMatrix, Linear, WideMatrix

Weight = WideMatrix | JoiningMatrix | WideStack
"""Vectors are wide. Matrices of experts are a WideStack or a StackedRows."""


def norm_of(spec: layer_spec.Norm) -> Callable[[mx.array, mx.array], mx.array]:
    """Return the function that normalises the last axis of x [..., n] and multiplies it by a weight [n].

    Raises ArchitectureUnsupported for a kind of norm that this backend does not compute.
    """
    match spec.kind:
        case "rms":
            return lambda x, weight: mx.fast.rms_norm(x, weight, spec.eps)
        case "layer":
            return lambda x, weight: mx.fast.layer_norm(x, weight, None, spec.eps)
        case unknown:
            raise ArchitectureUnsupported(
                f"the mlx backend does not compute norms of the kind '{unknown}'", fact="it computes rms and layer"
            )


class Norm:
    """A norm of the last dimension, of the kind that the model has."""

    def __init__(self, weight: mx.array, spec: layer_spec.Norm) -> None:
        """``weight``: as it multiplies, one added where the files hold it minus one."""
        self._weight = weight
        self._compute = norm_of(spec)

    def rows(self, x: mx.array) -> mx.array:
        """Return x [..., n] normalised."""
        return self._compute(x, self._weight)


class LayerWeights:
    """Weights of one layer, by their names within it. It forgets those that it joined."""

    def __init__(self, weights: Mapping[str, Weight], norm: layer_spec.Norm) -> None:
        self._weights = dict(weights)
        self._norm = norm

    @property
    def norm_eps(self) -> float:
        """The epsilon of the model's norms."""
        return self._norm.eps

    def vector(self, name: str) -> mx.array:
        """Return the values of a weight of floats."""
        weight = self._weights[name]
        assert isinstance(weight, WideMatrix)
        return weight.array

    def norm(self, module: str) -> Norm:
        """Return a norm."""
        return Norm(self.vector(f"{module}.weight"), self._norm)

    def matrix(self, name: str) -> WideMatrix | JoiningMatrix:
        """Return a matrix."""
        weight = self._weights[name]
        assert not isinstance(weight, WideStack)
        return weight

    def linear(self, module: str) -> Linear:
        """Return a projection, with a bias if the layer has one."""
        return Linear(self.matrix(f"{module}.weight"), self.bias(module))

    def joined(self, modules: Sequence[str], *, together: int = 1, activated: bool = False) -> JoinedLinear:
        """Return projections of one input; see ``JoinedLinear``."""
        parts = [self.linear(module) for module in modules]
        found = JoinedLinear(parts, together=together, activated=activated)
        self._forget(modules)
        return found

    def joined_experts(self, modules: Sequence[str], count: int) -> JoinedExperts:
        """Return projections of one input, of ``count`` experts each."""
        found = JoinedExperts([self.experts(module, count) for module in modules])
        self._forget(modules)
        return found

    def _forget(self, modules: Sequence[str]) -> None:
        for module in modules:
            del self._weights[f"{module}.weight"]

    def experts(self, module: str, count: int) -> ExpertLinear:
        """Return the projections of ``count`` experts, with biases if the layer has them."""
        stack, bias = self._weights[f"{module}.weight"], self.bias(module)
        assert isinstance(stack, WideStack | StackedRows)
        return ExpertLinear(stack, None if bias is None else bias.reshape(count, -1))

    def bias(self, module: str) -> mx.array | None:
        """Return a bias, if the layer has one."""
        name = f"{module}.bias"
        return self.vector(name) if name in self._weights else None
