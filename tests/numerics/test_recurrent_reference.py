"""Checkpoints that ``transformers`` saves of families with recurrent layers, read by edgepipe, give its logits.

The decoder is the reference in numpy. So a weight in a wrong place, or a field read otherwise, shows without a backend.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.weights import open_weights
from tests.support.models.recurrent_checkpoints import CONFIGS, TOKENS, save_checkpoint
from tests.support.models.recurrent_files import TINY as GGUF_TINY
from tests.support.models.recurrent_files import write_recurrent_folder, write_recurrent_gguf
from tests.support.numerics.spec_reference import float_weights, reference_logits


def logits_of(source: WeightSource) -> np.ndarray:
    """The reference's logits with a model's weights as edgepipe reads them."""
    return reference_logits(source.config, float_weights(source), TOKENS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_checkpoint_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    expected = save_checkpoint(CONFIGS[name](), tmp_path, TOKENS)
    found = logits_of(open_weights(tmp_path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize("family", GGUF_TINY)
def test_the_file_of_llama_cpp_s_converter_gives_the_logits_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = open_weights(write_recurrent_folder(tmp_path, family))
    file = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", family))
    expected, found = logits_of(folder), logits_of(file)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
