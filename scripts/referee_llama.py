"""llama.cpp as a referee: built from the source in ``llama-cpp-python``, with its own converter and quantiser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

HERE = Path(__file__).resolve().parent
PACKAGE = "llama-cpp-python"
TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_0": 8, "Q4_K_M": 15, "IQ4_NL": 25, "MXFP4": 38}
"""Forms of a file, and llama.cpp's numbers of them (enum llama_ftype)."""

_FETCH_S = 600
_BUILD_S = 7200
_RUN_S = 300
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",  # tiny models need no speed, and this builds faster
    "CMAKE_C_FLAGS_RELEASE": "-O1 -DNDEBUG",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "OFF",
    "GGML_CPU_REPACK": "OFF",
    "GGML_LLAMAFILE": "OFF",
    "LLAMA_BUILD_COMMON": "OFF",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_ALL_WARNINGS": "OFF",
}


@dataclass(frozen=True, slots=True)
class Llama:
    """llama.cpp as it was built."""

    source: Path  # the folder of llama.cpp
    program: Path
    version: str

    def logits(self, model: Path, tokens: Sequence[int]) -> Floats:
        """Return the logits [T, V] of a GGUF file, keys and values in float32."""
        asked, answered = model.with_suffix(".tokens"), model.with_suffix(".logits")
        np.array(tokens, "<i4").tofile(asked)
        _run([self.program, "logits", model, asked, answered], timeout_s=_RUN_S)
        found = np.fromfile(answered, "<f4").reshape(len(tokens), -1)
        answered.unlink()
        return found

    def quantise(self, source: Path, target: Path, form: str) -> Path:
        """Write a file in another form of ``TYPES``. To F32: the values that a quantised file stands for."""
        _run([self.program, "quantise", source, target, str(TYPES[form])], timeout_s=_RUN_S)
        return target

    def convert(self, jobs: Sequence[dict[str, str]], work: Path) -> dict[str, str]:
        """Convert folders to GGUF; see ``referee_converter``. Returns the errors by file."""
        listed = work / f"jobs-{os.getpid()}.json"
        listed.write_text(json.dumps(jobs), encoding="utf-8")
        command = [sys.executable, HERE / "referee_converter.py", self.source / "convert_hf_to_gguf.py", listed]
        answered = _run(command, timeout_s=_RUN_S * len(jobs)).splitlines() if jobs else []
        listed.unlink()
        lines = [json.loads(line) for line in answered if line.startswith('{"file"')]
        return {line["file"]: line["error"] for line in lines}


def build(cache: Path) -> Llama:
    """Fetch the source package and build what is needed, once per version: some minutes of two cores."""
    unpacked = next(iter(sorted(cache.glob("llama_cpp_python-*/"))), None) or _fetch(cache)
    source, built = unpacked / "vendor" / "llama.cpp", cache / f"build-{unpacked.name}"
    program = built / "referee"
    if not program.exists():
        _without_tables(source)
        options = [f"-D{key}={value}" for key, value in _OPTIONS.items()]
        _run(["cmake", "-S", source, "-B", built, *options], timeout_s=_FETCH_S)
        _run(["nice", "cmake", "--build", built, "--target", "llama", "-j2"], timeout_s=_BUILD_S)
        includes = ["-I", source / "include", "-I", source / "ggml" / "include"]
        libraries = ["-L", built / "bin", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{built / 'bin'}"]
        compiler = ["c++", "-O1", "-std=c++17", *includes, HERE / "referee_llama.cpp", "-o", program, *libraries]
        _run(compiler, timeout_s=_FETCH_S)
    return Llama(source=source, program=program, version=unpacked.name.replace("_", "-"))


def _without_tables(source: Path) -> None:
    """Make llama.cpp compute GELU in float32. Its table in float16 moves Gemma's logits by a thousandth."""
    header = source / "ggml" / "src" / "ggml-cpu" / "vec.h"
    text = header.read_text(encoding="utf-8")
    for name in ("GGML_GELU_FP16", "GGML_GELU_QUICK_FP16"):
        text = text.replace(f"#define {name}\n", "")
    header.write_text(text, encoding="utf-8")


def _fetch(cache: Path) -> Path:
    """Get the newest source package through pip, and unpack it."""
    wanted = ["--no-deps", "--no-binary", ":all:", PACKAGE]
    _run([sys.executable, "-m", "pip", "download", "-q", "-d", cache, *wanted], timeout_s=_FETCH_S)
    (archive,) = cache.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(cache, filter="data")
    return next(cache.glob("llama_cpp_python-*/"))


def _run(command: Sequence[str | Path], *, timeout_s: float) -> str:
    """Run a program. Raises RuntimeError with its last words if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(words[0]).name} ended with {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout
