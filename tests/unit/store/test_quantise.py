"""Packed copies of 16-bit models: their values, their place in the store, and what is refused."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from edgepipe.errors import ConfigInvalid, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.files.progress import PullProgress
from edgepipe.spec.facts import whole_slice
from edgepipe.spec.packed import Packed
from edgepipe.store import quantise
from edgepipe.store.quantise import quantise_model, quantise_q4_1, quantise_q8_0
from edgepipe.store.store import ModelStore
from edgepipe.weights.dequantise import as_float32, block_values
from tests.support.models.files import hf_values, names, random_tensors, source_folder, write_gguf, write_hf_folder
from tests.support.models.mtp_files import write_mtp_folder
from tests.support.models.recurrent_files import write_recurrent_folder


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with one model in F32, ``tiny``; do not change it."""
    folder = source_folder(tmp_path_factory.mktemp("sources"))
    root = tmp_path_factory.mktemp("models")
    ModelStore(root).pull(str(folder.rename(folder.with_name("tiny"))))
    return root


@pytest.fixture
def store(pulled: Path, tmp_path: Path) -> ModelStore:
    """A store with one model in F32, ``tiny``."""
    shutil.copytree(pulled, tmp_path / "models")
    return ModelStore(tmp_path / "models")


@pytest.mark.parametrize(("target", "scheme"), [("q4", "Q4_1"), ("q8", "Q8_0")])
def test_a_copy_is_a_model_of_the_store(store: ModelStore, target: str, scheme: str) -> None:
    seen: list[PullProgress] = []
    made = quantise_model(store, "tiny", target, seen.append)
    copy, original = made.copy, made.original
    assert (copy.id, made.already_here) == (f"tiny-{target}", False)
    assert store.resolve(copy.id).whole
    assert [model.id for model in store.list()] == ["tiny", copy.id]
    assert copy.card == original.card
    assert copy.tokenizer().encode("ab") == original.tokenizer().encode("ab")
    assert copy.missing((whole_slice(copy.config),)) == []
    assert sorted(copy.held_tensors()) == sorted(copy.open_weights().infos)
    part = whole_slice(copy.config)
    schemes = {info.name: info.scheme for info in copy.open_weights().weights(part) if info.form is not None}
    assert {schemes.pop("model.embed_tokens.weight"), schemes.pop("lm_head.weight")} == {"Q8_0"}
    assert set(schemes.values()) == {scheme}
    assert (seen[-1].done_bytes, seen[-1].phase) == (seen[-1].total_bytes, "quantise")


@pytest.mark.parametrize("target", ["q4", "q8"])
def test_the_values_of_a_copy_are_near_the_originals(store: ModelStore, target: str) -> None:
    made = quantise_model(store, "tiny", target)
    copy, original = made.copy.open_weights(), made.original.open_weights()
    for info in copy.weights(whole_slice(copy.config)):
        found, exact = copy.load(info.name), as_float32(original.read(info.name))
        if not isinstance(found, Packed):
            assert np.array_equal(as_float32(found), exact)
            continue
        error = float(np.mean((found.float32() - exact) ** 2) / np.mean(exact**2))
        assert error < (1e-4 if info.scheme == "Q8_0" else 0.007)


