"""The sequence table against a naive one that keeps every block id in a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.types import BlockCopy, BlockRun, TierMove
from edgepipe.errors import RemoteProtocolError, RequestInvalid
from edgepipe.ids import EngineId, Epoch, SequenceId, StepId
from edgepipe.sampling import SamplingParams, SequenceSampler, logit_edits, sample
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.sampling.lookup import LookupDrafter
from edgepipe.scheduler import PlaceKey
from edgepipe.stage.drafting import SequenceDrafter
from edgepipe.stage.held_keys import HeldKeys
from edgepipe.stage.sequences import ScoredPart, SequenceTable
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.plans import PlanRow, StepPlan, plan_from_wire
from edgepipe.wire.registrations import Registration, registrations_from_wire, registrations_to_wire
from tests.support.engine.wire_plans import plan_to_wire

NUM_BLOCKS = 64
HOST_BLOCKS = 9
BLOCK_SIZE = 4
EPOCH = Epoch(1, EngineId("engine"))
MODEL = ModelBounds(vocab_size=32, context_length=64)


def register(sequence: int, *, prompt_tokens: int = 1, seed: int = 0) -> Registration:
    return Registration(
        sequence=SequenceId(sequence), sampling=SamplingParams(seed=seed), choice=0, prompt_tokens=prompt_tokens
    )


def new_table(
    new_drafter: Callable[[Registration, SequenceSampler], SequenceDrafter] | None = None,
    *,
    held: HeldKeys | None = None,
) -> SequenceTable:
    return SequenceTable(
        held=held,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        host_places=(HOST_BLOCKS,),
        model=MODEL,
        new_sampler=lambda registration, fault: SequenceSampler(
            registration.sampling,
            prompt=registration.seen,
            generated=registration.generated,
            end_ids=registration.end_ids,
            fault=fault,
        ),
        new_drafter=new_drafter,
    )


def begin(table: SequenceTable, *registrations: Registration) -> tuple[SequenceId, ...]:
    """Tell the table of sequences, over the wire; a plan may begin them."""
    for message in registrations_to_wire(registrations, epoch=epoch_to_wire(EPOCH), with_sampling=True):
        for registration in registrations_from_wire(message.register).sequences:
            table.tell(registration)
    return tuple(each.sequence for each in registrations)


def plan(step: int = 1, *rows: PlanRow, **fields: object) -> StepPlan:
    changes: dict[str, object] = {
        "epoch": EPOCH,
        "step": StepId(step),
        "last_slice": 1,
        "rows": rows,
        **fields,
    }
    return StepPlan(**changes)  # pyright: ignore[reportArgumentType]


def row(sequence: int, position: int, num_tokens: int, *runs: tuple[int, int], sample: int = 0) -> PlanRow:
    return PlanRow(SequenceId(sequence), position, num_tokens, sample, tuple(BlockRun(*run) for run in runs))


def blocks(runs: tuple[BlockRun, ...]) -> list[int]:
    return [block for run in runs for block in range(run.start, run.start + run.count)]


@given(data=st.data())
def test_tables_grow_as_a_naive_one_does(data: st.DataObject) -> None:
    table = new_table()
    naive: dict[int, tuple[list[int], int, int]] = {}  # blocks, end, prompt length
    for step in range(1, data.draw(st.integers(1, 12)) + 1):
        frees = data.draw(st.lists(st.sampled_from(sorted(naive)), unique=True)) if naive else []
        for sequence in frees:
            del naive[sequence]
        registers = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=3))
        prompts = {sequence: data.draw(st.integers(0, 6)) for sequence in registers}
        naive |= {sequence: ([], -1, prompt) for sequence, prompt in prompts.items()}
        rows: list[PlanRow] = []
        wanted: list[tuple[int, list[int]]] = []
        positions: list[int] = []
        chosen = data.draw(st.lists(st.sampled_from(sorted(naive)), unique=True)) if naive else []
        for sequence in chosen:
            known, end, prompt = naive[sequence]
            position = data.draw(st.integers(0, end)) if end >= 0 else data.draw(st.integers(0, 8))
            num_tokens = data.draw(st.integers(1, 9))
            short = -(-(position + num_tokens) // BLOCK_SIZE) - len(known)
            runs: list[tuple[int, int]] = []
            while sum(count for _, count in runs) < short:
                start = data.draw(st.integers(0, NUM_BLOCKS - 4))
                runs.append((start, data.draw(st.integers(1, 4))))
            known = known + [block for start, count in runs for block in range(start, start + count)]
            naive[sequence] = (known, position + num_tokens, prompt)
            sample = int(position + num_tokens >= prompt and data.draw(st.booleans()))
            rows.append(row(sequence, position, num_tokens, *runs, sample=sample))
            wanted.append((sequence, known))
            if sample:
                positions.append(position + num_tokens - prompt)
        sent = plan(
            step,
            *rows,
            frees=tuple(map(SequenceId, frees)),
            registers=begin(table, *(register(sequence, prompt_tokens=prompts[sequence]) for sequence in registers)),
        )
        got = table.apply(plan_from_wire(plan_to_wire(sent, with_token_ids=True)))
        assert [(r.sequence, blocks(r.runs)) for r in got.rows] == wanted
        assert all(a.start + a.count != b.start for r in got.rows for a, b in zip(r.runs, r.runs[1:], strict=False))
        assert [sample.position for sample in got.samples] == positions
        ends = [sum(r.num_tokens for r in rows[: i + 1]) - 1 for i, r in enumerate(rows) if r.sample]
        assert got.logit_rows == ends
        assert len(table) == len(naive)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (plan(2, row(9, 0, 1, (0, 1))), "row of sequence 9, which is not registered"),
        (plan(2, frees=(SequenceId(9),)), "frees sequence 9"),
        (plan(2, row(1, 3, 1, (NUM_BLOCKS - 1, 2))), "assigns blocks 63-64"),
        (plan(2, row(1, 3, 1, (5, 0))), "assigns blocks"),
        (plan(2, row(1, 3, 2)), "would have 5 tokens"),
        (plan(2, row(1, 3, 0)), "a row without tokens"),
        (plan(2, row(1, 4, 1, (8, 1))), "continues at position 4"),
        (plan(2, row(1, 3, 1), row(1, 3, 1)), "two rows of one sequence"),
        (plan(2, row(1, 1, 1, sample=1)), "samples inside its prompt"),
        (plan(2, row(1, 3, 1), registers=(SequenceId(2),)), "begins sequence 2 without a registration"),
        (plan(2, row(1, 3, 1), copies=(BlockCopy(0, NUM_BLOCKS),)), "copies block 0 to 64"),
        (plan(2, row(1, 3, 1), moves=(TierMove(0, NUM_BLOCKS, 0, out=True),)), "moves 64 of memory class 0"),
        (plan(2, row(1, 3, 1), moves=(TierMove(0, 0, HOST_BLOCKS, out=True),)), "host memory 9"),
        (plan(2, row(1, 3, 1), moves=(TierMove(1, 0, 0, out=False),)), "memory class 1"),
    ],
)
def test_a_plan_that_cannot_be_followed_says_why(bad: StepPlan, why: str) -> None:
    table = new_table()
    table.apply(plan(1, row(1, 0, 3, (7, 1)), registers=begin(table, register(1, prompt_tokens=3))))
    with pytest.raises(RemoteProtocolError, match=why):
        table.apply(bad)


def test_registering_again_empties_the_block_table() -> None:
    table = new_table()
    table.apply(plan(1, row(1, 0, 3, (7, 1)), registers=begin(table, register(1))))
    again = table.apply(plan(2, row(1, 0, 5, (20, 2)), registers=begin(table, register(1))))
    assert blocks(again.rows[0].runs) == [20, 21]


@pytest.mark.parametrize("column", ["position", "num_tokens", "sample"])
def test_columns_of_different_lengths_are_refused(column: str) -> None:
    message = plan_to_wire(plan(1, row(1, 0, 1, (0, 1)), row(2, 0, 1, (1, 1))), with_token_ids=False)
    del getattr(message, column)[-1]
    with pytest.raises(RemoteProtocolError, match="columns of different lengths"):
        plan_from_wire(message)


def test_blocks_for_a_row_that_is_not_there_are_refused() -> None:
    message = plan_to_wire(plan(1, row(1, 0, 1, (0, 1))), with_token_ids=False)
    message.block_row[0] = 1
    with pytest.raises(RemoteProtocolError, match="assigns blocks to a missing row"):
        plan_from_wire(message)


def test_prompt_tokens_are_scored_by_those_before_them() -> None:
    sampling = SamplingParams(prompt_logprobs=True, top_logprobs=2)
    scored = Registration(sequence=SequenceId(1), sampling=sampling, prompt_tokens=5, prompt=(10, 11, 12, 13, 14))
    table = new_table()
    first = table.apply(
        plan(1, row(2, 0, 2, (1, 1)), row(1, 0, 3, (0, 1)), registers=begin(table, register(2), scored))
    )
    assert first.scored == (ScoredPart(SequenceId(1), 1, 3),)
    assert first.score_rows is not None
    assert first.score_rows.rows.tolist() == [2, 3, 4]
    assert first.score_rows.targets.tolist() == [11, 12, 13]
    assert first.score_rows.num_top == 2
    last = table.apply(plan(2, row(1, 3, 2, (5, 1), sample=1)))
    assert last.score_rows is not None
    assert (last.score_rows.rows.tolist(), last.score_rows.targets.tolist()) == ([0], [14])
    assert last.logit_rows == [1]
    decode = table.apply(plan(3, row(1, 5, 1, sample=1)))
    assert decode.score_rows is None


def test_a_stage_without_the_head_samples_nothing() -> None:
    table = SequenceTable(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, model=MODEL, new_sampler=None)
    got = table.apply(plan(1, row(1, 0, 3, (7, 1), sample=1), registers=begin(table, register(1, prompt_tokens=3))))
    assert got.samples == ()


OUTSIDE = 2_000_000_000
STRANGE = {
    "end_ids": Registration(
        sequence=SequenceId(1), sampling=SamplingParams(min_tokens=1), prompt_tokens=3, end_ids=(OUTSIDE,)
    ),
    "logit_bias": Registration(
        sequence=SequenceId(1), sampling=SamplingParams(logit_bias=((OUTSIDE, 1.0),)), prompt_tokens=3
    ),
    "prompt": Registration(
        sequence=SequenceId(1), sampling=SamplingParams(repetition_penalty=2.0), prompt_tokens=3, seen=(1, 2, OUTSIDE)
    ),
    "scored prompt": Registration(
        sequence=SequenceId(1), sampling=SamplingParams(prompt_logprobs=True), prompt_tokens=3, prompt=(1, 2, OUTSIDE)
    ),
    "generated": Registration(
        sequence=SequenceId(1), sampling=SamplingParams(presence_penalty=1.0), prompt_tokens=2, generated=(OUTSIDE,)
    ),
}


@pytest.mark.parametrize("registration", STRANGE.values(), ids=STRANGE.keys())
def test_a_sequence_with_ids_that_the_model_does_not_have_fails_alone(registration: Registration) -> None:
    table = new_table()
    rows = (row(1, 0, 3, (0, 1), sample=1), row(2, 0, 3, (1, 1), sample=1))
    got = table.apply(plan(1, *rows, registers=begin(table, registration, register(2, prompt_tokens=3))))
    assert got.score_rows is None, "a device would gather at those ids"
    edits = logit_edits(got.samples)
    assert max(edits.ids.tolist(), default=0) < MODEL.vocab_size
    strange, plain = sample(np.zeros((2, MODEL.vocab_size), np.float32), got.samples)
    assert isinstance(strange.error, RequestInvalid)
    assert plain.error is None


def test_rows_that_can_use_no_drafts_share_one_wish() -> None:
    table = new_table(lambda registration, sampler: SequenceDrafter(LookupDrafter, sampler))
    registers = begin(table, replace(register(1), draft="lookup"), register(2))
    first = row(1, 0, 1, (0, 1), sample=1), row(2, 0, 1, (1, 1), sample=1)
    wishes = [table.apply(plan(1, *first, registers=registers)).wishes]
    wishes += [table.apply(plan(step, row(1, step - 1, 1, sample=1))).wishes for step in (2, 3)]
    assert wishes[0][1] is None, "nothing drafts the other sequence"
    assert wishes[0][0] is wishes[1][0] is wishes[2][0], "none is made for a row"
    wanted = row(1, 3, 1, sample=1)._replace(draft=4)
    (wish,) = table.apply(plan(4, wanted)).wishes
    assert wish is not None
    assert (wish.count, wish.sequence) == (4, 1)


def test_a_plan_takes_the_keys_of_what_it_writes_and_leaves_those_of_shared_blocks() -> None:
    held = HeldKeys((NUM_BLOCKS,))
    table = new_table(held=held)
    held.name([PlaceKey(0, block, bytes([block]) * 16) for block in range(20)])
    first = row(1, 2 * BLOCK_SIZE, 5, (3, 1), (8, 4))  # blocks 3 and 8 are shared
    table.apply(plan(1, first, registers=begin(table, register(1, prompt_tokens=40))))
    assert [place for place in range(20) if place not in kept(held)] == [9, 10, 11]
    table.apply(plan(2, row(1, 13, 1, (12, 1)), copies=(BlockCopy(3, 15),)))
    assert [place for place in range(20) if place not in kept(held)] == [9, 10, 11, 12, 15]
    table.apply(plan(3, frees=(SequenceId(1),)))
    assert kept(held)[-2:] == [8, 3], "the beginning of the chat is the last that goes"


def test_a_block_that_a_step_writes_after_its_own_move_brought_it_has_no_key() -> None:
    held = HeldKeys((NUM_BLOCKS,))
    held.end(held.begin([TierMove(0, place, place, True, bytes([place]) * 16) for place in (5, 6)]))
    table = new_table(held=held)
    moves = tuple([TierMove(0, 10 + place, place, False) for place in (5, 6)])
    rows = table.apply(plan(1, row(1, 0, 1, (15, 1)), registers=begin(table, register(1)), moves=moves))
    held.end(rows.begun)
    assert [place for place in kept(held) if place >= 10] == [16]


def kept(held: HeldKeys) -> list[int]:
    """Return the places with keys, longest unused first."""
    return [place for page in held.pages(EPOCH) for place in page.places]
