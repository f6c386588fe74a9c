"""The child process that encodes long texts: ``python -m edgepipe.model.encoding_child``.

What the tokenizers' library gives for a million tokens takes the interpreter's lock for 50 ms and more, in a thread,
too. A question (``edgepipe.model.frames``) is a line of JSON, ``{"folder", "add_special", "at_most"}``, and the text;
the answer is ``+``, the number of tokens and, if there are not more than ``at_most``, their ids as 32-bit numbers, or
``-`` and why there are none.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from array import array
from functools import lru_cache
from pathlib import Path

from edgepipe.errors import EdgepipeError
from edgepipe.model.frames import read_frame, write_frame
from edgepipe.model.store import StoredModel
from edgepipe.model.tokenizer import Tokenizer

_COUNT = struct.Struct(">I")


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    path = Path(folder)
    return StoredModel(path.name, path).tokenizer()


def answer(question: bytes) -> bytes:
    """To one question."""
    head, _, text = question.partition(b"\n")
    asked = json.loads(head)
    try:
        ids = _tokenizer(asked["folder"]).encode(text.decode(), add_special=asked["add_special"])
    except EdgepipeError as exc:
        return b"-" + " ".join(exc.lines()).encode(errors="replace")
    told = ids if len(ids) <= asked["at_most"] else []
    return b"+" + _COUNT.pack(len(ids)) + array("I", told).tobytes()


def main() -> None:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    source, target = sys.stdin.buffer, sys.stdout.buffer
    write_frame(target, b"ready")
    while (question := read_frame(source)) is not None:
        write_frame(target, answer(question))


if __name__ == "__main__":
    main()