@pytest.mark.parametrize("family", ["qwen35", "deepseek_v3"])
def test_a_copy_has_the_layer_that_drafts(family: str, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    store.pull(str(write_mtp_folder(tmp_path / "model", family)))
    copy = quantise_model(store, "model", "q8").copy.open_weights()
    config = copy.config.with_mtp()
    assert config.has_mtp
    part = whole_slice(config)
    found = copy.holding((part,)).weights(part)
    assert {info.scheme for info in found if "eh_proj" in info.name or "mtp.fc" in info.name} == {"Q8_0"}


def test_a_peer_can_read_a_copy(store: ModelStore) -> None:
    copy = quantise_model(store, "tiny", "q4").copy
    for entry in copy.manifest.tensors:
        assert copy.read_tensor(entry.info.name).nbytes == entry.info.num_bytes
    for file in copy.manifest.metadata_files:
        assert len(copy.read_file(file.name, offset=0, num_bytes=file.num_bytes)) == file.num_bytes


def test_a_second_call_keeps_the_copy(store: ModelStore) -> None:
    first = quantise_model(store, "tiny", "q8").copy
    again = quantise_model(store, "TINY", "q8")
    assert again.already_here
    assert again.copy.manifest_hash == first.manifest_hash


def test_the_type_of_a_gguf_file_is_no_part_of_the_copys_name() -> None:
    assert quantise.copy_id("org/model:bf16", "q4") == "org/model-q4"


def test_matrices_of_odd_width_stay_as_stored(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "odd", hf_values(hidden_size=24, intermediate_size=64))
    store = ModelStore(tmp_path / "models")
    store.pull(str(folder))
    copy = quantise_model(store, "odd", "q4").copy
    schemes = {name: info.scheme for name, info in copy.open_weights().infos.items()}
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == "F32"
    assert schemes["model.layers.0.mlp.down_proj.weight"] == "Q4_1"


@pytest.mark.parametrize("family", ["qwen35moe", "nemotron_h_moe", "granitehybrid with experts", "lfm2moe"])
def test_recurrent_models_are_packed_with_their_experts(family: str, tmp_path: Path) -> None:
    folder = source_folder(tmp_path)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    write_recurrent_folder(folder, family)
    store = ModelStore(tmp_path / "models")
    store.pull(str(folder.rename(folder.with_name("tiny"))))
    made = quantise_model(store, "tiny", "q8")
    copy, original = made.copy.open_weights(), made.original.open_weights()
    packed: set[str] = set()
    for info in copy.weights(whole_slice(copy.config)):
        found, exact = copy.load(info.name), original.load(info.name)
        assert not isinstance(exact, Packed)
        values = as_float32(exact).reshape(info.shape)
        if isinstance(found, Packed):
            packed.add(info.name.rpartition("layers.")[2])
            assert float(np.mean((found.float32() - values) ** 2) / np.mean(values**2)) < 1e-4
        else:
            assert np.array_equal(as_float32(found).reshape(info.shape), values)
    assert any("mlp.experts.up_proj" in name for name in packed)
    assert any("in_proj" in name for name in packed)
    assert not any(name.endswith(("A_log", "conv1d.weight", "conv.conv.weight", "dt_bias")) for name in packed)


def test_packed_models_are_refused(store: ModelStore, tmp_path: Path) -> None:
    quantise_model(store, "tiny", "q8")
    config = store.resolve("tiny").config
    store.pull(str(write_gguf(tmp_path / "other.gguf", random_tensors(config), config, scheme="Q4_0")))
    for name, scheme in (("tiny-q8", "Q8_0"), ("other", "Q4_0")):
        with pytest.raises(ConfigInvalid, match="packed already") as error:
            quantise_model(store, name, "q4")
        assert scheme in error.value.fact
    assert not (store.root / "other-q4").exists()


def test_unknown_models_are_refused(store: ModelStore) -> None:
    with pytest.raises(ModelUnknown):
        quantise_model(store, "nothing", "q4")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_that_no_scale_holds_are_refused_and_leave_nothing(tmp_path: Path, value: float) -> None:
    folder = write_hf_folder(tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, folder / "model.safetensors")
    store = ModelStore(tmp_path / "models")
    store.pull(str(folder))
    with pytest.raises(ModelInvalid, match=r"layers\.1\.mlp\.up_proj"):
        quantise_model(store, "bad", "q4")
    assert names(store.root) == {"bad"}


@pytest.mark.parametrize("at", ["check_room", "write"])
def test_a_full_disk_leaves_nothing(store: ModelStore, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if at == "write":
        monkeypatch.setattr(quantise, "_describe", full)
    else:
        monkeypatch.setattr("edgepipe.files.disk.free_bytes", lambda _root: 1000)
    with pytest.raises(ModelDownloadFailed) as error:
        quantise_model(store, "tiny", "q4")
    assert "full" in error.value.fact or "free" in error.value.fact
    assert names(store.root) == {"tiny"}


def test_the_rest_of_a_killed_process_is_removed(store: ModelStore) -> None:
    staging = store.root / ".quantising-tiny-q4"
    (staging / "tensors").mkdir(parents=True)
    (staging / "tensors" / "old.bin").write_bytes(b"x")
    copy = quantise_model(store, "tiny", "q4").copy
    assert "old.bin" not in names(copy.path / "tensors")
    assert not staging.exists()


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.sampled_from([1e-3, 0.02, 50.0]), st.sampled_from(["normal", "laplace", "uniform"]))
def test_q4_1_is_better_than_levels_between_the_extremes(seed: int, spread: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    values = getattr(rng, kind)(0.3 * spread, spread, (64, 32)).astype(np.float32)

    def error(blocks: np.ndarray) -> float:
        return float(np.mean((block_values("Q4_1", blocks.reshape(-1, 20)).reshape(values.shape) - values) ** 2))

    plain = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    assert error(quantise_q4_1(values)) <= 1.001 * error(plain)


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.sampled_from([1e-3, 0.02, 50.0]))
def test_q8_0_is_within_half_a_level(seed: int, spread: float) -> None:
    values = np.random.default_rng(seed).normal(0, spread, (8, 32)).astype(np.float32)
    found = block_values("Q8_0", quantise_q8_0(values)).reshape(values.shape)
    assert (np.abs(found - values) <= 0.57 * np.abs(values).max(axis=1, keepdims=True) / 127).all()


def test_groups_of_one_value_are_exact() -> None:
    values = np.repeat(np.array([[0.0], [0.5], [-2.0]], np.float32), 32, axis=1)
    assert np.array_equal(block_values("Q4_1", quantise_q4_1(values)).reshape(values.shape), values)
    assert not block_values("Q8_0", quantise_q8_0(values[:1])).any()


def narrow_model(folder: Path, **changes: int) -> ModelStore:
    """A store with the model ``narrow``, some of whose matrices have rows that no block divides."""
    source = write_hf_folder(folder / "sources" / "narrow", hf_values(**changes))
    store = ModelStore(folder / "models")
    store.pull(str(source))
    return store


@pytest.mark.parametrize("again", [False, True])
def test_a_copy_says_which_matrices_stay_as_they_are(tmp_path: Path, again: bool) -> None:
    store = narrow_model(tmp_path, intermediate_size=48)
    if again:
        quantise_model(store, "narrow", "q4")
    made = quantise_model(store, "narrow", "q4")
    assert {info.name.split(".")[-2] for info in made.unpacked} == {"down_proj"}
    assert quantise.unpacked_text(made.unpacked) == "the rows of 3 matrices have 48 values, no multiple of 32"
    stored = made.copy.open_weights().infos
    assert {stored[info.name].scheme for info in made.unpacked} == {"F32"}


def test_a_model_without_a_width_that_can_be_packed_is_refused(tmp_path: Path) -> None:
    store = narrow_model(tmp_path, hidden_size=48, intermediate_size=80, head_dim=12)
    with pytest.raises(ConfigInvalid, match="cannot be quantised") as caught:
        quantise_model(store, "narrow", "q4")
    assert "no multiple of 32" in caught.value.fact
    assert names(store.root) == {"narrow"}
