"""Decode rates with 8-bit KV beside KV in the compute type, on a CPU, by the length of the context."""

from __future__ import annotations

import time
from pathlib import Path

from edgepipe_torch import TorchBackend
from figures import Row, at_least

from edgepipe.backend.types import BackendOptions
from edgepipe.weights.weights import open_weights
from tests.support.numerics.harness import Pipeline, Track

CONTEXTS = {200: 0.95, 2048: 1.0, 8000: 1.0}  # tokens: least ratio
NEW_TOKENS = 8
ROUNDS = 4
BLOCK_TOKENS = 16
_FILLED_BLOCKS = 16  # computed; copies of them fill the others


def kv_speed_rows(model: Path) -> list[Row]:
    """Measure decode of one sequence, both forms in turns."""
    rows: list[Row] = []
    for threads in (1, 2):
        chats = [_Chat(model, kv, threads) for kv in ("8bit", "")]
        for context, target in CONTEXTS.items():
            taken = [[chat.step_s(context) for chat in chats] for _ in range(ROUNDS + 1)][1:]
            packed_s, float_s = (min(times) for times in zip(*taken, strict=True))
            name = f"decode after {context} tokens, kv 8bit, {threads} thread{'s' * (threads > 1)}"
            rows.append(at_least(name, 1 / packed_s, "tok/s", 1 / float_s, "float KV", target))
        for chat in chats:
            chat.close()
    return rows


class _Chat:
    """One sequence of the whole model, whose KV pool is full."""

    def __init__(self, model: Path, kv: str, threads: int) -> None:
        most = max(CONTEXTS) + NEW_TOKENS
        blocks = -(-most // BLOCK_TOKENS)
        backend = TorchBackend(BackendOptions(device="cpu", threads=threads, kv=kv))
        self._pipeline = Pipeline.build([backend], open_weights(model), num_blocks=blocks, block_size=BLOCK_TOKENS)
        self._sequence: Track = self._pipeline.add(most)
        self._pipeline.step([(self._sequence, [1000 + index for index in range(_FILLED_BLOCKS * BLOCK_TOKENS)])])
        copies = [(block % _FILLED_BLOCKS, block) for block in range(_FILLED_BLOCKS, blocks)]
        self._pipeline.step([(self._sequence, [1])], copies=copies)

    def step_s(self, context: int) -> float:
        """Return the seconds of the fastest of ``NEW_TOKENS`` steps after ``context`` tokens."""
        self._sequence.length = context
        return min(self._one_s(2000 + index) for index in range(NEW_TOKENS))

    def _one_s(self, token: int) -> float:
        begun_s = time.perf_counter()
        self._pipeline.step([(self._sequence, [token])])
        return time.perf_counter() - begun_s

    def close(self) -> None:
        """Release the memory."""
        self._pipeline.close()
