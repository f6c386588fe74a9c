"""A draft model's process, ``python -m edgepipe.stage.draft_child``: it guesses what follows a sequence's known tokens.

Frames (``edgepipe.children.frames``): the first is JSON and says what to load (``DraftLaunch``). When that is loaded,
the child answers ``ready``; if it cannot be, a text that begins with ``!``, and the child ends. Then each question
brings a sequence's tokens, and each answer the guesses.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from edgepipe.backend.loader import create_backend
from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BackendOptions, Step, StepRow
from edgepipe.children.frames import read_frame, write_frame
from edgepipe.errors import EdgepipeError
from edgepipe.ids import SequenceId, StepId
from edgepipe.plain_words import plain
from edgepipe.spec.drafting import draft_kv_tokens
from edgepipe.spec.facts import ModelConfig, whole_slice
from edgepipe.spec.tensors import WeightSource
from edgepipe.stage.draft_slots import DraftSlots, Slot, Tokens
from edgepipe.store.linked_files import check_unchanged
from edgepipe.weights.weights import open_weights

MODULE = "edgepipe.stage.draft_child"
READY = b"ready"

_QUESTION = struct.Struct("<I")  # guesses wanted
_ANSWER = struct.Struct("<Q")  # microseconds spent on tokens before the last known one
_CHUNK_TOKENS = 512  # tokens of a prompt in one step
_FEW_TOKENS = 8  # which a step computes in hardly more time than one; more were missed while no guesses were wanted
_NO_TOKENS: Tokens = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLaunch:
    """What a draft model's process loads."""

    path: str  # folder or file that open_weights takes
    backend: str
    device: str = "auto"
    threads: int | None = None
    dtype: str = "auto"
    settings: dict[str, str]  # the backend's
    context_length: int = 0  # tokens per sequence of the served model; 0: the draft model's
    vocab_size: int  # the served model's: no guess is beyond
    ahead: bool = False  # guess on between questions: other devices compute meanwhile

    def to_json(self) -> bytes:
        """Return the first frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, data: bytes) -> DraftLaunch:
        """Read the first frame."""
        return cls(**json.loads(data))


def pack_question(tokens: Tokens, count: int) -> bytes:
    """Ask for ``count`` tokens behind ``tokens``."""
    return _QUESTION.pack(count) + tokens.tobytes()


def read_answer(answer: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the microseconds that known tokens took, and the guesses."""
    (late_us,) = _ANSWER.unpack_from(answer)
    return late_us, tuple(np.frombuffer(answer, np.int32, offset=_ANSWER.size).tolist())


