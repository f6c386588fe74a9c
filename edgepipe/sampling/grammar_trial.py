"""Trial of a grammar: what a child process is asked before anybody compiles a user's text, and what it answers.

The gateway tries a grammar before it accepts the request, and the last stage before it compiles a text that it does
not know, because the gateway of a machine that has turned may skip its own trial. Both ask the same child
(``grammar_child``), which builds what a stage builds, with the same limits (``grammar.parser_limits``).
"""

from __future__ import annotations

import json
import struct

from edgepipe.children.forked_job import JobCost
from edgepipe.sampling.grammar import unusable_schema
from edgepipe.sampling.params import GrammarSpec

CHILD_MODULE = "edgepipe.sampling.grammar_child"
CHILD_START_S = 20.0  # start of an interpreter on an overloaded machine
VERDICT_BYTES = 4096  # a verdict is a sentence and two numbers

TRIAL_CPU_S = 0.5  # CPU time per grammar; ordinary schemas of 64 KiB take up to 0.2 s
TRIAL_BYTES = 256 << 20  # additional address space per grammar; ordinary schemas of 64 KiB take up to 12 MiB

_CPU_MS = struct.Struct(">I")


class GrammarTooHard(Exception):
    """Compiling the grammar takes more work than a request may cause."""

    def __init__(self, cost: JobCost, *, cpu_s: float = TRIAL_CPU_S) -> None:
        self.fact = (
            f"compiling it took {cost.cpu_s:.2f} s of processor time and {cost.peak_bytes >> 20} MiB of memory before "
            f"it was stopped; at most {cpu_s:g} s and {TRIAL_BYTES >> 20} MiB are allowed"
        )
        super().__init__(self.fact)


def pack_question(spec: GrammarSpec, *, cpu_s: float) -> tuple[bytes, bytes]:
    """Return the parts of the question whether a grammar can be compiled within ``cpu_s``."""
    return _CPU_MS.pack(round(cpu_s * 1000)), spec.text.encode()


def unpack_question(question: bytes) -> tuple[GrammarSpec, float]:
    """Return the grammar and the processor time allowed, in seconds."""
    (cpu_ms,) = _CPU_MS.unpack_from(question)
    return GrammarSpec(question[_CPU_MS.size :].decode()), cpu_ms / 1000


def pack_verdict(fault: str | None, cost: JobCost) -> bytes:
    """Pack an answer. ``fault``: reason for refusing the grammar, or empty; None: compiling was stopped at a limit."""
    cut = fault[:300] if fault is not None else None
    return json.dumps({"fault": cut, "cpu_s": cost.cpu_s, "peak_bytes": cost.peak_bytes}).encode()


def read_verdict(verdict: bytes, *, cpu_s: float) -> JobCost:
    """Return what compiling took. Raises RequestInvalid for an invalid grammar, GrammarTooHard."""
    fields = json.loads(verdict)
    cost = JobCost(cpu_s=fields["cpu_s"], peak_bytes=fields["peak_bytes"])
    if fields["fault"] is None:
        raise GrammarTooHard(cost, cpu_s=cpu_s)
    if fields["fault"]:
        raise unusable_schema(fields["fault"])
    return cost
