"""Child process that compiles grammars on trial: ``python -m edgepipe.sampling.grammar_child``.

llguidance counts most of its work, but not its work on patterns that must match together (``allOf``, ``multipleOf``
within a range): a schema of a few lines can take hours and all memory. So each grammar is compiled in a fork of this
process, which the kernel limits and ends within a long operation. The fork's end also gives what the grammar took.

Questions and answers (``edgepipe.children.frames``) are those of ``grammar_trial``.
"""

from __future__ import annotations

from functools import partial

from edgepipe.children.forked_job import run_forked
from edgepipe.children.frames import answer_frames
from edgepipe.errors import RequestInvalid
from edgepipe.sampling.grammar import check_grammar, json_grammar
from edgepipe.sampling.grammar_trial import TRIAL_BYTES, pack_verdict, unpack_question
from edgepipe.sampling.params import GrammarSpec


def answer(question: bytes) -> bytes:
    """Compile one grammar on trial."""
    spec, cpu_s = unpack_question(question)
    result = run_forked(partial(_fault, spec), cpu_s=cpu_s, memory_bytes=TRIAL_BYTES)
    return pack_verdict(None if result.answer is None else result.answer.decode(), result.cost)


def _fault(spec: GrammarSpec) -> bytes:
    """Compile a grammar. Return the reason for refusing it, or nothing."""
    try:
        check_grammar(spec)
    except RequestInvalid as exc:
        return exc.fact.encode()
    return b""


def main() -> None:
    """Answer questions until stdin ends."""
    check_grammar(json_grammar({}))  # loads the library once for all forks
    answer_frames(answer)


if __name__ == "__main__":
    main()
