"""Every deadline and every bound of an engine, each as one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """How long an engine waits for what."""

    prepare_s: float = 3600.0  # weights may have to be fetched; silence is watched by the node that loads
    open_s: float = 90.0  # a stage allocates its KV and reaches the next one, or tells after 60 s that it does not
    release_s: float = 10.0  # a node ends a stage process: 5 s until it is killed
    release_again_s: float = 10.0  # after a node did not answer
    step_min_s: float = 5.0  # no step is late before this, whatever was predicted
    step_factor: float = 8.0  # of what steps of its size took
    step_first_s: float = 60.0  # a size not seen before: kernels are compiled, caches are cold
    resume_s: float = 10.0  # a gateway's stream that broke is waited for, and results are kept
    flush_s: float = 1.0  # gateways are told of the end before their streams are closed
    again_min_s: float = 0.1  # between an epoch that could not begin and the next try, doubling
    again_max_s: float = 5.0
    barren_min_s: float = 2.0  # between epochs that retire no step, from the third one on, doubling
    barren_max_s: float = 20.0
    move_again_min_s: float = 1.0  # between attempts to leave a node that is being drained, doubling
    move_again_max_s: float = 30.0
    ask_again_s: float = 0.5  # at least, between two questions where stages go while requests are refused
    room_s: float = 30.0  # the cluster tells when it changes; a quarantine that ends is no such change
    report_interval_s: float = 0.5  # the state is told this often while it changes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much an engine takes on."""

    max_running: int = 256  # sequences in the KV cache at once
    max_waiting: int = 1024  # sequences in the queue
    max_prefill_tokens: int = 2048  # per step
    # The process has some 200 MB without requests: with what follows it stays below 1 GB whatever clients send.
    max_new_bytes: int = 384 << 20  # of all requests' memory, beyond which new ones are refused: 40 of 128 k tokens
    max_held_bytes: int = 512 << 20  # of the same with what their outputs add, beyond which the youngest ends
    max_finished: int = 1024  # requests whose result is kept for a gateway that resumes
    default_contexts: int = 4  # full contexts that the KV pool shall hold where nobody says how large it is
    max_failed_epochs: int = 8  # that did not open, in a row: with the pauses between them about half a minute
    max_barren_epochs: int = 3  # in a row that retired no step though they had work; then requests are refused
    max_queued_messages: int = 64  # per stage, beyond M: a stage that takes no plans is at fault
