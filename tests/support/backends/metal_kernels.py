"""Metal kernels compiled for this machine's CPU by g++: the same source, run threadgroup by threadgroup.

``HostKernels.make`` stands in for ``mx.fast.metal_kernel``: it writes the function around a source as MLX does.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from edgepipe_mlx.blocks.kernels import TILES

from tests.support.backends.host_compiler import HostCompiler

_CONSTANT = 8  # MLX gives smaller inputs in the constant address space
_MOST_THREADS = 1024  # threads of a threadgroup
_GUARD = 1 << 16  # bytes around each array; floats of them are no numbers
_FILL = 0xFF
_THREADGROUP_BYTES = 32 * 1024  # arrays of a threadgroup; a chip has no more
_TYPES = {
    mx.uint8: "uint8_t",
    mx.int8: "int8_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

_LAUNCH = """
extern "C" int launch_{symbol}(const uint *sizes, void **given) {{
    const uint3 grid = {{sizes[0], sizes[1], sizes[2]}}, size = {{sizes[3], sizes[4], sizes[5]}};
    const uint3 groups = host::groups_of(grid, size);
    return host::launch(groups.x * groups.y * groups.z, size.x * size.y * size.z, {shared}, [=] {{
        const uint3 at = host::place_in_grid(groups, size);
        if (at.x < grid.x && at.y < grid.y && at.z < grid.z) kernel<{constants}>({arguments}at);
    }});
}}
"""

_ARRAY = re.compile(r"^threadgroup (\w+) (\w+)\[(.+)\];$", re.MULTILINE)

Template = Sequence[tuple[str, int | mx.Dtype]]


class HostKernels:
    """Compiles kernels and runs them."""

    def __init__(self, folder: Path, change: Callable[[str], str] = lambda text: text) -> None:
        """
        folder  of libraries
        change  applied to headers and sources
        """
        self._folder = folder
        self._change = change
        self._known: dict[str, Any] = {}
        self._by_name: dict[str, str] = {}  # texts, as MLX keeps one of each name
        self.launches = 0

    def make(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Callable[..., list[mx.array]]:
        """See ``mx.fast.metal_kernel``."""
        header, source = self._change(header), self._change(source)

        def run(
            *,
            inputs: Sequence[mx.array],
            template: Template,
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            self.launches += 1
            named = f"{name} {template}"
            assert np.prod(threadgroup) <= _MOST_THREADS
            given: list[_Guarded] = []
            parameters: list[str] = []
            for own, array in zip(input_names, inputs, strict=True):
                space = "constant" if array.size < _CONSTANT else "device"
                assert space == "device" or "IN_CONSTANT" in dict(template), f"{own} would lie in constant memory"
                parameters.append(f"const {space} {_TYPES[array.dtype]} *{own}")
                values = _as_numpy(array, dense=ensure_row_contiguous)
                given.append(_Guarded(values))
                if f"{own}_shape" in source:
                    parameters.append(f"const constant int *{own}_shape")
                    given.append(_Guarded(np.array(array.shape, np.int32)))
                if f"{own}_strides" in source:
                    parameters.append(f"const constant int64_t *{own}_strides")
                    given.append(_Guarded(np.array(values.strides, np.int64) // values.itemsize))
                else:
                    assert values.flags.c_contiguous, f"the kernel takes {own} for dense"
            for own, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True):
                parameters.append(f"device {_TYPES[dtype]} *{own}")
                given.append(_Guarded(np.full((*shape[:-1], shape[-1] * dtype.size), _FILL, np.uint8)))
            text = _text(header, source, template, parameters)
            assert self._by_name.setdefault(named, text) == text, "MLX would compile this kernel again and again"
            library = self._library(text)
            addresses = (ctypes.c_void_p * len(given))(*[each.array.ctypes.data for each in given])
            if getattr(library, f"launch_{_symbol(template)}")((ctypes.c_uint * 6)(*grid, *threadgroup), addresses):
                raise RuntimeError(f"threads of {name} diverge")
            if not all(each.is_whole() for each in given):
                raise RuntimeError(f"{name} writes beside its arrays")
            results = zip(given[-len(output_names) :], output_dtypes, strict=True)
            return [mx.array(each.array).view(dtype) for each, dtype in results]

        return run

    def _library(self, text: str) -> Any:
        if text not in self._known:
            file = self._folder / f"metal_{len(self._known)}.so"
            self._known[text] = _compiler().library(text, file)
        return self._known[text]


class _Guarded:
    """An array with bytes around it that a kernel must not write."""

    def __init__(self, values: np.ndarray) -> None:
        places = sum((size - 1) * stride for size, stride in zip(values.shape, values.strides, strict=True))
        self._bytes = np.full(places + values.itemsize + 2 * _GUARD, _FILL, np.uint8)
        first = self._bytes[_GUARD:-_GUARD].view(values.dtype)
        self.array = np.lib.stride_tricks.as_strided(first, values.shape, values.strides)
        self.array[...] = values

    def is_whole(self) -> bool:
        """Return whether the bytes around are as they were."""
        return bool((self._bytes[:_GUARD] == _FILL).all() and (self._bytes[-_GUARD:] == _FILL).all())


@cache
def _compiler() -> HostCompiler:
    folder = Path(__file__).parent
    texts = ((folder / name).read_text(encoding="utf-8") for name in ("cuda_on_host.hpp", "metal_on_host.hpp"))
    return HostCompiler("\n".join(texts), ("-ffp-contract=off",))


def _text(header: str, source: str, template: Template, parameters: Sequence[str]) -> str:
    """Return C++ with the kernel, and a function to launch it with each size of tiles."""
    types = ", ".join(f"{'int' if isinstance(value, int) else 'typename'} {name}" for name, value in template)
    declared = ", ".join([*parameters, "uint3 thread_position_in_grid"])
    places = enumerate(each.rpartition("*")[0] for each in parameters)
    arguments = "".join(f"static_cast<{kind}*>(given[{index}]), " for index, kind in places)
    launches = [
        _LAUNCH.format(
            symbol=_symbol(each),
            constants=", ".join(str(value) if isinstance(value, int) else _TYPES[value] for _, value in each),
            arguments=arguments,
            shared=_THREADGROUP_BYTES,
        )
        for each in _of_all_tiles(template)
    ]
    kernel = f"template <{types}>\nvoid kernel({declared}) {{\n{_with_shared_arrays(source)}\n}}\n"
    return "\n".join([header, kernel, *launches])


def _with_shared_arrays(source: str) -> str:
    """Give a threadgroup's threads the same arrays, one behind the other."""
    used = "0"
    for kind, name, count in _ARRAY.findall(source):
        place = f"{kind} *const {name} = reinterpret_cast<{kind} *>(host::shared.data() + {used});"
        source = source.replace(f"threadgroup {kind} {name}[{count}];", place)
        used += f" + sizeof({kind}) * ({count})"
    return f"static_assert({used} <= {_THREADGROUP_BYTES});\n{source}"


def _of_all_tiles(template: Template) -> list[Template]:
    if "ROWS" not in dict(template):
        return [template]
    return [
        [(name, {"ROWS": rows, "FEATURES": features}.get(name, value)) for name, value in template]
        for rows, features in TILES.items()
    ]


def _symbol(template: Template) -> str:
    return "_".join(str(value) for _, value in template if isinstance(value, int))


def _as_numpy(array: mx.array, *, dense: bool) -> np.ndarray:
    """Return the array as MLX gives it to a kernel. ``dense``: copied where its rows do not adjoin."""
    whole = mx.contiguous(array) if dense else array
    bits = whole.view(mx.uint16) if array.dtype == mx.bfloat16 else whole
    return np.array(bits, copy=False)
