"""KV in 4 bits on the emulated backend: tokens depend on the lower bits of their span, and on nothing else."""

from __future__ import annotations

import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.oracle import generate
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.types import BackendOptions
from edgepipe.errors import StepFailed
from edgepipe.spec.facts import LayerRange, Slice
from tests.support.backends.steps import make_step, run_step, step_row, token_ids

CONFIG = emulated_model_config(num_layers=2, context_length=256)
WHOLE = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)
TABLE = (0, 8)  # of 16 tokens: 80, and what their lower bits need
PROMPT = [(7 * n) % 200 for n in range(80)]


def loaded() -> EmulatedBackend:
    made = EmulatedBackend(BackendOptions(kv="4bit", settings={"time_factor": "0"}))
    made.load([WHOLE], EmulatedWeights(CONFIG), lambda _: None)
    made.allocate_kv(num_blocks=12, block_size=16)
    return made


def read(made: EmulatedBackend, start: int, end: int) -> int:
    """Compute some tokens of the prompt; return the token behind them."""
    logits = run_step(made, make_step([step_row(start, end - start, TABLE)]), token_ids(PROMPT[start:end]))
    return int(logits[-1].argmax())


@given(st.lists(st.integers(1, 79), max_size=6, unique=True))
def test_chunks_change_nothing(edges: list[int]) -> None:
    made, begin, found = loaded(), 0, 0
    for end in [*sorted(edges), 80]:
        found, begin = read(made, begin, end), end
    assert [found] == generate(PROMPT, 1, CONFIG)


@pytest.mark.parametrize(("known", "same"), [(32, True), (40, False), (47, False), (48, True)])
def test_only_a_begun_span_needs_what_lies_behind_the_tokens(known: int, same: bool) -> None:
    """Another sequence takes the blocks behind the last token; a sequence that begins with a span does not care."""
    made = loaded()
    read(made, 0, known)
    free = known // 16 + 1 if known % 16 else known // 16
    others = make_step([step_row(0, 48, (free, 12 - free), sequence=2)])
    run_step(made, others, token_ids([3] * 48))
    assert ([read(made, known, 80)] == generate(PROMPT, 1, CONFIG)) == same


def test_a_table_without_room_for_lower_bits_is_refused() -> None:
    with pytest.raises(StepFailed, match="48 slots for 49 tokens"):
        loaded().prepare(make_step([step_row(0, 1, (0, 3))]))
    loaded().prepare(make_step([step_row(0, 16, (0, 4))]))
