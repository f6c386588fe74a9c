"""The CUDA kernels compiled for this machine's CPU by g++: the same source, run block by block."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgepipe_torch.cuda_kernels import forms
from edgepipe_torch.cuda_kernels.forms import FUNCTIONS, KernelForm

COMPILER = shutil.which("g++")

_WRAPPER = """
extern "C" int form_{index}_{name}(unsigned blocks, unsigned threads, unsigned shared_bytes, void **arguments) {{
    return host::launch(blocks, threads, shared_bytes, [=] {{ host::call(form_{index}::{name}, arguments); }});
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


class HostModule:
    """Kernels of one form; see ``edgepipe_torch.cuda_kernels.driver.Module``."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library = library
        self._index = index

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        run = getattr(self._library, f"form_{self._index}_{function}")
        if run(blocks, 256, shared_bytes, addresses):
            raise RuntimeError(f"threads of {function} diverge")


def compile_for_host(kinds: Sequence[KernelForm], folder: Path) -> dict[KernelForm, HostModule]:
    """Compile the kernels of all forms, by two compilers at once."""
    assert COMPILER is not None
    source = (Path(forms.__file__).parent / "packed.cu").read_text(encoding="utf-8")
    (folder / "kernels.hpp").write_text(source, encoding="utf-8")
    command = [COMPILER, "-std=c++17", "-O0", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", "-o"]
    compiling: list[tuple[Sequence[KernelForm], Path, subprocess.Popen[bytes]]] = []
    for name, part in (("even", kinds[::2]), ("odd", kinds[1::2])):
        (folder / f"{name}.cpp").write_text(_source(part, source), encoding="utf-8")
        library = folder / f"{name}.so"
        compiling.append((part, library, subprocess.Popen([*command, str(library), f"{name}.cpp"], cwd=folder)))
    found: dict[KernelForm, HostModule] = {}
    for part, library, compiler in compiling:
        if compiler.wait(timeout=100):
            raise RuntimeError(f"{COMPILER} cannot compile {library.stem}.cpp")
        loaded = ctypes.CDLL(str(library))
        found.update({kind: HostModule(loaded, index) for index, kind in enumerate(part)})
    return found


def _source(kinds: Sequence[KernelForm], kernels: str) -> str:
    """Return C++ with the kernels of each form in a namespace, and a function to launch each."""
    macros = sorted({line.split()[1].split("(")[0] for line in kernels.splitlines() if line.startswith("#define")})
    parts = [(Path(__file__).parent / "cuda_on_host.hpp").read_text(encoding="utf-8"), _CALL]
    for index, kind in enumerate(kinds):
        given = [f"#define {name} {value}" for name, value in kind.macros.items()]
        parts += [*given, f"namespace form_{index} {{", '#include "kernels.hpp"', "}"]
        parts += [f"#undef {name}" for name in (*macros, *kind.macros)]
        parts += [_WRAPPER.format(index=index, name=name) for name in FUNCTIONS]
    return "\n".join(parts)
