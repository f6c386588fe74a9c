"""Drafts by the model's own layer: which tokens the layer computes, whatever is accepted, wanted or planned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.drafting import NO_DRAFTS, Drafts, DraftSource
from edgepipe.backend.types import NO_DRAFT, UNKNOWN_ID, BlockRun, DraftRow, StepOutput, TokenIds
from edgepipe.ids import SequenceId
from edgepipe.stage.drafting import LookupFirst
from edgepipe.stage.mtp_drafter import MtpDrafter, NextIds, share_out

BLOCK = 4
TABLE = (BlockRun(7, 100),)


class Layer:
    """Stands for the layer: it keeps the pairs of token and next token that it computed, by position."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[int, int]] = {}
        self.rows: list[DraftRow] = []

    def run(self, make: Callable[[], DraftRow]) -> TokenIds:
        row = make()
        self.rows.append(row)
        tokens = np.concatenate(row.kept).reshape(-1)
        assert len(tokens) == len(row.next_ids)
        self.pairs |= {row.position + at: pair for at, pair in enumerate(zip(tokens, row.next_ids, strict=True))}
        last = row.position + len(tokens) - 1 + row.depth - 1
        assert last < sum(run.count for run in row.runs) * BLOCK, "blocks hold the guesses' keys and values"
        return np.arange(100, 100 + row.depth, dtype=np.int32)


def output_of(tokens: list[int]) -> np.ndarray:
    """The output of a step stands for its tokens."""
    return np.array(tokens)[:, None]


def made(layer: Layer, tokens: list[int]) -> MtpDrafter:
    return MtpDrafter(SequenceId(3), tokens, layer.run, block_size=BLOCK)


def test_tokens_of_a_prompt_are_followed_by_the_next_ones_but_the_last() -> None:
    drafter = made(Layer(), [10, 11, 12, 13, 14])
    assert drafter.next_ids(0, 3, TABLE) == [11, 12, 13]
    assert drafter.next_ids(3, 2, TABLE) == [14, -1]
    assert drafter.next_ids(5, 3, TABLE) == [-1, -1, -1], "what a window guesses may be rejected"


def test_the_first_guesses_follow_the_prompt() -> None:
    layer = Layer()
    drafter = made(layer, [10, 11, 12])
    drafter.next_ids(0, 3, TABLE)
    drafter.keep(2, output_of([12]), 1)
    assert drafter.propose([20], 3) == Drafts((100, 101, 102), (DraftSource.MODEL,) * 3)
    assert layer.pairs == {2: (12, 20)}


@given(
    accepted=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    wanted=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_every_accepted_token_is_computed_with_the_one_behind_it(accepted: list[int], wanted: list[int]) -> None:
    """Windows are longer than what is accepted of them, and some steps want no drafts."""
    layer, tokens = Layer(), [10, 11, 12]
    drafter = made(layer, list(tokens))
    drafter.next_ids(0, 3, TABLE)
    drafter.keep(2, output_of([12]), 1)
    for step, (count, depth) in enumerate(zip(accepted, wanted, strict=False)):
        new = [20 + 10 * step + at for at in range(count if step else 1)]
        drafts = drafter.propose(new, depth)
        tokens += new
        assert len(drafts.ids) == depth
        after = accepted[step + 1] if step + 1 < len(accepted) else 1
        window = [tokens[-1], *range(500, 500 + after)]  # guesses, of which the first ``after - 1`` are right
        assert drafter.next_ids(len(tokens) - 1, len(window), TABLE) == [-1] * len(window)
        right = [20 + 10 * (step + 1) + at for at in range(after - 1)]
        drafter.keep(len(tokens) - 1, output_of([tokens[-1], *right, *window[after:]]), len(window))
    drafter.propose([999], 1)
    tokens.append(999)
    expected = {position: (tokens[position], tokens[position + 1]) for position in range(2, len(tokens) - 1)}
    assert layer.pairs == expected


def test_blocks_limit_the_guesses() -> None:
    layer = Layer()
    drafter = made(layer, [10] * 7)
    drafter.next_ids(0, 7, (BlockRun(0, 2),))
    drafter.keep(6, output_of([10]), 1)
    assert len(drafter.propose([20], 5).ids) == 2, "slots 6 and 7 are left"


def test_without_an_output_there_are_no_drafts() -> None:
    layer = Layer()
    drafter = made(layer, [10, 11])
    assert drafter.propose([20], 2) == NO_DRAFTS
    drafter.next_ids(2, 1, TABLE)
    drafter.keep(2, output_of([20]), 1)
    assert len(drafter.propose([21], 2).ids) == 2, "and then there are"
    assert layer.pairs == {2: (20, 21)}


def test_a_failing_layer_ends_the_drafts_and_not_the_answer() -> None:
    def fail(make: Callable[[], DraftRow]) -> TokenIds:
        raise RuntimeError("lost")

    drafter = MtpDrafter(SequenceId(3), [10, 11], fail, block_size=BLOCK)
    for step, tokens in enumerate(([20], [21])):
        drafter.next_ids(1 + step, 1, TABLE)
        drafter.keep(1 + step, output_of([11]), 1)
        assert drafter.propose(tokens, 2) == NO_DRAFTS


def test_a_step_s_output_goes_to_its_sequences_drafters() -> None:
    layers, following = (Layer(), Layer()), NextIds()
    first, second = made(layers[0], [10, 11, 12, 13]), made(layers[1], [30, 31])
    following.add(first, 1, 3, TABLE)
    following.add(None, 5, 2, TABLE)
    following.add(second, 1, 1, TABLE)
    ids = following.finish()
    assert ids is not None
    assert ids.tolist() == [12, 13, UNKNOWN_ID, NO_DRAFT, NO_DRAFT, UNKNOWN_ID]
    share_out(following.parts, StepOutput(kept=output_of([13, 31])))
    first.propose([14], 1)
    second.propose([32], 1)
    assert [layer.pairs for layer in layers] == [{3: (13, 14)}, {1: (31, 32)}]
    without = NextIds()
    without.add(None, 0, 4, TABLE)
    assert without.finish() is None, "steps without such drafts are as before"


def test_tokens_that_wait_too_long_are_dropped() -> None:
    layer, tokens = Layer(), [10]
    drafter = made(layer, list(tokens))
    for step in range(200):
        drafter.next_ids(step, 1, TABLE)
        drafter.keep(step, output_of([tokens[-1]]), 1)
        tokens.append(step)
        drafter.propose([step], 0)
    drafter.next_ids(200, 1, TABLE)
    drafter.keep(200, output_of([tokens[-1]]), 1)
    drafter.propose([7], 1)
    assert len(layer.rows) == 1
    assert max(layer.pairs) == 200
    assert 60 <= len(layer.pairs) <= 65


def test_a_long_match_drafts_without_the_layer_which_still_learns_all_tokens() -> None:
    layer, text = Layer(), [*range(20), 0, 1, 2, 3, 4, 5, 6]
    drafter = made(layer, list(text))
    first, drafts = LookupFirst(text, drafter), NO_DRAFTS
    for step, token in enumerate((7, 8, 50)):
        position = len(text) + step - 1
        drafter.next_ids(position, 1, TABLE)
        drafter.keep(position, output_of([-position]), 1)
        drafts = first.propose([token], 2)
        if token != 50:
            assert drafts == Drafts((token + 1, token + 2), (DraftSource.LOOKUP_LONG,) * 2)
            assert not layer.rows
    assert drafts == Drafts((100, 101), (DraftSource.MODEL,) * 2)
    assert layer.pairs == {26: (-26, 7), 27: (-27, 8), 28: (-28, 50)}
