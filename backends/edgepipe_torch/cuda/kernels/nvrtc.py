"""Compile CUDA C++ with NVRTC, NVIDIA's compiler as a library, which torch's wheels bring. No GPU is needed for it.

Functions and their arguments: NVRTC documentation, "User Interface".
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from edgepipe_torch.layers.compiled_code import KernelsUnavailable


class Nvrtc:
    """A loaded NVRTC library."""

    def __init__(self, library: Any, path: str) -> None:
        self._library = library
        self.path = path
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"
        count = ctypes.c_int()
        self._check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        architectures = (ctypes.c_int * count.value)()
        self._check(library.nvrtcGetSupportedArchs(architectures))
        self.architectures = tuple(architectures)  # such as 90 for sm_90

    def compile(self, source: str, *, architecture: int, options: Sequence[str]) -> bytes:
        """Return a cubin: of an older minor architecture, which a newer one runs, too, if the compiler knows no newer.

        Raises KernelsUnavailable with the compiler's log.
        """
        known = [each for each in self.architectures if each // 10 == architecture // 10 and each <= architecture]
        if not known:
            raise KernelsUnavailable(f"NVRTC {self.version} does not compile for sm_{architecture}")
        library = self._library
        program = ctypes.c_void_p()
        self._check(
            library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"packed.cu", 0, None, None),
        )
        try:
            arguments = [f"--gpu-architecture=sm_{max(known)}", "--std=c++17", *options]
            given = (ctypes.c_char_p * len(arguments))(*[argument.encode() for argument in arguments])
            if library.nvrtcCompileProgram(program, len(arguments), given):
                raise KernelsUnavailable(f"NVRTC {self.version} refused the kernels: {self._log(program)}")
            size = ctypes.c_size_t()
            self._check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            cubin = ctypes.create_string_buffer(size.value)
            self._check(library.nvrtcGetCUBIN(program, cubin))
            return cubin.raw
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(1, size.value))
        self._library.nvrtcGetProgramLog(program, log)
        return log.value.decode(errors="replace").strip()

    def _check(self, result: int) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise KernelsUnavailable(f"NVRTC: {self._library.nvrtcGetErrorString(result).decode()}")


@cache
def find_nvrtc(major: int | None, torch_folder: Path | None = None) -> Nvrtc:
    """Load the NVRTC of a CUDA version (None: any) from where torch and NVIDIA's wheels put it, or from the system.

    Raises KernelsUnavailable.
    """
    majors = (13, 12) if major is None else (major,)
    for name in _candidates(majors, torch_folder):
        try:
            _load_builtins(Path(name))
            return Nvrtc(ctypes.CDLL(name), name)
        except (OSError, AttributeError):
            continue
    package = "nvidia-cuda-nvrtc-cu12" if majors[0] == 12 else "nvidia-cuda-nvrtc"
    raise KernelsUnavailable("NVRTC, which compiles the CUDA kernels, was not found", remedy=f"pip install {package}")


def _load_builtins(nvrtc: Path) -> None:
    """Load what NVRTC opens by name when it compiles. The loader does not look for it beside NVRTC 13's library.

    ``nvrtc``: a file, or a name that the loader looks up, as it then does for the other.
    """
    if nvrtc.is_absolute():
        for file in sorted(nvrtc.parent.glob("*nvrtc-builtins*")):
            ctypes.CDLL(str(file))


def _candidates(majors: Sequence[int], torch_folder: Path | None) -> Iterator[str]:
    windows = sys.platform == "win32"
    for major in majors:
        name = f"nvrtc64_{major}0_0.dll" if windows else f"libnvrtc.so.{major}"
        for folder in (torch_folder, *_wheel_folders()):
            if folder is not None and (folder / name).is_file():
                yield str(folder / name)
        yield name


def _wheel_folders() -> Iterator[Path]:
    """Return the folders of libraries in NVIDIA's wheels: nvidia/<part>/lib on Linux, nvidia/<part>/bin on Windows."""
    found = importlib.util.find_spec("nvidia")
    for root in (found.submodule_search_locations or ()) if found else ():
        for pattern in ("*/lib", "*/bin", "*/bin/x86_64"):
            yield from sorted(Path(root).glob(pattern))
