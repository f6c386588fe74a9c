"""Windowed layers of the emulated model: pools per class, and tokens that depend on every slot of a window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.oracle import generate

from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow, WindowRuns
from edgepipe.errors import StepFailed
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.memory_classes import memory_classes

CONFIG = emulated_model_config(num_layers=6, context_length=256, windows=(12, 12, None, 20))
WHOLE = Slice(index=0, layers=LayerRange(0, 6), embedding=True, head=True)
BLOCK = 4


def backend(*, window_blocks: tuple[int, ...]) -> EmulatedBackend:
    made = EmulatedBackend(BackendOptions(settings={"time_factor": "0"}))
    made.load([WHOLE], EmulatedWeights(CONFIG), lambda _: None)
    made.allocate_kv(num_blocks=64, block_size=BLOCK, window_blocks=window_blocks)
    return made


def next_token(made: EmulatedBackend, tokens: list[int], position: int, windows: tuple[WindowRuns, ...]) -> int:
    row = StepRow(
        sequence=SequenceId(1),
        position=position,
        num_tokens=len(tokens),
        runs=(BlockRun(0, 64),),
        windows=windows,
    )
    step = Step(step=StepId(1), slice_index=0, rows=(row,), logit_rows=np.array([len(tokens) - 1], np.int32))
    output = made.collect(made.submit(made.prepare(step), np.array(tokens, np.int32)))
    assert output.logits is not None
    return int(output.logits[0].argmax())


@pytest.mark.parametrize("chunks", [(70,), (30, 1, 25, 14), (1,) * 70])
@pytest.mark.parametrize("classed", [False, True])
def test_tokens_see_their_windows_only(chunks: tuple[int, ...], classed: bool) -> None:
    made = backend(window_blocks=(32, 32) if classed else ())
    prompt = [(7 * n) % 200 for n in range(70)]
    found, position = 0, 0
    for count in chunks:
        # Tables that begin at the window's first block, at other places in each class.
        windows = tuple(
            WindowRuns(first, (BlockRun(first % 3, 18 - first),))
            for first in (max(0, position - window + 1) // BLOCK for window in (12, 20))
        )
        windows = tuple(replace(each, runs=(BlockRun(each.first, 18 - each.first),)) for each in windows)
        found = next_token(made, prompt[position : position + count], position, windows if classed else ())
        position += count
    assert [found] == generate(prompt, 1, CONFIG)


def test_a_window_changes_the_answer_and_what_is_before_it_does_not_reach_one_layer() -> None:
    prompt = [(7 * n) % 200 for n in range(70)]
    full = emulated_model_config(num_layers=6, context_length=256)
    assert generate(prompt, 8, full) != generate(prompt, 8, CONFIG)
    single = emulated_model_config(num_layers=1, context_length=256, windows=(12,))
    assert generate(prompt, 1, single) == generate([1, 2, *prompt[2:]], 1, single)


def test_a_table_that_begins_behind_the_window_fails() -> None:
    made = backend(window_blocks=(32, 32))
    windows = (WindowRuns(3, (BlockRun(0, 10),)), WindowRuns(0, (BlockRun(0, 10),)))
    with pytest.raises(StepFailed, match="begins at token 12"):
        next_token(made, [1], 20, windows)


def test_pools_take_the_bytes_of_their_blocks() -> None:
    made = backend(window_blocks=())
    whole = made.profile().memory_free_bytes
    made.allocate_kv(num_blocks=64, block_size=BLOCK, window_blocks=(10, 20))
    layer = BLOCK * CONFIG.kv_bytes_per_token((0,), form="bfloat16")
    classes = memory_classes(CONFIG)
    assert (classes.windows, classes.of_layer) == ((12, 20), (1, 1, 0, 2, 1, 1))
    assert made.profile().memory_free_bytes - whole == layer * (4 * 54 + 1 * 44)
