"""Made-up weights have the model's forms, sane values, and the model's shares of each kind of layer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from edgepipe_emulated import emulated_model_config
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.weights.mixes import mix_names, mix_table, named_model
from edgepipe.weights.weight_table import WeightTable, make_table

CONFIG = emulated_model_config(num_layers=2, hidden_size=256, intermediate_size=512)
UP = "mlp.up_proj.weight"
forms = st.builds(
    PackedForm,
    bits=st.sampled_from((4, 5, 6, 8)),
    group=st.sampled_from((16, 32, 64, 128, 256)),
    span=st.sampled_from((0, 256)),
    base_bits=st.sampled_from((16, 32)),
    offset=st.sampled_from(("none", "zero", "zeros", "added")),
    ordered=st.booleans(),
)


def made(form: PackedForm) -> Packed:
    table = make_table([((UP, form),)])
    found = MadeUpWeights(CONFIG, table).load(f"model.layers.0.{UP}")
    assert isinstance(found, Packed)
    return found


@given(form=forms)
def test_packed_weights_have_their_form_s_size_and_small_values(form: PackedForm) -> None:
    packed = made(form)
    assert (packed.form, packed.shape) == (form, (512, 256))
    assert packed.num_bytes == form.num_bytes((512, 256))
    values = packed.float32()
    assert np.isfinite(values).all()
    assert 0.008 < values.std() < 0.04
    if form.offset != "none":
        assert abs(values.mean()) < 0.02


@pytest.mark.parametrize("codebook", sorted(CODEBOOKS))
def test_codebooks_give_numbers_only(codebook: str) -> None:
    bits = 8 if codebook == "e4m3" else 4
    values = made(PackedForm(bits=bits, group=32, base_bits=32, codebook=codebook)).float32()
    assert np.isfinite(values).all()
    assert 0.005 < values.std() < 0.05


@given(mix=st.sampled_from(mix_names()), layer=st.integers(0, 1))
def test_every_weight_of_a_slice_can_be_loaded(mix: str, layer: int) -> None:
    table = mix_table(CONFIG, mix)
    source = MadeUpWeights(CONFIG, table)
    part = Slice(index=1, layers=LayerRange(layer, layer + 1), embedding=False, head=True)
    for info in source.weights(part):
        found = source.load(info.name)
        assert info.form == table.form(info.name)
        if isinstance(found, Packed):
            assert found.num_bytes == info.num_bytes
        else:
            assert found.data.nbytes == info.num_bytes
    assert [info.name for info in source.tensors(part)] == [info.name for info in source.weights(part)]


def layer_kinds(table: WeightTable, count: int) -> Counter[tuple[tuple[str, PackedForm], ...]]:
    return Counter(tuple(sorted(table.layer(index).items())) for index in range(count))


@pytest.mark.parametrize("name", ["llama-3.3-70b:q4_k_m", "qwen3-8b:q5_k_m", "llama-3.2-3b:q3_k_m"])
def test_any_first_layers_of_a_probe_have_the_model_s_shares(name: str) -> None:
    config, table = named_model(name)
    whole = layer_kinds(table, config.num_layers)
    layers, probe = spread(config, table, 18)
    assert set(layers) == set(config.layers)
    for count in range(1, 19):
        some = layer_kinds(probe, count)
        assert all(abs(some[kind] - count * number / config.num_layers) <= 1 for kind, number in whole.items())
