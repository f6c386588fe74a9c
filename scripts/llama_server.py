"""llama.cpp's server as a rival: that of a build by ``scripts/build_llama_cpp FOLDER server``."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_START_S, _ANSWER_S = 60.0, 600.0


class LlamaServer:
    """A running server with one model."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def complete(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return so many greedy tokens after a prompt; end tokens do not end them."""
        body = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        found = self._call("/completion", json.dumps(body).encode(), _ANSWER_S)
        return list(found["tokens"])

    def is_ready(self) -> bool:
        """Return whether the model is loaded."""
        try:
            return self._call("/health", None, 1.0)["status"] == "ok"
        except (urllib.error.URLError, OSError):
            return False

    def _call(self, path: str, body: bytes | None, timeout_s: float) -> Any:
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)


@contextmanager
def llama_server(
    folder: Path, model: Path, *, threads: int, context_tokens: int, slots: int, cache_mib: int
) -> Generator[LlamaServer]:
    """Serve a GGUF file.

    context_tokens  of all slots together, which share them
    cache_mib       ``--cache-ram``: host memory for conversations that have left the slots
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "--model": model,
        "--port": port,
        "--threads": threads,
        "--threads-batch": threads,
        "--threads-http": 2,
        "--ctx-size": context_tokens,
        "--parallel": slots,
        "--cache-ram": cache_mib,
    }
    command = [folder / "build" / "bin" / "llama-server", "--kv-unified", "--no-webui"]
    command += [part for flag in flags.items() for part in flag]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([str(part) for part in command], stdout=log, stderr=log) as process,
    ):
        try:
            server = LlamaServer(port)
            _await_ready(server, process, log)
            yield server
        finally:
            process.kill()


def _await_ready(server: LlamaServer, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + _START_S
    while not server.is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise RuntimeError(f"llama.cpp's server does not start: {log.read().decode(errors='replace')[-500:]}")
        time.sleep(0.1)
