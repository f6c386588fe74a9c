"""Reads a batch's whole input once, before any line runs: ``python -m edgepipe.gateway.batches.checking``.

A child process does it: parsing a million lines would hold the interpreter's lock of the gateway for many seconds. A
question (``edgepipe.children.frames``) is JSON, ``{"path", "endpoint"}``; the answer is a ``CheckedInput`` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgepipe.children.frames import answer_frames
from edgepipe.gateway.batches.lines import Place, RawLine, line_fault, read_lines
from edgepipe.gateway.batches.records import MAX_LINES, BatchError, CheckedInput

MODULE = "edgepipe.gateway.batches.checking"
_MAX_ERRORS = 10  # reasons that a failed batch shows
_DIGEST_BYTES = 16
_NICE = 10


def check_input(path: Path, *, endpoint: str, most_lines: int = MAX_LINES) -> CheckedInput:
    """Count lines, find the model, and refuse a batch without a good line or with an id that occurs twice.

    A million lines take some 40 MB: a digest and a number for each. Raises OSError.
    """
    numbers, digests = array("I"), bytearray()
    num_lines, model = 0, ""
    bad: list[BatchError] = []
    with open(path, "rb") as source:
        for line, _ in read_lines(source, Place()):
            if line is None:
                continue
            num_lines += 1
            if num_lines > most_lines:
                return CheckedInput(errors=(BatchError(code="too_many_lines", message=_too_many(most_lines)),))
            if fault := line_fault(line.data, endpoint=endpoint):
                if len(bad) < _MAX_ERRORS:
                    bad.append(BatchError(code="invalid_line", message=f"{fault}", line=line.number))
                continue
            custom_id, named = _facts(line)
            model = model if numbers else named
            numbers.append(line.number)
            digests += hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    if not num_lines:
        return CheckedInput(errors=(BatchError(code="empty_file", message="the file has no line"),))
    if not numbers:
        return CheckedInput(errors=tuple(bad))
    return CheckedInput(num_lines=num_lines, model=model, errors=tuple(_twice(numbers, digests)))


def result_of(answer: bytes) -> CheckedInput:
    """Read a child's answer."""
    values: dict[str, Any] = json.loads(answer)
    errors = tuple(BatchError(**error) for error in values["errors"])
    return CheckedInput(num_lines=values["num_lines"], model=values["model"], errors=errors)


def question_for(path: Path, *, endpoint: str) -> bytes:
    """Build the question for the child."""
    return json.dumps({"path": str(path), "endpoint": endpoint}).encode()


def _facts(line: RawLine) -> tuple[str, str]:
    """Return a good line's id and the model that it names."""
    value = cast("dict[str, Any]", json.loads(line.data or b""))
    named = value["body"].get("model")
    return value["custom_id"], named if isinstance(named, str) else ""


def _twice(numbers: array[int], digests: bytearray) -> list[BatchError]:
    """Return an error for each of the first lines whose id an earlier line has."""
    halves = np.frombuffer(digests, dtype=[("high", "<u8"), ("low", "<u8")])
    order = np.lexsort((halves["low"], halves["high"]))  # stable, so equal ids keep their lines' order
    ordered = halves[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    pairs = sorted((numbers[int(order[at + 1])], numbers[int(order[at])]) for at in same)
    return [
        BatchError(code="duplicate_custom_id", message=f"line {earlier} has the same custom_id", line=line)
        for line, earlier in pairs[:_MAX_ERRORS]
    ]


def _too_many(most_lines: int) -> str:
    return f"the file has more than {most_lines:,} lines: split it into several batches"


def answer(question: bytes) -> bytes:
    """Answer one question."""
    asked: dict[str, Any] = json.loads(question)
    try:
        result = check_input(Path(asked["path"]), endpoint=asked["endpoint"])
    except OSError:
        result = CheckedInput(errors=(BatchError(code="file_unreadable", message="the input file cannot be read"),))
    return json.dumps(asdict(result)).encode()


if __name__ == "__main__":
    os.nice(_NICE)  # interactive requests go first here, too
    answer_frames(answer)
