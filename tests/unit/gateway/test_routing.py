"""Requests of a model with several pipelines: conversations come back, loads stay even, the memory is bounded."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.gateway.routing import BLOCK_TOKENS, Outages, ReplicaLoad, ReplicaRouter

KEYS = ("a", "b", "c")
loads_of = st.dictionaries(
    st.sampled_from(KEYS),
    st.builds(
        ReplicaLoad,
        works=st.booleans(),
        requests=st.integers(0, 300),
        waiting=st.integers(0, 50),
        free_tokens=st.none() | st.integers(0, 100_000),
        share=st.floats(0.0, 1.0),
    ),
    min_size=1,
)


def prompt(seed: int, blocks: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(blocks * BLOCK_TOKENS)]


@given(loads=loads_of, seed=st.integers(0, 5), known=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(KEYS))))
def test_a_request_goes_to_a_replica_that_works_if_one_does(
    loads: dict[str, ReplicaLoad], seed: int, known: list[tuple[int, str]]
) -> None:
    router: ReplicaRouter[str] = ReplicaRouter()
    for number, key in known:
        router.note(prompt(number, 3), key)
    chosen = router.choose(prompt(seed, 3), loads)
    assert chosen in loads
    assert loads[chosen].works or not any(load.works for load in loads.values())


@given(loads=loads_of)
def test_an_unknown_prompt_never_waits_where_it_could_begin_elsewhere(loads: dict[str, ReplicaLoad]) -> None:
    tokens = prompt(1, 2)
    chosen = ReplicaRouter[str]().choose(tokens, loads)
    others = [load for load in loads.values() if load.works or not any(each.works for each in loads.values())]
    if any(not load.waiting and (load.free_tokens is None or load.free_tokens >= len(tokens)) for load in others):
        assert not loads[chosen].waiting
        free = loads[chosen].free_tokens
        assert free is None or free >= len(tokens)


def test_of_two_replicas_that_know_a_prompt_the_less_busy_one_gets_it() -> None:
    router: ReplicaRouter[str] = ReplicaRouter()
    for key in ("b", "c", "c"):
        router.note(prompt(1, 4), key)
    loads = {"a": ReplicaLoad(requests=1), "b": ReplicaLoad(requests=2), "c": ReplicaLoad(requests=3)}
    assert router.choose(prompt(1, 4), loads) == "b"
    router.forget("b")
    assert router.choose(prompt(1, 4), loads) == "c"


def test_a_conversation_returns_while_its_replica_is_not_much_busier() -> None:
    router: ReplicaRouter[str] = ReplicaRouter()
    first = prompt(1, 4)
    router.note(first, "b")
    later = [*first, *prompt(2, 3)]
    even = {"a": ReplicaLoad(requests=10), "b": ReplicaLoad(requests=12)}
    assert router.choose(later, even) == "b"
    assert router.choose(prompt(3, 7), even) == "a"
    busy = {"a": ReplicaLoad(requests=10), "b": ReplicaLoad(requests=40)}
    assert router.choose(later, busy) == "a"
    full = {"a": ReplicaLoad(requests=10), "b": ReplicaLoad(requests=10, waiting=1)}
    assert router.choose(later, full) == "a"


def test_a_beginning_that_all_conversations_share_draws_them_to_no_replica() -> None:
    router: ReplicaRouter[str] = ReplicaRouter()
    system = prompt(1, 2)
    router.note(system, "b")
    loads = {"a": ReplicaLoad(requests=1), "b": ReplicaLoad(requests=2)}
    assert router.choose([*system, *prompt(2, 3)], loads) == "a"


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), share=st.sampled_from((0.5, 0.6, 0.75)))
def test_conversations_are_shared_out_as_planned(seed: int, share: float) -> None:
    """Closed loop: 40 conversations on two replicas."""
    rng = random.Random(seed)
    router: ReplicaRouter[str] = ReplicaRouter()
    at: dict[int, str] = {}
    shares = {"a": 1 - share, "b": share}
    for turn in range(300):
        talk = turn % 40 if turn < 40 else rng.randrange(40)
        at.pop(talk, None)
        counts = Counter(at.values())
        loads = {key: ReplicaLoad(requests=counts[key], share=shares[key]) for key in shares}
        at[talk] = router.choose(prompt(talk, 2 + turn // 100), loads)
        router.note(prompt(talk, 2 + turn // 100), at[talk])
        if turn == 39:
            assert abs(Counter(at.values())["b"] - 40 * share) <= 2, "new conversations"
    counts = Counter(at.values())
    assert counts["a"] / shares["a"] <= 1.5 * counts["b"] / shares["b"] + 20
    assert counts["b"] / shares["b"] <= 1.5 * counts["a"] / shares["a"] + 20


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(KEYS)), max_size=40))
def test_the_memory_is_bounded_and_forgets_a_lost_replica(noted: list[tuple[int, str]]) -> None:
    router: ReplicaRouter[str] = ReplicaRouter(most_blocks=10)
    for count, (number, key) in enumerate(noted, start=1):
        router.note(prompt(number, 3), key)
        assert router.num_blocks == min(10, 3 * len({each for each, _ in noted[:count]}))
    router.forget("a")
    for number, _ in noted:
        loads = {"a": ReplicaLoad(requests=1), "b": ReplicaLoad()}
        assert router.choose(prompt(number, 3), loads) == "b"


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.just(0.5) | st.floats(0.0, 0.9)), max_size=40))
def test_requests_move_from_a_replica_that_was_silent_all_the_time(events: list[tuple[str, bool, float]]) -> None:
    outages: Outages[str] = Outages(patience_s=1.0)
    now_s = 100.0
    since: dict[str, float | None] = {}
    for key, works, pause_s in events:
        now_s += pause_s
        outages.look(key, works=works, now_s=now_s)
        since[key] = None if works else (since.get(key) or now_s)
        expected = {each for each, from_s in since.items() if from_s is not None and now_s >= from_s + 1.0}
        assert set(outages.lost(now_s)) == expected
        waiting = [from_s + 1.0 for from_s in since.values() if from_s is not None and now_s < from_s + 1.0]
        assert outages.next_s(now_s) == pytest.approx(min(waiting)) if waiting else outages.next_s(now_s) is None
