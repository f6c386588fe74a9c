"""Count the kernels of a step on Metal from MLX's graph, without a Mac: built as for Metal, and not run."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from edgepipe_mlx import MlxBackend, backend, own_kernels
from edgepipe_mlx.backend import StepTicket
from edgepipe_mlx.blocks.kernels import MetalKernels
from edgepipe_mlx.pages.kernels import MetalPages
from edgepipe_mlx.picks import picking
from edgepipe_mlx.picks.kernels import MetalPicks

from edgepipe.backend.types import BackendOptions, SlowPath

_VIEWS = {
    *("Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze"),
    *("StopGradient", "Transpose", "Unflatten", "View"),
}
"""Primitives that launch nothing on Metal. A reshape of rows that do not adjoin would copy; it is not seen here."""
_NODE = re.compile(r"{ (\d+) \[label =\"(\w+)\", shape=rectangle\]; }")


_NOTHING = SlowPath(what="", cost="", reason="")


class CountedBackend(MlxBackend):
    """Counts the kernels of each step instead of computing it."""

    kernels: Counter[str]

    def _start(self, ticket: StepTicket, updated: list[mx.array]) -> None:
        self.kernels = _kernels([ticket.array, *updated])
        self._started = ticket


def _metal_kernel(**_given: Any) -> Callable[..., list[mx.array]]:
    """Stand in for a kernel of our own: one operation, which depends on all inputs. Views give it its type."""

    def run(*, inputs: Sequence[mx.array], output_shapes: Any, output_dtypes: Any, **_named: Any) -> list[mx.array]:
        first = inputs[0].reshape(-1)[: mx.float32.size].view(output_dtypes[0])[:1]
        rows = mx.broadcast_to(mx.depends([first], list(inputs[1:]))[0], output_shapes[0])
        return [mx.cumprod(rows, axis=-1)]

    return run


@contextmanager
def counted_backend(options: BackendOptions, *, own: bool = True) -> Iterator[CountedBackend]:
    """Yield a backend that keeps weights as on Metal. ``own``: with own kernels.

    On a CPU, MLX computes norms, rotations and attention by many operations. Here one stands for each, which nothing
    else uses, and which MLX fuses with no other, as on Metal.
    """

    def stands(operation: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda x, *_given, **_named: operation(x, axis=-1)

    with pytest.MonkeyPatch.context() as patch:
        for module in (backend, own_kernels):
            patch.setattr(module, "is_cpu", lambda _device: False)
        patch.setattr(mx.fast, "metal_kernel", _metal_kernel)
        patch.setattr(own_kernels, "checked_kernels", lambda _dtype: MetalKernels() if own else _NOTHING)
        patch.setattr(own_kernels, "checked_pages", lambda _forms: MetalPages() if own else _NOTHING)
        patch.setattr(picking, "checked_picks", lambda _vocabulary: MetalPicks() if own else _NOTHING)
        patch.setattr(mx.fast, "rms_norm", stands(mx.sort))
        patch.setattr(mx.fast, "rope", stands(mx.cumsum))
        patch.setattr(mx.fast, "scaled_dot_product_attention", stands(mx.cummax))
        made = CountedBackend(options)
        patch.setattr(backend, "configure", lambda _device: mx.set_default_device(mx.Device(mx.cpu)))
        mx.enable_compile()  # compiles no CPU code: nothing is evaluated
        try:
            yield made
        finally:
            mx.disable_compile()


def _kernels(results: list[mx.array]) -> Counter[str]:
    """Count the primitives on which results depend, each once. Arrays that are joined are copied one by one."""
    text = io.StringIO()
    mx.export_to_dot(text, *results)
    nodes: list[tuple[str, str]] = _NODE.findall(text.getvalue())  # calls of one compiled function have one number
    found = Counter(name for _, name in nodes if name not in _VIEWS and name != "Concatenate")
    joins = {node for node, name in nodes if name == "Concatenate"}
    return found + Counter({"Concatenate": sum(text.getvalue().count(f"-> {node}\n") for node in joins)})
