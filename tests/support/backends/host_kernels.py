"""The CUDA kernels compiled for this machine's CPU by g++: the same source, run block by block."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgepipe_torch.cuda.kernels import forms
from edgepipe_torch.cuda.kernels.forms import (
    EXPERT_FUNCTIONS,
    EXPERT_MACROS,
    FUNCTIONS,
    PAGED_FILES,
    PAGED_FUNCTIONS,
    PLACE_FILES,
    PLACE_FUNCTIONS,
    PRODUCT_FILES,
    ROUTING_FILES,
    ROUTING_FUNCTIONS,
    KernelForm,
    expert_files,
)
from edgepipe_torch.cuda.kernels.paged_decode import PagedForm
from edgepipe_torch.cuda.kernels.recurrent_step import StepForm

from tests.support.backends.host_compiler import HostCompiler

_WRAPPER = """
extern "C" int part_{index}_{name}(unsigned blocks, unsigned threads, unsigned shared_bytes, void **arguments) {{
    return host::launch(blocks, threads, shared_bytes, [=] {{ host::call(part_{index}::{name}, arguments); }});
}}
"""

_CALL = """
#include <utility>
namespace host {
template <typename... Arguments, size_t... Places>
void call_with(void (*kernel)(Arguments...), void **given, std::index_sequence<Places...>) {
    kernel(*static_cast<Arguments *>(given[Places])...);
}
template <typename... Arguments>
void call(void (*kernel)(Arguments...), void **given) {
    call_with(kernel, given, std::index_sequence_for<Arguments...>());
}
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Kernels that are compiled as one module."""

    files: tuple[str, ...]
    macros: Mapping[str, str]
    functions: Sequence[str]


class HostModule:
    """Kernels of one part; see ``edgepipe_torch.cuda.kernels.driver.Module``."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library = library
        self._index = index

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        run = getattr(self._library, f"part_{self._index}_{function}")
        if run(blocks, 256, shared_bytes, addresses):
            raise RuntimeError(f"threads of {function} diverge")


def products_part(form: KernelForm) -> Part:
    """Products of a form."""
    return Part(files=PRODUCT_FILES, macros=form.macros, functions=FUNCTIONS)


def experts_part(form: KernelForm) -> Part:
    """Products with experts of a form."""
    return Part(files=expert_files(form), macros=form.macros | EXPERT_MACROS, functions=EXPERT_FUNCTIONS)


def paged_part(form: PagedForm) -> Part:
    """Attention over pages."""
    return Part(files=PAGED_FILES, macros=form.macros, functions=PAGED_FUNCTIONS)


def step_part(form: StepForm) -> Part:
    """One token of recurrent layers."""
    return Part(files=form.files, macros=form.macros, functions=form.functions)


PLACE = Part(files=PLACE_FILES, macros={}, functions=PLACE_FUNCTIONS)
ROUTING = Part(files=ROUTING_FILES, macros={}, functions=ROUTING_FUNCTIONS)


SOURCES = Path(forms.__file__).parent


def compile_for_host(parts: Sequence[Part], folder: Path, sources: Path = SOURCES) -> list[HostModule]:
    """Compile all parts, by two compilers at once."""
    header = (Path(__file__).parent / "cuda_on_host.hpp").read_text(encoding="utf-8")
    compiler = HostCompiler(f"{header}\n{_CALL}")
    texts = {"even": _source(parts[::2], sources), "odd": _source(parts[1::2], sources)}
    with ThreadPoolExecutor(2) as threads:
        loaded = list(threads.map(lambda name: compiler.library(texts[name], folder / f"{name}.so"), texts))
    return [HostModule(loaded[index % 2], index // 2) for index in range(len(parts))]


def _source(parts: Sequence[Part], sources: Path) -> str:
    """Return C++ with the kernels of each part in a namespace, and a function to launch each."""
    lines: list[str] = []
    for index, part in enumerate(parts):
        texts = "\n".join((sources / name).read_text(encoding="utf-8") for name in part.files)
        lines += [f"#define {name} {value}" for name, value in part.macros.items()]
        lines += [f"namespace part_{index} {{", texts, "}"]
        own = {line.split()[1].split("(")[0] for line in texts.splitlines() if line.startswith("#define")}
        lines += [f"#undef {name}" for name in sorted(own | set(part.macros))]
        lines += [_WRAPPER.format(index=index, name=name) for name in part.functions]
    return "\n".join(lines)
