"""The child process that encodes long texts: ``python -m edgepipe.text.encoding_child``.

The tokenizers library holds the interpreter's lock for 50 ms and more to return a million tokens, also in a thread. A
request (``edgepipe.children.frames``) is a line of JSON, ``{"tokenizer", "add_special", "at_most"}``, followed by the text.
The answer is ``+``, the number of tokens and their ``pack_ids`` (empty if there are more than ``at_most``), or ``-``
and an error.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from edgepipe.children.frames import HEAD, answer_frames, pack_ids
from edgepipe.errors import EdgepipeError
from edgepipe.text.tokenizer import Tokenizer

_MAX_ERROR_BYTES = 1000


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(Path(path))


def answer(question: bytes) -> bytes:
    """Answer one request."""
    head, _, text = question.partition(b"\n")
    asked = json.loads(head)
    try:
        ids = _tokenizer(asked["tokenizer"]).encode(text.decode(), add_special=asked["add_special"])
    except EdgepipeError as exc:
        return b"-" + " ".join(exc.lines()).encode(errors="replace")[:_MAX_ERROR_BYTES]
    sent = ids if len(ids) <= asked["at_most"] else []
    return b"+" + HEAD.pack(len(ids)) + pack_ids(sent)


if __name__ == "__main__":
    answer_frames(answer)
