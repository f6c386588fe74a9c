"""g++ for kernels that tests run on this machine's CPU.

A header that all sources share is compiled once, which halves a compiler's time. Libraries are kept between runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock

from edgepipe_torch.layers.compiled_code import CodeCache

COMPILER = shutil.which("g++")
_FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-w", "-fPIC")
_KEPT = Path("~/.cache/edgepipe-test-kernels").expanduser()
_MOST_KEPT = {"*.so": 1000, "*.gch": 4, "*.hpp": 50}  # of some 40 KB, 40 MB and 20 KB
_DEADLINE_S = 600  # of a busy machine


class HostCompiler:
    """Compiles sources that begin with the same header."""

    def __init__(self, header: str, flags: Sequence[str] = ()) -> None:
        """``flags``: beside those of all kernels."""
        self._header = header
        self._flags = (*_FLAGS, *flags)
        self._lock = Lock()

    def library(self, source: str, file: Path) -> ctypes.CDLL:
        """Load the library of a source without the header. It is written to ``file``, beside the source."""
        kept = CodeCache(_KEPT, f"{_version()} {self._flags} {self._header}", suffix=".so")
        file.write_bytes(kept.get(source, partial(self._compile, file.with_suffix(".cpp"))))
        _drop_old()
        return ctypes.CDLL(str(file))

    def _compile(self, file: Path, source: str) -> bytes:
        file.write_text(source, encoding="utf-8")
        made = file.with_suffix(".made")
        with self._lock:
            header = self._precompiled()
        self._run("-shared", "-include", str(header), "-o", str(made), str(file))
        return made.read_bytes()

    def _precompiled(self) -> Path:
        """Return the header's path. Where g++ cannot use the compiled one beside it, it reads the header itself."""
        digest = hashlib.sha256(f"{_version()} {self._flags} {self._header}".encode()).hexdigest()[:32]
        header = _KEPT / f"{digest}.hpp"
        compiled = header.with_suffix(".hpp.gch")
        if not compiled.exists():
            made = header.with_suffix(f".{os.getpid()}")
            _KEPT.mkdir(parents=True, exist_ok=True)
            made.write_text(self._header, encoding="utf-8")
            made.replace(header)
            self._run("-x", "c++-header", "-o", str(made), str(header))
            made.replace(compiled)
        return header

    def _run(self, *arguments: str) -> None:
        subprocess.run([str(COMPILER), *self._flags, *arguments], check=True, timeout=_DEADLINE_S)


@cache
def _version() -> str:
    assert COMPILER is not None
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


def _drop_old() -> None:
    """Remove the oldest files of each kind, where there are too many."""
    with suppress(FileNotFoundError):  # another process removes them, too
        for pattern, most in _MOST_KEPT.items():
            for old in sorted(_KEPT.glob(pattern), key=lambda path: path.stat().st_mtime)[:-most]:
                old.unlink()
