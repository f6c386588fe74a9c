"""Deadlines and limits of an engine, and the numbers of its recovery."""

from __future__ import annotations

from dataclasses import dataclass

# The recovery avoids a node or a link for this time after its first failure, doubling up to the longest time.
QUARANTINE_S, LONGEST_QUARANTINE_S = 30.0, 600.0
# This many losses within this time count as flapping: a machine that restarts takes a minute or two, a step that is
# late up to a minute.
FLAPS, FLAPS_WITHIN_S = 3, 300.0
# This many crashes of different requests within this time show a flawed device, even if steps succeed between them.
FLAWED_CRASHES, FLAWED_WITHIN_S = 3, 60.0
CRASHES_COMPARED = 8  # crashes of one stage that are compared
SUSPECTED_CRASHES, MOST_CRASHES = 2, 3  # crashed steps of a sequence after which it runs alone, or is refused
SUSPECTED_STALLS = 2  # epochs in a row that ended before a request got further; then stalled ones are tried one by one
# Epochs after which the request is refused; a node is left out earlier, so that another node is tried first.
MOST_STALLS = 4
FREE_ENDS = 3  # epochs with progress that a node may end before pauses begin
WORTH_EMPTYING = 1.25  # times the kept number of KV blocks: more room than that justifies recomputing everything


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """Deadlines and intervals of an engine, in seconds."""

    prepare_s: float = 3600.0  # silence of a node that prepares; fetching weights may take longer, with progress
    open_s: float = 90.0  # a stage allocates KV and reaches the next, or reports after 60 s that it does not
    release_s: float = 10.0  # a node ends a stage process: kills it after 5 s
    release_again_s: float = 10.0  # pause after a node did not answer
    step_min_s: float = 5.0  # minimum step deadline, whatever the prediction
    step_factor: float = 8.0  # deadline over the time of steps of this size
    step_first_s: float = 60.0  # deadline of a new size: kernels are compiled, caches are cold
    resume_s: float = 10.0  # how long results are kept for a gateway whose stream broke
    flush_s: float = 1.0  # time to send the last results before streams are closed
    again_min_s: float = 0.1  # pause after an epoch that could not begin, doubling
    again_max_s: float = 5.0
    barren_min_s: float = 1.0  # pause after the second epoch in a row without progress, doubling
    barren_max_s: float = 300.0
    broken_min_s: float = 1.0  # pause after the fourth epoch in a row that made progress, doubling
    broken_max_s: float = 5.0
    forgiven_s: float = 300.0  # an epoch that served so long ends the row
    move_again_min_s: float = 1.0  # pause between attempts to leave a node that is being drained, doubling
    move_again_max_s: float = 30.0
    ask_again_s: float = 0.5  # pause between two requests for a placement while none is found
    patience_s: float = 5.0  # time without a placement until running requests are refused: devices restart meanwhile
    room_s: float = 30.0  # retry for memory: the end of a quarantine triggers no cluster change
    report_interval_s: float = 0.5  # interval of state reports while it changes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Capacity limits of an engine."""

    max_running: int = 256  # sequences in the KV cache at once
    max_waiting: int = 1024  # sequences in the queue
    max_prefill_tokens: int = 2048  # tokens of prompts per step
    # The process takes about 200 MB without requests; the next two keep it below 1 GB whatever clients send.
    max_new_bytes: int = 384 << 20  # memory of all requests above which new ones are refused: 40 of 128 k tokens
    max_held_bytes: int = 512 << 20  # memory including outputs above which the youngest request ends
    max_finished: int = 1024  # ended requests whose result is kept for a gateway that resumes
    default_contexts: int = 4  # default KV pool size, in full contexts
    max_failed_epochs: int = 8  # epochs in a row that failed to open: about 30 s with the pauses
    max_barren_epochs: int = 3  # epochs in a row without progress; then all requests are refused
    max_queued_messages: int = 64  # plans per stage beyond M: a stage that reads no plans is at fault
