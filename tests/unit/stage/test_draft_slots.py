"""A draft model follows sequences: what it keeps is always a part of their tokens, in blocks of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.drafting import SingleTokens
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.types import BackendOptions
from edgepipe.stage.draft_child import DraftRunner
from edgepipe.stage.draft_slots import DraftSlots, Tokens

CONFIG = emulated_model_config(num_layers=2, context_length=96)
BLOCK = 4


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


class Memory:
    """A pool of blocks that remembers which token each place was written for, as a model's keys do."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = DraftSlots(num_blocks=num_blocks, block_size=BLOCK)
        self.places: dict[int, int] = {}
        self.num_blocks = num_blocks

    def ask(self, tokens: Sequence[int], guesses: Sequence[int]) -> bool:
        """Compute what is missing, and all guesses but the last. Return whether there was room."""
        slot = self.slots.begin(ids(tokens), len(tokens) + len(guesses) - 1)
        if slot is None:
            return False
        assert slot.tokens.tolist() == list(tokens[: len(slot.tokens)])
        assert len(slot.tokens) < len(tokens)
        wanted = [*tokens, *guesses[:-1]]
        for position in range(len(slot.tokens), len(wanted)):
            self.places[slot.blocks[position // BLOCK] * BLOCK + position % BLOCK] = wanted[position]
        slot.tokens = ids(wanted)
        return True

    def check(self) -> None:
        """Every slot's tokens are still in its blocks, and no block has two owners."""
        owned = [block for slot in self.slots.slots for block in slot.blocks]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(self.num_blocks))
        for slot in self.slots.slots:
            held = [self.places[slot.blocks[at // BLOCK] * BLOCK + at % BLOCK] for at in range(len(slot.tokens))]
            assert held == slot.tokens.tolist()
            assert sum(run.count for run in slot.runs) == len(slot.blocks)


STEP = st.tuples(
    st.integers(0, 10),  # chat
    st.lists(st.integers(0, 3), min_size=1, max_size=12),  # what it gets
    st.lists(st.integers(0, 3), min_size=1, max_size=7),  # guesses
    st.sampled_from(["goes on", "goes on", "goes on", "new", "second turn"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(2, 30))
def test_slots_hold_the_beginning_of_each_question(steps: list[tuple[int, list[int], list[int], str]], n: int) -> None:
    memory = Memory(n)
    chats: dict[int, list[int]] = {}
    for chat, tokens, guesses, kind in steps:
        known = chats.get(chat, [])
        chats[chat] = {"goes on": known, "new": [], "second turn": known[: len(known) // 2]}[kind] + tokens
        room = memory.ask(chats[chat], guesses)
        assert room == (-(-(len(chats[chat]) + len(guesses) - 1) // BLOCK) <= n)
        memory.check()


def test_a_lone_chat_is_not_computed_twice() -> None:
    """Of a window whose drafts were wrong, only what follows the right ones is computed again."""
    memory = Memory(64)
    memory.ask([1, 2, 3, 4], [5, 6, 7])
    slot = memory.slots.begin(ids([1, 2, 3, 4, 5, 9]), 12)
    assert slot is not None
    assert slot.tokens.tolist() == [1, 2, 3, 4, 5]


def test_chats_with_a_common_beginning_keep_their_own_slots() -> None:
    system = list(range(40))
    memory = Memory(400)
    for turn in range(3):
        for chat in (100, 200):
            memory.ask([*system, *[chat] * (20 + turn)], [1])
    assert len(memory.slots.slots) == 2
    assert sorted(len(slot.tokens) for slot in memory.slots.slots) == [62, 62]


def oracle(tokens: Sequence[int], count: int) -> list[int]:
    seen = SingleTokens(CONFIG, tokens)
    found: list[int] = []
    while len(found) < count:
        found.append(seen.next_token())
        seen.append(found[-1])
    return found


def runner(*, vocab_size: int = CONFIG.vocab_size) -> DraftRunner:
    return DraftRunner(
        EmulatedBackend(BackendOptions(settings={"time_factor": "0"})), EmulatedWeights(CONFIG), vocab_size=vocab_size
    )


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 7), st.integers(0, 7), st.booleans(), st.integers(0, 9)),
        max_size=12,
    ),
)
def test_guesses_are_those_of_the_whole_sequence(steps: list[tuple[int, int, int, bool, int]]) -> None:
    """Whatever was accepted of earlier guesses, and whichever chats came between: the model's own next tokens."""
    model = runner()
    chats: dict[int, list[int]] = {}
    for chat, count, accepted, rejected, ahead in steps:
        tokens = chats.setdefault(chat, [chat + 1, 7, 9])
        _, guesses = model.guess(ids(tokens), count)
        assert guesses == oracle(tokens, min(count, CONFIG.context_length - len(tokens) + 1))
        for _ in range(ahead):
            model.go_on()
        bonus = [3] if rejected or not guesses[:accepted] else oracle([*tokens, *guesses[:accepted]], 1)
        tokens += [*guesses[:accepted], *bonus]
        if len(tokens) >= CONFIG.context_length:
            del chats[chat]


def test_a_question_that_was_foreseen_costs_no_step() -> None:
    model = runner()
    _, guesses = model.guess(ids([5, 6, 7]), 3)
    while model.go_on():
        pass
    steps = model._steps
    tokens = [5, 6, 7, *guesses, *oracle([5, 6, 7, *guesses], 1)]
    assert model.guess(ids(tokens), 3) == (0, oracle(tokens, 3))
    assert model._steps == steps == 7
    other = [5, 6, 7, *guesses[:2], (guesses[2] + 1) % CONFIG.vocab_size]
    assert model.guess(ids(other), 3)[1] == oracle(other, 3), "a foreseen question that does not come"


def test_tokens_that_were_missed_are_not_a_cost_of_guesses() -> None:
    model = runner()
    assert model.guess(ids([1, 2, 3]), 1)[0] == 0
    assert model.guess(ids([1, 2, 3, *[4] * 8]), 1)[0] == 0, "a window's tokens"
    assert model.guess(ids([1, 2, 3, *[4] * 40]), 1)[0] > 0


def test_no_guess_follows_what_the_model_cannot_hold() -> None:
    model = runner()
    assert model.guess(ids([1, CONFIG.vocab_size]), 3) == (0, []), "a token that it lacks"
    assert model.guess(ids([1] * (CONFIG.context_length + 1)), 3) == (0, [])
    assert len(model.guess(ids([1] * (CONFIG.context_length - 1)), 3)[1]) == 2, "up to the end of its context"


@pytest.mark.parametrize("size", [10, 100])
def test_every_guess_is_a_token_of_the_served_model(size: int) -> None:
    model = runner(vocab_size=size)
    assert max(model.guess(ids([5, 6]), 7)[1]) < size
