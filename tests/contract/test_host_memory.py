"""Blocks and states go to host memory and come back elsewhere, on every backend: nothing is computed otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgepipe.backend.protocol import Backend, DiskBackend, HostMemoryBackend
from edgepipe.backend.types import BlockRun, RowState, StateWrite, StepRow, TierMove, WindowRuns
from edgepipe.spec.facts import ModelConfig
from edgepipe.testing.tiny_model import tiny_config
from tests.contract.test_windowed_kv import windowed
from tests.support.backends.maker import Maker
from tests.support.backends.steps import make_step, result_of, run_step, step_row, token_ids
from tests.support.models.recurrent_layers import MODELS

TOKENS = np.random.default_rng(11).integers(1, 31, 36).tolist()
OTHERS = np.random.default_rng(12).integers(1, 31, 24).tolist()
KNOWN = 32  # whole blocks: a sequence goes on behind these


def models() -> dict[str, ModelConfig]:
    found = {"context": tiny_config(), "windows": windowed()}
    return found | {f"states-{name}": config for name, config in MODELS.items()}


@pytest.fixture(params=list(models()))
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return models()[request.param]


def test_a_conversation_goes_on_in_other_blocks_after_host_memory(maker: Maker, model: ModelConfig) -> None:
    """Its blocks and its state leave, others take their places, and it comes back to other places."""
    size = maker.block_size
    has_windows, has_states = any(layer.window for layer in model.layers), bool(model.state_bytes())
    blocks = -(-len(TOKENS) // size)
    backend, whole = maker.loaded(model), maker.loaded(model)
    places = (4, *([4] if has_windows else []), *([3] if has_states else []))
    for each in (backend, whole):
        each.allocate_kv(
            num_blocks=3 * blocks,
            block_size=size,
            window_blocks=(3 * blocks - 1,) if has_windows else (),
            state_slots=2 if has_states else 0,
            host_places=places if each is backend else (),
        )

    def row(position: int, count: int, first: int, *, read: int | None, write: int, sequence: int = 1) -> StepRow:
        made = step_row(position, count, (first, blocks), sequence=sequence)
        if has_windows:
            made = replace(made, windows=(WindowRuns(0, (BlockRun(first, blocks),)),))
        return replace(made, state=RowState(read, (StateWrite(count, write),))) if has_states else made

    def moves(first: int, slot: int, *, out: bool) -> tuple[TierMove, ...]:
        moved = [
            TierMove(number, first + index, 3 - index, out)
            for number in range(1 + has_windows)
            for index in range(min(blocks, 4))
        ]
        return (*moved, *([TierMove(1 + has_windows, slot, 2, out)] if has_states else []))

    prompt, rest = token_ids(TOKENS[:KNOWN]), token_ids(TOKENS[KNOWN:])
    run_step(whole, make_step([row(0, KNOWN, 0, read=None, write=0)]), prompt)
    expected = run_step(whole, make_step([row(KNOWN, 4, 0, read=0, write=0)]), rest)

    run_step(backend, make_step([row(0, KNOWN, 0, read=None, write=0)]), prompt)
    leaving = replace(make_step([row(0, 24, 0, read=None, write=0, sequence=2)], step=2), moves=moves(0, 0, out=True))
    run_step(backend, leaving, token_ids(OTHERS))
    coming = replace(make_step([row(KNOWN, 4, blocks, read=1, write=1)], step=3), moves=moves(blocks, 1, out=False))
    maker.assert_same(run_step(backend, coming, rest), expected)


@pytest.mark.parametrize("name", ["context", "windows", f"states-{next(iter(MODELS))}"])
def test_a_place_s_bytes_are_all_of_its_block_and_its_state(maker: Maker, name: str) -> None:
    """A disk below host memory reads them, and writes them elsewhere."""
    model = models()[name]
    backend = maker.loaded(model)
    if not isinstance(backend, DiskBackend):
        pytest.skip("this backend has no disk below host memory")
    size = maker.block_size
    has_windows, has_states = any(layer.window for layer in model.layers), bool(model.state_bytes())
    blocks = -(-len(TOKENS) // size)
    numbers = range(1 + has_windows + has_states)
    backend.allocate_kv(
        num_blocks=2 * blocks,
        block_size=size,
        window_blocks=(2 * blocks - 1,) if has_windows else (),
        state_slots=2 if has_states else 0,
        host_places=(2 * blocks,) * len(numbers),
    )

    def row(position: int, count: int, *, read: int | None) -> StepRow:
        made = step_row(position, count, (0, blocks))
        if has_windows:
            made = replace(made, windows=(WindowRuns(0, (BlockRun(0, blocks),)),))
        return replace(made, state=RowState(read, (StateWrite(count, 0),))) if has_states else made

    def moves(first: int, *, out: bool) -> tuple[TierMove, ...]:
        places = [(number, index) for number in numbers for index in range(blocks)]
        is_state = has_states * (len(numbers) - 1)
        return tuple(
            TierMove(number, index, first + index, out)
            for number, index in places
            if not index or not (has_states and number == is_state)
        )

    prompt, rest = token_ids(TOKENS[:KNOWN]), token_ids(TOKENS[KNOWN:])
    run_step(backend, make_step([row(0, KNOWN, read=None)]), prompt)
    going = make_step([row(KNOWN, 4, read=0)], step=2)
    expected = run_step(backend, replace(going, moves=moves(0, out=True)), rest)
    for number in numbers:
        for index in range(blocks):
            places = (backend.host_place(number, index), backend.host_place(number, blocks + index))
            for source, target in zip(*places, strict=True):
                assert (source.format, source.ndim) == ("B", 1)
                target[:] = bytes(source)
    others = token_ids((2 * OTHERS)[:KNOWN])
    run_step(backend, make_step([row(0, KNOWN, read=None)], step=3), others)
    coming = replace(make_step([row(KNOWN, 4, read=0)], step=4), moves=moves(blocks, out=False))
    maker.assert_same(run_step(backend, coming, rest), expected)


@pytest.mark.parametrize("name", ["context", f"states-{next(iter(MODELS))}"])
def test_memory_that_is_given_back_spoils_nothing_else_and_is_used_again(maker: Maker, name: str) -> None:
    model = models()[name]
    backend = maker.loaded(model)
    if not isinstance(backend, HostMemoryBackend):
        pytest.skip("this backend gives no host memory back")
    size, has_states = maker.block_size, bool(model.state_bytes())
    blocks = -(-len(TOKENS) // size)
    numbers = range(1 + has_states)
    backend.allocate_kv(
        num_blocks=blocks, block_size=size, state_slots=2 if has_states else 0, host_places=(64,) * len(numbers)
    )
    assert len(backend.host_place_bytes()) == len(numbers)
    assert min(backend.host_place_bytes()) > 0

    def row(position: int, count: int, *, read: int | None) -> StepRow:
        made = step_row(position, count, (0, blocks))
        return replace(made, state=RowState(read, (StateWrite(count, 0),))) if has_states else made

    def moves(*, out: bool) -> tuple[TierMove, ...]:
        context = [TierMove(0, index, 20 + index, out) for index in range(blocks)]
        return (*context, *([TierMove(1, 0, 20, out)] if has_states else []))

    prompt, rest = token_ids(TOKENS[:KNOWN]), token_ids(TOKENS[KNOWN:])
    for number in numbers:
        backend.give_back(number, range(64))
    run_step(backend, make_step([row(0, KNOWN, read=None)]), prompt)
    going = make_step([row(KNOWN, 4, read=0)], step=2)
    expected = run_step(backend, replace(going, moves=moves(out=True)), rest)
    for number in numbers:
        backend.give_back(number, [*range(20), *range(20 + blocks, 64)])
    run_step(backend, make_step([row(0, KNOWN, read=None)], step=3), token_ids((2 * OTHERS)[:KNOWN]))
    coming = replace(make_step([row(KNOWN, 4, read=0)], step=4), moves=moves(out=False))
    maker.assert_same(run_step(backend, coming, rest), expected)


def test_moves_of_one_step_follow_one_another(maker: Maker) -> None:
    """A place in host memory is read and then taken by another block of the same step."""
    size = maker.block_size
    backend = maker.loaded(tiny_config())
    backend.allocate_kv(num_blocks=5, block_size=size, host_places=(1,))
    run_step(backend, make_step([step_row(0, 16, (0, 1))]), token_ids(TOKENS[:16]))
    run_step(backend, make_step([step_row(0, 16, (1, 1), sequence=2)], step=2), token_ids(OTHERS[:16]))
    leaving = make_step([step_row(15, 1, (1, 1), sequence=2)], step=3)
    run_step(backend, replace(leaving, moves=(TierMove(0, 0, 0, True),)), token_ids(OTHERS[15:16]))
    there_and_back = (TierMove(0, 2, 0, False), TierMove(0, 1, 0, True), TierMove(0, 0, 0, False))
    rows = [step_row(16, 1, (2, 2)), step_row(16, 1, (0, 1), (4, 1), sequence=2)]
    step = replace(make_step(rows, step=4), moves=there_and_back)
    found = run_step(backend, step, token_ids(TOKENS[16:17], OTHERS[16:17]))
    fresh = maker.loaded(tiny_config())
    fresh.allocate_kv(num_blocks=3, block_size=size)
    expected = [
        run_step(fresh, make_step([step_row(0, 17, (0, 2))], logit_rows=[16]), token_ids(tokens[:17]))
        for tokens in (TOKENS, OTHERS)
    ]
    maker.assert_same(found, np.concatenate(expected))


@pytest.mark.parametrize("name", ["context", "windows", f"states-{next(iter(MODELS))}"])
def test_moves_beside_a_submitted_step_change_nothing(maker: Maker, name: str) -> None:
    """Two chats leave and come back in turns, each beside a step of the other one or of its own that still computes."""
    model = models()[name]
    size = maker.block_size
    has_windows, has_states = any(layer.window for layer in model.layers), bool(model.state_bytes())
    blocks, kept = -(-len(TOKENS) // size), -(-KNOWN // size)
    chats = {1: TOKENS, 2: (2 * OTHERS)[: len(TOKENS)]}

    def allocated(*, moving: bool) -> Backend:
        backend = maker.loaded(model)
        backend.allocate_kv(
            num_blocks=4 * blocks,
            block_size=size,
            window_blocks=(4 * blocks,) if has_windows else (),
            state_slots=6 if has_states else 0,
            host_places=(8, *([8] if has_windows else []), *([4] if has_states else [])) if moving else (),
        )
        return backend

    def row(chat: int, position: int, count: int, place: int) -> StepRow:
        made = step_row(position, count, (place * blocks, blocks), sequence=chat)
        if has_windows:
            made = replace(made, windows=(WindowRuns(0, (BlockRun(place * blocks, blocks),)),))
        # The state behind the known tokens stays as it is: a later step reads it again.
        state = (
            RowState(place, (StateWrite(count, 3 + chat),)) if position else RowState(None, (StateWrite(count, place),))
        )
        return replace(made, state=state) if has_states else made

    def moves(chat: int, place: int, *, out: bool) -> tuple[TierMove, ...]:
        host = kept * (chat - 1)
        moved = [
            TierMove(number, place * blocks + index, host + index, out)
            for number in range(1 + has_windows)
            for index in range(kept)
        ]
        return (*moved, *([TierMove(1 + has_windows, place, chat - 1, out)] if has_states else []))

    def run(
        backend: Backend, steps: Sequence[tuple[int, int, int, int, tuple[TierMove, ...]]]
    ) -> dict[int, np.ndarray]:
        """Run steps of (chat, position, tokens, place, moves), several at once; return each chat's last one."""
        found: dict[int, np.ndarray] = {}
        waiting: list[tuple[int, Any]] = []
        for number, (chat, position, count, place, moved) in enumerate(steps):
            step = replace(make_step([row(chat, position, count, place)], step=number + 1), moves=moved)
            if len(waiting) == backend.max_submitted:
                of, ticket = waiting.pop(0)
                found[of] = result_of(backend.collect(ticket))
            ids = token_ids(chats[chat][position : position + count])
            waiting.append((chat, backend.submit(backend.prepare(step), ids)))
        return found | {of: result_of(backend.collect(ticket)) for of, ticket in waiting}

    moved = run(
        allocated(moving=True),
        [
            (1, 0, KNOWN, 0, ()),
            (2, 0, KNOWN, 1, moves(1, 0, out=True)),  # written by the step before
            (2, KNOWN, 2, 1, moves(1, 2, out=False)),
            (1, KNOWN, 2, 2, moves(2, 1, out=True)),  # its known blocks: the step before read them, and wrote behind
            (2, KNOWN, 4, 0, moves(2, 0, out=False)),
            (1, KNOWN, 4, 3, moves(1, 3, out=False)),
        ],
    )
    stayed = run(
        allocated(moving=False), [(chat, *part, chat, ()) for chat in chats for part in ((0, KNOWN), (KNOWN, 4))]
    )
    for chat in chats:
        maker.assert_same(moved[chat], stayed[chat])
