"""gpt-oss' MXFP4 experts in the layouts of Hugging Face, MLX and GGUF: the same values, packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import MXFP4_FORM
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.gpt_oss_files import (
    EXPERTS,
    VALUES,
    Arrays,
    random_tensors,
    separated,
    write_gguf,
    write_hugging_face,
    write_mlx,
)

WHOLE = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)
LAST = Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=True)
LAYOUTS: dict[str, Callable[[Path, Arrays], Path]] = {
    "hugging face": write_hugging_face,
    "mlx": write_mlx,
    "gguf": lambda folder, tensors: write_gguf(folder / "m.gguf", tensors),
}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def opened(folder: Path, layout: str, tensors: Arrays) -> Weights:
    return open_weights(LAYOUTS[layout](folder, tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_stay_packed_with_the_values_of_gguf_py_s_definition(tmp_path: Path, layout: str) -> None:
    tensors = random_tensors()
    weights, parts = opened(tmp_path, layout, tensors), separated(tensors)
    for info in weights.weights(WHOLE):
        loaded = weights.load(info.name)
        if ".experts." in info.name and info.name.endswith("weight"):
            module = info.name.removesuffix(".weight")
            blocks, scales = parts[f"{module}.blocks"], parts[f"{module}.scales"]
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
            levels = np.array(gguf.quants.MXFP4.kvalues, np.float32) / 2
            values = levels[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
            assert isinstance(loaded, Packed)
            assert (loaded.form, info.form) == (MXFP4_FORM, MXFP4_FORM)
            assert loaded.num_bytes == loaded.shape[0] * loaded.shape[1] * 9 // 16  # scales widened to bf16
            assert info.num_bytes == loaded.shape[0] * loaded.shape[1] * 17 // 32
            assert np.array_equal(loaded.float32(), values.reshape(loaded.shape)), info.name
        else:
            assert not isinstance(loaded, Packed)
            found = as_float32(loaded).reshape(-1)
            assert np.array_equal(found, parts[info.name].reshape(-1)), info.name


def test_all_layouts_are_one_model(tmp_path: Path) -> None:
    tensors = random_tensors()
    sources = {layout: opened(tmp_path / layout, layout, tensors) for layout in LAYOUTS}
    configs = {replace(source.config, naming="", quantisation=None, bos_token_id=None) for source in sources.values()}
    assert len(configs) == 1
    names = {tuple(info.name for info in source.weights(WHOLE)) for source in sources.values()}
    assert len(names) == 1
    for source in sources.values():
        assert config_from_json(config_to_json(source.config)) == source.config


def test_a_slice_reads_its_own_layers_once(tmp_path: Path) -> None:
    weights = opened(tmp_path, "hugging face", random_tensors())
    names = [info.name for info in weights.tensors(LAST)]
    assert len(names) == len(set(names))
    assert {f"{GATE_UP}_blocks", f"{GATE_UP}_scales", f"{GATE_UP}_bias"} <= set(names)
    assert not [name for name in names if ".layers.0." in name]
    stored = sum(info.num_bytes for info in weights.tensors(LAST))
    assert sum(info.num_bytes for info in weights.weights(LAST)) == stored


def changed(folder: Path, **tensors: np.ndarray | None) -> Path:
    """A folder with other tensors in place of ``gate_up_proj``'s; None: without it."""
    write_hugging_face(folder, random_tensors())
    stored = load_file(folder / "model.safetensors")
    for part, tensor in tensors.items():
        del stored[f"{GATE_UP}_{part}"]
        if tensor is not None:
            stored[f"{GATE_UP}_{part}"] = tensor
    save_file(stored, folder / "model.safetensors")
    return folder


def test_tensors_unlike_the_config_are_refused_by_name(tmp_path: Path) -> None:
    rows, groups = 2 * VALUES["intermediate_size"], VALUES["hidden_size"] // 32
    fewer = np.zeros((EXPERTS - 1, rows, groups, 16), np.uint8)
    for tensors, word in (
        ({"blocks": None}, "missing"),
        ({"blocks": fewer}, "wrong shape"),
        ({"scales": np.zeros((EXPERTS, rows, groups), np.float32)}, "wrong type"),
        ({"bias": np.zeros((EXPERTS, rows - 1), np.float32)}, "wrong shape"),
    ):
        with pytest.raises(ModelInvalid) as caught:
            open_weights(changed(tmp_path, **tensors))
        (part,) = tensors
        assert f"{word}: {GATE_UP}_{part}" in caught.value.fact


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    rows, groups = 2 * VALUES["intermediate_size"], VALUES["hidden_size"] // 32
    scales = np.full((EXPERTS, rows, groups), 120, np.uint8)
    scales[2, 7, 1] = 255
    weights = open_weights(changed(tmp_path, scales=scales))
    with pytest.raises(ModelInvalid, match="cannot be read"):
        weights.load("model.layers.1.mlp.experts.up_proj.weight")
