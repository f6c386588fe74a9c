"""An emulated device that breaks, fills up and is mended while it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.faults import BROKEN, FULL

from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow
from edgepipe.errors import DeviceOutOfMemory, StageError, StepFailed
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, make_slices

CONFIG = emulated_model_config(num_layers=2)


def made(**settings: str) -> EmulatedBackend:
    return EmulatedBackend(BackendOptions(device="auto", settings={"time_factor": "0", **settings}))


def load(backend: EmulatedBackend) -> None:
    backend.load(make_slices([LayerRange(0, 2)], 2), EmulatedWeights(CONFIG), lambda _progress: None)
    backend.allocate_kv(num_blocks=4, block_size=16)


def compute(backend: EmulatedBackend) -> None:
    row = StepRow(sequence=SequenceId(1), position=0, num_tokens=1, runs=(BlockRun(0, 1),))
    step = Step(step=StepId(1), slice_index=0, rows=(row,), logit_rows=np.array([0], np.int32))
    backend.collect(backend.submit(backend.prepare(step), np.array([7], np.int32)))


def test_a_broken_device_fails_every_step_and_its_own_check_until_it_is_mended(tmp_path: Path) -> None:
    backend = made(faults=str(tmp_path))
    load(backend)
    compute(backend)
    (tmp_path / BROKEN).touch()
    for _ in range(3):
        with pytest.raises(StepFailed):
            compute(backend)
        with pytest.raises(StageError):
            backend.check()
    (tmp_path / BROKEN).unlink()
    backend.check()
    compute(backend)


def test_a_device_may_fail_a_given_number_of_steps(tmp_path: Path) -> None:
    backend = made(faults=str(tmp_path))
    load(backend)
    (tmp_path / BROKEN).write_text("2")
    for _ in range(2):
        with pytest.raises(StepFailed):
            compute(backend)
    backend.check()
    compute(backend)


def test_nothing_is_loaded_while_another_program_has_the_memory(tmp_path: Path) -> None:
    backend = made(faults=str(tmp_path))
    (tmp_path / FULL).touch()
    with pytest.raises(DeviceOutOfMemory, match="another program"):
        load(backend)
    (tmp_path / FULL).unlink()
    load(backend)
    compute(backend)


def test_a_device_may_want_block_tables_that_are_runs() -> None:
    assert not made().profile().contiguous_kv
    assert made(contiguous_kv="1").profile().contiguous_kv
