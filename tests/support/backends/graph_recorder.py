"""Graphs on a CPU that behave as CUDA graphs do: recorded operations at fixed addresses.

- Recording changes nothing: results appear with the first replay.
- A replay reads and writes the memory that was recorded. A graph keeps only its own memory alive. A replay fails if
  other memory that it uses was freed since.
- Values that Python read while it recorded, such as a maximum length, stay as they were.
- Graphs of a recorder share their memory: a replay of one overwrites what the others computed, here with NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_ALL_ONES = 255  # NaN in every float type, -1 in every integer type


class CpuRecorder:
    """Records graphs of CPU operations. See ``edgepipe_torch.cuda.paging.GraphRecorder``."""

    def __init__(self) -> None:
        self.graphs: list[CpuGraph] = []

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, CpuGraph]:
        """Record ``compute``; whatever it changed is as before."""
        recording = _Recording()
        try:
            with recording:
                result = compute()
        finally:
            recording.undo()
        graph = CpuGraph(recording.calls, recording.own, result, self.graphs)
        graph.spoil()
        self.graphs.append(graph)
        return result, graph


class CpuGraph:
    """Operations at fixed addresses."""

    def __init__(
        self, calls: list[_Call], own: dict[int, torch.UntypedStorage], result: Tensor, siblings: list[CpuGraph]
    ) -> None:
        self.result = result
        self.num_replays = 0
        self._calls = calls
        self._own = own
        self._siblings = siblings

    def replay(self) -> None:
        """Run the operations again, after NaN has overwritten the memory of the recorder's other graphs."""
        self.num_replays += 1
        for sibling in self._siblings:
            sibling.spoil()
        for call in self._calls:
            call.repeat()

    def spoil(self) -> None:
        """Overwrite the graph's own memory with NaN."""
        for storage in self._own.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_ALL_ONES)


@dataclass(frozen=True, slots=True)
class _Outside:
    """A tensor in memory that the graph does not own."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "a replay uses memory that was freed after the recording"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    operation: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[Tensor | None]  # None where the result is a view of memory outside

    def repeat(self) -> None:
        positional, named = tree_map_only(_Outside, lambda outside: outside.tensor(), self.arguments)
        for old, new in zip(self.results, _tensors(self.operation(*positional, **named)), strict=True):
            if old is not None and _key(old) != _key(new):
                old.copy_(new)


class _Recording(TorchDispatchMode):
    """Runs operations and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.own: dict[int, torch.UntypedStorage] = {}  # memory allocated during the recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # changed memory, old content

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping would import the compiler: four seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for the device"
        for declared, given in zip(func._schema.arguments, args, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                self._keep(given)
        known = {_key(tensor) for tensor in _tensors((args, named))}
        arguments = tree_map_only(Tensor, self._held, (args, named))
        found = func(*args, **named)
        for tensor in _tensors(found):
            if _key(tensor) not in known:
                self.own[_key(tensor)] = tensor.untyped_storage()
        results = [tensor if _key(tensor) in self.own else None for tensor in _tensors(found)]
        self.calls.append(_Call(func, arguments, results))
        return found

    def undo(self) -> None:
        """Restore the memory outside."""
        for storage, content in self._before.values():
            storage.copy_(content)

    def _keep(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key not in self.own and key not in self._before:
            self._before[key] = (tensor.untyped_storage(), tensor.untyped_storage().clone())

    def _held(self, tensor: Tensor) -> Tensor | _Outside:
        if _key(tensor) in self.own:
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        return _Outside(storage, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
