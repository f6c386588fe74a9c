"""Every lasting fault, with the kind of cluster that it needs: the rows of *time to heal* in `scripts/bench faults`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.chaos import hang_ups, large_messages, lasting_faults, stubborn_faults
from tests.support.faults.chaos.clients import Clients


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingFault:
    """``strike`` may be called again and again on one cluster unless ``strikes_once``.

    See ``lasting_faults`` for what it returns.
    """

    what: str  # for people
    cluster: Callable[[Path], AbstractAsyncContextManager[Clients]]
    strike: Callable[[Clients], Awaitable[float]]
    needs_lan: bool = False
    is_long: bool = False  # left out unless the bench runs in full
    strikes_once: bool = False  # on one cluster: the next try comes after a pause
    predicted_s: float | None = None  # before it was measured
    shows_pause: bool = False  # a chat beside it is measured, too


LASTING_FAULTS = (
    LastingFault(
        what="a device is broken for good, another machine takes over",
        cluster=lasting_faults.home,
        strike=lasting_faults.broken_for_good,
    ),
    LastingFault(
        what="all devices that could take over are broken, then repaired",
        cluster=lasting_faults.home,
        strike=lasting_faults.broken_for_a_while,
        is_long=True,
    ),
    LastingFault(
        what="a machine slept while others took over, and is needed again",
        cluster=lasting_faults.home,
        strike=lasting_faults.slept_too_long,
    ),
    LastingFault(
        what="a drain is refused, then possible",
        cluster=lasting_faults.home,
        strike=lasting_faults.refused_move,
    ),
    LastingFault(
        what="a machine that refused a stage is lost",
        cluster=lasting_faults.home,
        strike=lasting_faults.refused_move_then_lost,
    ),
    LastingFault(
        what="a machine wakes before its network",
        cluster=lasting_faults.pair,
        strike=lasting_faults.woke_without_network,
        needs_lan=True,
    ),
    LastingFault(
        what="a machine with a tenth of the memory joins, serves and leaves",
        cluster=lasting_faults.growing,
        strike=lasting_faults.small_node,
    ),
    LastingFault(
        what="clients hang up at every moment",
        cluster=hang_ups.contiguous,
        strike=hang_ups.hang_ups,
    ),
    LastingFault(
        what="a request whose steps failed is computed alone",
        cluster=hang_ups.contiguous,
        strike=hang_ups.suspected_request,
    ),
    LastingFault(
        what="a step fails beside 72 grammars of 62 KiB",
        cluster=large_messages.wide,
        strike=large_messages.large_grammars,
        is_long=True,
    ),
    LastingFault(
        what="a step fails beside 128 penalties on 18,000 tokens",
        cluster=large_messages.wide,
        strike=large_messages.long_penalties,
        is_long=True,
    ),
    LastingFault(
        what="the way to the engine breaks beside 36,000 log-probabilities",
        cluster=large_messages.apart,
        strike=large_messages.long_echo,
        needs_lan=True,
        is_long=True,
    ),
    LastingFault(
        what="the clients' gateway is killed in mid-stream",
        cluster=stubborn_faults.home,
        strike=stubborn_faults.killed_gateway,
        predicted_s=3.0,
    ),
    LastingFault(
        what="an engine is killed four times as soon as it is ready",
        cluster=stubborn_faults.home,
        strike=stubborn_faults.dying_engine,
        strikes_once=True,
        predicted_s=10.0,
    ),
    LastingFault(
        what="a stage dies whenever it is ready, beside a free machine",
        cluster=stubborn_faults.home,
        strike=stubborn_faults.idle_death,
        strikes_once=True,
        predicted_s=10.0,
    ),
    LastingFault(
        what="the engine's machine is lost",
        cluster=stubborn_faults.guests,
        strike=stubborn_faults.lost_engine_node,
        predicted_s=6.0,
    ),
    LastingFault(
        what="a stage hangs whenever it is ready, beside a free machine",
        cluster=stubborn_faults.guests,
        strike=stubborn_faults.late_stage,
        strikes_once=True,
        predicted_s=20.0,
    ),
    LastingFault(
        what="a stage dies after some chunks of a long prompt, each time",
        cluster=stubborn_faults.slow_prompts,
        strike=stubborn_faults.dying_prompt,
        strikes_once=True,
        predicted_s=10.0,
        shows_pause=True,
    ),
)
