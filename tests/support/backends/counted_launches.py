"""Count what a step launches on CUDA, without a GPU: calls of own kernels, and torch's operations.

Own kernels are not run, since sizes alone decide their launches. Tensors lie on the CPU. An operation of torch that
writes memory counts as one launch; views and empty tensors count as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from edgepipe_torch.cuda.kernels.experts import ExpertKernels, RoutingKernels
from edgepipe_torch.cuda.kernels.forms import KernelForm
from edgepipe_torch.cuda.kernels.paged_decode import PagedDecode, paged_form
from edgepipe_torch.cuda.kernels.place_heads import PlaceHeads
from edgepipe_torch.cuda.kernels.products import Products
from edgepipe_torch.cuda.kernels.recurrent_step import MixerStep, step_form
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.recurrent import Mixer, StepKernel
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MULTIPROCESSORS = 128  # an RTX 4090 has so many
_FUSED = {F.rms_norm: "rms_norm"}  # one kernel on CUDA from torch 2.9 on, several operations on a CPU


class Launches:
    """Launches by kernel or operation."""

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()
        self._within = False  # an operation that counts as a whole is running

    @property
    def total(self) -> int:
        """All launches."""
        return self.by_name.total()

    def add(self, name: str) -> None:
        """Count one launch."""
        if not self._within:
            self.by_name[name] += 1

    def whole(self, name: str, call: Any, *given: Any, **named: Any) -> Any:
        """Count a call as one launch, whatever it does."""
        self.add(name)
        outer, self._within = self._within, True
        try:
            return call(*given, **named)
        finally:
            self._within = outer


class CountedModule:
    """Kernels that count their launches instead of running."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        assert blocks > 0
        self._launches.add(function)


class CountedKernels:
    """Own kernels of every form. See ``edgepipe_torch.cuda.device.OwnKernels``."""

    def __init__(self, launches: Launches) -> None:
        self._module = CountedModule(launches)

    def products(self, form: KernelForm) -> Products:
        return Products(self._module, form, multiprocessors=_MULTIPROCESSORS)

    def experts(self, form: KernelForm) -> ExpertKernels:
        return ExpertKernels(self._module, form, multiprocessors=_MULTIPROCESSORS)

    def routing(self) -> RoutingKernels:
        return RoutingKernels(self._module)

    def place_heads(self, kv: str = "") -> PlaceHeads:
        return PlaceHeads(self._module)

    def decode(self, heads: LayerHeads, kv: str = "") -> PagedDecode:
        """Return attention over pages of a layer, with KV of a form; empty: in bf16."""
        return PagedDecode(self._module, paged_form(heads, kv), multiprocessors=_MULTIPROCESSORS)

    def mixer_step(self, mixer: Mixer, dtype: torch.dtype) -> StepKernel:
        """Return the kernel of a recurrent layer."""
        return MixerStep(self._module, step_form(mixer.spec, dtype)).of(mixer)


class CountedOperations(TorchFunctionMode):
    """Counts the launches of torch's operations while it is active."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches
        self._dispatched = _Dispatched(launches)

    def __enter__(self) -> CountedOperations:
        self._dispatched.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        self._dispatched.__exit__(*given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _FUSED.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        return self._launches.whole(name, func, *args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping would import the compiler: four seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for the device"
        found = func(*args, **named)
        name = func._schema.name.removeprefix("aten::")
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        known = {_memory(each) for each in tree_leaves((args, named)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor) and _memory(each) not in known]
        if (writes or made) and not name.startswith(("empty", "new_empty")):
            self._launches.add(name)
        return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
