"""Events of sequences that come, grow, fork and go, and their course on twins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.support.backends.torch_twins import Crowd, Twins

CrowdEvent = tuple[Any, ...]  # a method of Crowd and its arguments; decode also says how many times


def crowd_events(
    *,
    prompt: int,
    chunk: int,
    arrivals: int = 4,
    decoding: int = 9,
    repeats: tuple[int, int] = (2, 4),
    most: int = 8,
) -> st.SearchStrategy[list[CrowdEvent]]:
    """Draw at least four events.

    prompt, chunk       longest prompt, and longest chunk in mid-sequence, in tokens
    arrivals, decoding  most sequences that arrive at once, and that decode in one step
    repeats             fewest and most decode steps of one event
    most                events
    """
    return st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.lists(st.integers(1, prompt), min_size=1, max_size=arrivals)),
            st.tuples(st.just("decode"), st.integers(1, decoding), st.integers(*repeats)),
            st.tuples(st.just("chunk"), st.integers(2, chunk), st.integers(0, 4)),
            st.tuples(st.just("leave"), st.integers(1, 3)),
            st.tuples(st.just("fork")),
        ),
        min_size=4,
        max_size=most,
    )


def play_crowd(twins: Twins, events: Sequence[CrowdEvent], seed: int, *, prompts: Sequence[int] = (3, 1, 6)) -> None:
    """Let the events happen to sequences of these prompt lengths, in blocks and slots drawn from the seed."""
    crowd = Crowd(twins, seed)
    crowd.arrive(prompts)
    for name, *arguments in events:
        if name == "decode":
            count, times = arguments
            for _ in range(times):
                crowd.decode(count)
        else:
            getattr(crowd, name)(*arguments)
    twins.finish()
