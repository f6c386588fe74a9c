"""llama.cpp as a rival, in a process of its own.

Either npm's prebuilt ``node-llama-cpp``, which needs no compiler, or a build for this processor by
``scripts/build_llama_cpp``, whose folder EP_LLAMA_CPP names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from figures import ROOT

_PACKAGES = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")


class LlamaCpp:
    """A process with one model and one sequence."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def decode_s(self, tokens: int, *, prompt_tokens: int) -> float:
        """Return the seconds of so many greedy tokens after the first one of a new prompt."""
        return self._seconds({"decode": tokens, "prompt": prompt_tokens})

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a new prompt, without logits."""
        return self._seconds({"prefill": tokens})

    def quantise(self, path: Path, ftype: int) -> None:
        """Write the model in another mix (``llama_ftype``). Only a native build can."""
        self._seconds({"quantise": str(path), "ftype": ftype})

    def _seconds(self, command: dict[str, int | str]) -> float:
        """Send a command and wait for its time. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return float(json.loads(line)["seconds"])
        raise RuntimeError("llama.cpp has ended")


@contextmanager
def llama_cpp(model: Path, *, threads: int, context_tokens: int) -> Generator[LlamaCpp | None]:
    """Run llama.cpp on a GGUF file. Yields None where it cannot be installed."""
    folder = _installed()
    if folder is None:
        yield None
        return
    command = ["node", str(ROOT / "scripts" / "llama_cpp.mjs"), str(model), str(threads), str(context_tokens)]
    environment = os.environ | {"NODE_LLAMA_CPP": str(folder)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            yield LlamaCpp(process)
        finally:
            process.kill()


@contextmanager
def native_llama_cpp(folder: Path, model: Path, *, threads: int, context_tokens: int, rows: int) -> Generator[LlamaCpp]:
    """Run a native build on a GGUF file; ``rows`` sequences decode together."""
    numbers = map(str, (threads, context_tokens, rows))
    command = [sys.executable, "-P", str(ROOT / "scripts" / "native_llama.py"), str(model), *numbers]
    environment = os.environ | {
        "PYTHONPATH": str(folder / "python"),
        "LLAMA_CPP_LIB_PATH": str(folder / "build" / "bin"),
    }
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            yield LlamaCpp(process)
        finally:
            process.kill()


@cache
def _installed() -> Path | None:
    """Return the folder with the npm packages, installed now if they are missing; None where npm cannot."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        print("llama.cpp is not measured: npm and node are needed")
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgepipe-bench"
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}", encoding="utf-8")
        command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--prefix", str(folder), *_PACKAGES]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            print("llama.cpp is not measured: npm could not install it")
            return None
    return folder