class DraftRunner:
    """A loaded draft model. Guesses are the most likely tokens."""

    def __init__(self, backend: Backend, weights: WeightSource, *, vocab_size: int) -> None:
        """Load all layers. Raises the errors of ``Backend.load`` and ``allocate_kv``."""
        self._backend = backend
        self._config: ModelConfig = weights.config
        self._vocab_size = vocab_size
        backend.load([whole_slice(self._config)], weights, lambda _progress: None)
        block_size = min(backend.block_sizes)
        num_blocks = -(-draft_kv_tokens(self._config) // block_size)
        backend.allocate_kv(num_blocks=num_blocks, block_size=block_size)
        self._slots = DraftSlots(num_blocks=num_blocks, block_size=block_size)
        self._steps = 0
        self._chain = _NO_TOKENS  # the last question's tokens, and guesses behind them
        self._asked = 0  # how many of these were known
        self._wanted = 0  # guesses to have before the next question

    def guess(self, tokens: Tokens, count: int) -> tuple[int, list[int]]:
        """Return the microseconds that missed tokens took, and up to ``count`` tokens that may follow ``tokens``.

        No guess follows a sequence that is longer than the context or the pool, or a token that this model lacks.
        """
        known, self._wanted = self._chain[: len(tokens)], 0
        if len(self._chain) <= len(tokens) or len(tokens) < self._asked or not np.array_equal(known, tokens):
            self._chain = tokens
        self._asked = len(tokens)
        if not len(tokens) or int(tokens.max()) >= self._config.vocab_size:
            return 0, []
        late_us = self._catch_up() if len(self._chain) == len(tokens) and count > 0 else 0
        while len(self._chain) < len(tokens) + count and self._extend():
            pass
        self._wanted = 2 * count + 1
        return late_us, self._chain[len(tokens) : len(tokens) + count].tolist()

    def go_on(self) -> bool:
        """Guess one token more: if all guesses and one more are right, the next question is answered at once.

        Return False if enough guesses are there.
        """
        return len(self._chain) < self._asked + self._wanted and self._extend()

    def _catch_up(self) -> int:
        """Compute tokens that were missed while no guesses were wanted. Return the microseconds."""
        slot = self._slots.begin(self._chain, len(self._chain))
        if slot is None or len(self._chain) > self._config.context_length:
            return 0
        began_s = time.monotonic()
        missed = self._chain[len(slot.tokens) : -1]
        if len(missed) < _FEW_TOKENS:
            return 0  # they go with the last one
        for start in range(0, len(missed), _CHUNK_TOKENS):
            self._compute(slot, missed[start : start + _CHUNK_TOKENS], samples=False)
        return int((time.monotonic() - began_s) * 1e6)

    def _extend(self) -> bool:
        """Append the most likely token. Return False if there is no room for it, or this model lacks it."""
        chain, config = self._chain, self._config
        slot = self._slots.begin(chain, len(chain)) if len(chain) <= config.context_length else None
        if slot is None or int(chain[-1]) >= config.vocab_size:
            return False
        token = self._compute(slot, chain[len(slot.tokens) :], samples=True)
        self._chain = np.append(chain, np.int32(token))
        return True

    def _compute(self, slot: Slot, tokens: Tokens, *, samples: bool) -> int:
        """Compute a slot's next tokens. Return the most likely token behind them, if it is wanted; else 0."""
        self._steps += 1
        row = StepRow(
            sequence=SequenceId(slot.number), position=len(slot.tokens), num_tokens=len(tokens), runs=slot.runs
        )
        wanted = np.arange(len(tokens) if samples else 0, dtype=np.int32)  # all: so a replay takes the step
        step = Step(step=StepId(self._steps), slice_index=0, rows=(row,), logit_rows=wanted)
        output = self._backend.collect(self._backend.submit(self._backend.prepare(step), tokens))
        slot.tokens = np.concatenate([slot.tokens, tokens])
        if not samples:
            return 0
        if output.logits is None:
            raise RuntimeError("the draft model's head gave no logits")
        return int(output.logits[-1, : self._vocab_size].argmax())


def load(launch: DraftLaunch) -> DraftRunner:
    """Load the model. Raises BackendUnavailable, ModelInvalid and the errors of loading."""
    options = BackendOptions(device=launch.device, threads=launch.threads, dtype=launch.dtype, settings=launch.settings)
    backend = create_backend(launch.backend, options)
    path = Path(launch.path)
    check_unchanged(path, lambda _done, _total: None)
    weights = open_weights(path)
    context = min(launch.context_length or weights.config.context_length, weights.config.context_length)
    return DraftRunner(backend, weights.in_context(context), vocab_size=launch.vocab_size)


def main() -> None:
    """Load what the first frame says, then answer questions until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library or a compiler prints is no answer
    if (first := read_frame(source)) is None:
        return
    launch = DraftLaunch.of_json(first)
    try:
        runner = load(launch)
    except EdgepipeError as error:
        write_frame(target, f"!{error}".encode())
        return
    except Exception as error:
        write_frame(target, f"!{plain(error)}".encode())
        raise
    write_frame(target, READY)
    while (question := read_frame(source)) is not None:
        (count,) = _QUESTION.unpack_from(question)
        late_us, found = runner.guess(np.frombuffer(question, np.int32, offset=_QUESTION.size), count)
        write_frame(target, _ANSWER.pack(late_us) + _packed(found))
        while launch.ahead and not _comes(source) and runner.go_on():
            pass


def _comes(source: IO[bytes]) -> bool:
    """Return whether a question, or the end, can be read. None is buffered: each waits for the answer before it."""
    return bool(select.select([source], [], [], 0.0)[0])


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


if __name__ == "__main__":
    main()
