"""Child process that compiles grammars on trial: ``python -m edgepipe.gateway.grammar_child``.

llguidance bounds most of its work, but not its work on patterns that must match together (``allOf``): a schema of a few
lines can take hours and all memory. The kernel limits both for this process, and kills it within a long operation.

A question (``edgepipe.model.frames``) is a grammar's text. The answer is empty, or the reason for refusing the grammar.
"""

from __future__ import annotations

import signal

from edgepipe.errors import RequestInvalid
from edgepipe.model.child_memory import limit_memory
from edgepipe.model.frames import answer_frames
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import check_grammar, json_grammar

CPU_S = 5.0  # per grammar; the largest allowed grammars take 1 to 3 s
MEMORY_BYTES = 1 << 30  # the largest allowed grammars take a tenth of it


def answer(question: bytes) -> bytes:
    """Compile one grammar."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        check_grammar(GrammarSpec(question.decode()))
    except RequestInvalid as exc:
        return exc.fact.encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return b""


def main() -> None:
    """Answer questions until stdin ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    check_grammar(json_grammar({}))  # loads the library, whose memory is then mapped before the limit applies
    limit_memory(MEMORY_BYTES)  # if the platform refuses, the CPU limit bounds the memory
    answer_frames(answer)


if __name__ == "__main__":
    main()
