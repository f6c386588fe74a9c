"""Times a native build of llama.cpp on a GGUF file: ``native_llama.py MODEL THREADS CONTEXT_TOKENS ROWS``.

Reads one JSON command a line, answers each with ``{"seconds": s}``:

    {"decode": TOKENS, "prompt": TOKENS}         greedy tokens of each row after the first one of a new prompt
    {"prefill": TOKENS}                          one prompt, without logits
    {"quantise": PATH, "ftype": NUMBER}          write the model in another mix

``scripts/build_llama_cpp`` makes the library and its bindings, which PYTHONPATH names.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

_PROMPT_BATCH = 512


class Rows:
    """A context in which so many sequences decode together."""

    def __init__(self, library: Any, model: str, *, threads: int, context_tokens: int, rows: int) -> None:
        self._library = library
        self._rows = rows
        self._model = library.llama_model_load_from_file(model.encode(), library.llama_model_default_params())
        params = library.llama_context_default_params()
        params.n_ctx = context_tokens * rows
        params.n_batch = params.n_ubatch = _PROMPT_BATCH
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp made no context")
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(_PROMPT_BATCH, 0, 1)

    def prefill_s(self, count: int) -> float:
        """Return the seconds of a new prompt."""
        self._forget()
        begun_s = time.perf_counter()
        self._compute([(token, place, 0, False) for place, token in enumerate(_prompt(count))])
        return time.perf_counter() - begun_s

    def decode_s(self, count: int, prompt_tokens: int) -> float:
        """Return the seconds of so many further tokens of each row."""
        self._forget()
        prompt = _prompt(prompt_tokens)
        tokens = [0] * self._rows
        for row in range(self._rows):
            last = prompt_tokens - 1
            self._compute([(token, place, row, place == last) for place, token in enumerate(prompt)])
            tokens[row] = self._picked(last)
        begun_s = time.perf_counter()
        for step in range(count):
            self._compute([(token, prompt_tokens + step, row, True) for row, token in enumerate(tokens)])
            tokens = [self._picked(row) for row in range(self._rows)]
        return time.perf_counter() - begun_s

    def _forget(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def _compute(self, cells: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens: their ids, positions and rows, and whether logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(cells)
        for index, (token, place, row, wanted) in enumerate(cells):
            batch.token[index], batch.pos[index], batch.logits[index] = token, place, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        if self._library.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp computed no step")
        self._library.llama_synchronize(self._context)

    def _picked(self, index: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def _prompt(count: int) -> list[int]:
    return [100 + index * 37 % 150 for index in range(count)]


def _quantise(library: Any, model: str, path: str, ftype: int) -> None:
    params = library.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = ftype, True
    if library.llama_model_quantize(model.encode(), path.encode(), ctypes.byref(params)):
        raise SystemExit("llama.cpp wrote no file")


def main() -> None:
    """Answer commands until stdin ends."""
    model, (threads, context_tokens, rows) = sys.argv[1], map(int, sys.argv[2:])
    library: Any = import_module("llama_cpp.llama_cpp")
    library.llama_backend_init()
    context: Rows | None = None
    for line in sys.stdin:
        command = json.loads(line)
        seconds = 0.0
        if "quantise" in command:
            _quantise(library, model, command["quantise"], command["ftype"])
        else:
            context = context or Rows(library, model, threads=threads, context_tokens=context_tokens, rows=rows)
            if "decode" in command:
                seconds = context.decode_s(command["decode"], command["prompt"])
            else:
                seconds = context.prefill_s(command["prefill"])
        sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
