"""Recurrent layers on torch and MLX: both forms of a recurrence, states behind tokens in mid-row, shared snapshots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgepipe_torch import TorchBackend

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions, RowState, StateWrite, StepRow
from edgepipe.weights.weights import open_weights
from tests.support.models.recurrent_checkpoints import CONFIGS, TOKENS, save_checkpoint
from tests.support.numerics.harness import Pipeline, Track
from tests.support.numerics.recurrent_forms import MIXERS, compare_forms

BOUND = 1e-3  # share of the largest logit, chunked against step form
TOLERANCE = 1e-4  # share of the largest logit, against transformers
OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
KINDS = ("torch", "mlx")


def backend(kind: str) -> Backend:
    """A backend on this CPU; the test is skipped where MLX is not installed."""
    if kind == "torch":
        return TorchBackend(OPTIONS)
    pytest.importorskip("mlx.core")
    from edgepipe_mlx import MlxBackend

    return MlxBackend(OPTIONS)


@pytest.mark.parametrize("num_tokens", [512, pytest.param(4096, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_chunked_form_gives_what_the_step_form_gives(
    kind: str, mixer: str, num_tokens: int, tmp_path: Path
) -> None:
    save_checkpoint(MIXERS[mixer](), tmp_path, TOKENS, slow=True)
    forms = compare_forms(backend(kind), open_weights(tmp_path), num_tokens)
    assert forms.difference <= BOUND
    assert forms.wrong == 0
    assert forms.decided > num_tokens / 4, "many next ids are clear"


@dataclass(slots=True)
class Placed(Track):
    """A sequence whose rows name these slots."""

    state: RowState | None = None

    def row(self, num_tokens: int) -> StepRow:
        """See ``Track``."""
        return replace(Track.row(self, num_tokens), state=self.state)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "nemotron-h", "granite 4", "lfm2"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_kept_behind_tokens_in_mid_row_and_snapshots_stay(kind: str, name: str, tmp_path: Path) -> None:
    expected = save_checkpoint(CONFIGS[name](), tmp_path, TOKENS, slow=True)
    pipeline = Pipeline.build([backend(kind)], open_weights(tmp_path))
    runs = pipeline.blocks.take(len(TOKENS))

    def row(begin: int, end: int, read: int | None, *writes: tuple[int, int]) -> None:
        """Compute tokens [begin, end) and hold their logits against transformers'."""
        state = RowState(read, tuple(StateWrite(after, slot) for after, slot in writes))
        track = Placed(begin + 1, runs, begin, state=state)
        found = pipeline.step([(track, TOKENS[begin:end])], all_logits=True)
        atol = TOLERANCE * float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected[begin:end], rtol=0, atol=atol)

    row(0, 64, None, (13, 1), (40, 2), (64, 3))
    row(40, 70, 2, (30, 4))  # in one row from a snapshot in the middle
    for at in range(40, 44):  # token by token from the same
        row(at, at + 1, 2 if at == 40 else 5, (1, 5))
    row(13, 50, 1, (1, 6), (37, 7))  # behind the first token
    row(14, 15, 6, (1, 6))
    row(64, 65, 3, (1, 8))
    row(65, 70, 8, (5, 8))
    row(40, 41, 2, (1, 9))  # after two that went on from there
    row(13, 70, 1, (57, 9))
    pipeline.close()
