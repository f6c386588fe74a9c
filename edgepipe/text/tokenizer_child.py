"""Tests a foreign ``tokenizer.json`` in its own process: ``python -m edgepipe.text.tokenizer_child FILE V``.

Loading can recurse or allocate without limit, and a pre-tokenizer's pattern can backtrack for ever. Exit code 0: the
file loads, its ids are below V, and texts that provoke backtracking can be encoded and decoded; the output is the
digest of its canonical form. Any other exit code: the last line of the errors gives the reason.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.files.canonical import tokenizer_digest
from edgepipe.plain_words import plain

CPU_S = 10
MEMORY_BYTES = 3 << 30  # address space; a tokenizer of 262,144 tokens takes about 0.4 GB while it loads
TOLD_BYTES = 64 << 10  # limit of every file that it writes, including standard error
_RUN = 4096  # characters per text: an exponential pattern fails with 30, a quadratic one passes
_PROVOKING = ("a", " ", "1", "\n", "!", "é", "a!", "a 1", "' ", "\t \n", "字", "(a", "ab" * 8 + "\u0301")


def check(path: Path, vocab_size: int) -> str:
    """Return an empty string for a good tokenizer, else the fault."""
    from edgepipe.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(path, vocab_size=vocab_size)
    largest = tokenizer.largest_id()
    if largest >= vocab_size:
        return f"it has the token id {largest}, the model has {vocab_size}"
    for unit in _PROVOKING:
        for end in ("", "!", "\0"):  # a pattern that almost matches backtracks at another ending
            tokenizer.decode(tokenizer.encode(unit * (_RUN // len(unit)) + end))
    return ""


def main() -> None:
    """Check the file named on the command line."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (TOLD_BYTES, TOLD_BYTES))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (OSError, ValueError):
        pass  # macOS refuses; there the CPU limit and the file's size limit it
    try:
        path = Path(sys.argv[1])
        digest = tokenizer_digest(path)
        problem = check(path, int(sys.argv[2]))
        sys.stdout.write("" if problem else digest)
    except ModelInvalid as exc:
        problem = exc.fact or exc.what
    except Exception as exc:  # the library raises bare Exceptions
        problem = plain(exc)
    sys.stderr.write(f"\n{problem}")
    sys.exit(1 if problem else 0)


if __name__ == "__main__":
    main()
