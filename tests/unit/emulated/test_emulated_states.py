"""Recurrent layers of the emulated model: tokens that depend on every earlier token, once, in order."""

from __future__ import annotations

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.oracle import generate

from edgepipe.backend.types import BackendOptions, BlockRun, RowState, StateWrite, Step, StepRow
from edgepipe.errors import StepFailed
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, Slice

CONFIG = emulated_model_config(num_layers=5, context_length=256, attention_every=3)
WHOLE = Slice(index=0, layers=LayerRange(0, 5), embedding=True, head=True)
PROMPT = [(7 * n) % 200 for n in range(70)]


@pytest.fixture
def made() -> EmulatedBackend:
    backend = EmulatedBackend(BackendOptions(settings={"time_factor": "0"}))
    backend.load([WHOLE], EmulatedWeights(CONFIG), lambda _: None)
    backend.allocate_kv(num_blocks=64, block_size=4, state_slots=4)
    return backend


def row(position: int, count: int, *, number: int = 1, read: int | None = 0, **writes: int) -> StepRow:
    """``writes``: slots by ``at_N``, the number of tokens before the state."""
    found = tuple(StateWrite(int(name[3:]), slot) for name, slot in writes.items())
    runs = (BlockRun(32 * (number - 1), 32),)
    state = RowState(read if position else None, found)
    return StepRow(sequence=SequenceId(number), position=position, num_tokens=count, runs=runs, state=state)


def tokens_of(made: EmulatedBackend, tokens: list[int], *rows: StepRow) -> list[int]:
    """Return the next token of each row."""
    ends = np.cumsum([each.num_tokens for each in rows], dtype=np.int32) - 1
    step = Step(step=StepId(1), slice_index=0, rows=rows, logit_rows=ends.astype(np.int32))
    output = made.collect(made.submit(made.prepare(step), np.array(tokens, np.int32)))
    assert output.logits is not None
    return [int(each) for each in output.logits.argmax(axis=1)]


@pytest.mark.parametrize("chunks", [(70,), (30, 1, 25, 14), (1,) * 70])
def test_a_prompt_in_chunks_is_the_whole_prompt(made: EmulatedBackend, chunks: tuple[int, ...]) -> None:
    found, position = [0], 0
    for count in chunks:
        part = row(position, count, **{f"at_{count}": 0})
        found = tokens_of(made, PROMPT[position : position + count], part)
        position += count
    assert found == generate(PROMPT, 1, CONFIG)


def test_a_snapshot_serves_several_sequences(made: EmulatedBackend) -> None:
    tokens_of(made, PROMPT, row(0, 70, at_40=2, at_70=0))
    both = [*PROMPT[40:50], *PROMPT[40:60]]
    rows = [row(40, 10, read=2, at_10=1), row(40, 20, number=2, read=2, at_20=3)]
    made_first = tokens_of(made, PROMPT[:40], row(0, 40, number=2, at_40=3))  # the KV of the second sequence
    assert made_first == generate(PROMPT[:40], 1, CONFIG)
    assert tokens_of(made, both, *rows) == [generate(PROMPT[:50], 1, CONFIG)[0], generate(PROMPT[:60], 1, CONFIG)[0]]


@pytest.mark.parametrize("slot", [0, 3])
def test_a_stale_state_and_a_lost_one_give_another_token(made: EmulatedBackend, slot: int) -> None:
    tokens_of(made, PROMPT[:69], row(0, 69, at_68=0, at_69=1))
    assert tokens_of(made, PROMPT[69:], row(69, 1, read=slot, at_1=2)) != generate(PROMPT, 1, CONFIG)


def test_a_token_twice_gives_another_token(made: EmulatedBackend) -> None:
    tokens_of(made, PROMPT, row(0, 70, at_70=0))
    assert tokens_of(made, PROMPT[69:], row(69, 1, at_1=0)) != generate(PROMPT, 1, CONFIG)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([row(0, 4, at_4=4)], "no slot 4"),
        ([row(4, 4, read=9, at_4=0)], "no slot 9"),
        ([row(0, 4, at_3=0)], "not those of its tokens"),
        ([row(0, 4, at_2=0, at_4=0)], "one slot"),
        ([row(0, 4, at_4=0), row(0, 4, number=2, at_4=0)], "one slot"),
        ([row(4, 4, read=1, at_4=0), row(0, 4, number=2, at_4=1)], "another row reads"),
        ([row(0, 4)], "lacks the slots"),
    ],
)
def test_slots_that_rows_may_not_name_are_refused(made: EmulatedBackend, rows: list[StepRow], problem: str) -> None:
    count = sum(each.num_tokens for each in rows)
    with pytest.raises(StepFailed, match=problem):
        tokens_of(made, [1] * count, *rows)


def test_the_pool_takes_the_bytes_of_its_slots() -> None:
    made = EmulatedBackend(BackendOptions(settings={"time_factor": "0"}))
    made.load([WHOLE], EmulatedWeights(CONFIG), lambda _: None)
    made.allocate_kv(num_blocks=64, block_size=4)
    before = made.profile().memory_free_bytes
    made.allocate_kv(num_blocks=64, block_size=4, state_slots=10)
    assert before - made.profile().memory_free_bytes == 10 * CONFIG.state_bytes() > 0
