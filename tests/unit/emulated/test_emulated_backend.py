"""What the emulated backend checks and how its time and memory are accounted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.settings import read_settings

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import device_models
from edgepipe.backend.expert_reads import skewed_shares
from edgepipe.backend.loader import backend_names, create_backend
from edgepipe.backend.types import BackendOptions, BlockRun, LoadProgress, Step, StepRow
from edgepipe.errors import ConfigInvalid, DeviceOutOfMemory, ModelInvalid, ShardMismatch, StepFailed
from edgepipe.ids import SequenceId, StepId
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.layout import slice_parameters

CONFIG = emulated_model_config(num_layers=4)
LLAMA_8B = replace(named_shape("llama-3.1-8b"), context_length=8192)


def whole(config: ModelConfig) -> Slice:
    return make_slices([LayerRange(0, config.num_layers)], config.num_layers)[0]


def loaded(
    config: ModelConfig = CONFIG, *, num_blocks: int = 8, device: str = "auto", **settings: str
) -> EmulatedBackend:
    backend = EmulatedBackend(BackendOptions(device=device, settings={"time_factor": "0", **settings}))
    backend.load([whole(config)], EmulatedWeights(config), lambda _progress: None)
    backend.allocate_kv(num_blocks=num_blocks, block_size=16)
    return backend


def step_of(*rows: StepRow, logit_rows: Sequence[int] = (0,), slice_index: int = 0) -> Step:
    return Step(step=StepId(1), slice_index=slice_index, rows=rows, logit_rows=np.array(logit_rows, dtype=np.int32))


def row(position: int, num_tokens: int, *runs: tuple[int, int], sequence: int = 1) -> StepRow:
    table = tuple(BlockRun(*run) for run in runs)
    return StepRow(sequence=SequenceId(sequence), position=position, num_tokens=num_tokens, runs=table)


def test_it_is_found_by_entry_point() -> None:
    assert "emulated" in backend_names()
    assert isinstance(create_backend("emulated", BackendOptions()), EmulatedBackend)


@pytest.mark.parametrize("name", ["rtx4090", "rtx5090", "a100-40g", "h100", "m4max", "m4", "RTX 4090", "M4_Max"])
def test_devices_have_names(name: str) -> None:
    profile = EmulatedBackend(BackendOptions(device=name)).profile()
    share = 0.75 if "m4" in name.lower() else 1.0  # macOS keeps the rest from the GPU
    assert profile.memory_free_bytes == share * profile.memory_total_bytes
    assert profile.memory_total_bytes >= 16e9
    assert profile.bandwidth_bytes_per_s > 8e10
    assert profile.name.endswith("(emulated)")


def test_settings_override_the_device() -> None:
    settings = {"memory": "12GB", "bandwidth": "100GB", "flops": "1e12", "step_overhead": "1ms", "tile_steps": "9:1.5"}
    device = read_settings(BackendOptions(device="rtx4090", settings=settings)).device
    assert (device.memory_bytes, device.bandwidth_bytes_per_s, device.flops) == (12 * 10**9, 1e11, 1e12)
    assert (device.step_overhead_s, device.tile_steps) == (0.001, ((9, 1.5),))


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("rtx9999", {}),
        ("auto", {"speed": "1"}),
        ("auto", {"time_factor": "fast"}),
        ("auto", {"time_factor": "nan"}),
        ("auto", {"tile_steps": "17=2"}),
        ("auto", {"bandwidth": "0"}),
    ],
)
def test_settings_that_cannot_be_used(device: str, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigInvalid):
        EmulatedBackend(BackendOptions(device=device, settings=settings))


def test_weights_and_kv_use_the_devices_memory() -> None:
    backend = loaded(LLAMA_8B, num_blocks=100)
    weights = slice_parameters(LLAMA_8B, whole(LLAMA_8B)) * 2
    kv = 100 * 16 * LLAMA_8B.kv_bytes_per_token(form="bfloat16")
    profile = backend.profile()
    assert profile.memory_free_bytes == profile.memory_total_bytes - weights - kv
    with pytest.raises(DeviceOutOfMemory, match="KV blocks"):
        backend.allocate_kv(num_blocks=10_000, block_size=16)
    backend.close()
    assert backend.profile().memory_free_bytes == profile.memory_total_bytes


def test_a_model_that_is_too_large_is_refused() -> None:
    with pytest.raises(DeviceOutOfMemory, match="free"):
        loaded(LLAMA_8B, device="m4", memory="10GB")
    with pytest.raises(DeviceOutOfMemory):
        loaded(as_model_bytes="140GB")


def test_a_small_model_can_stand_for_a_large_one() -> None:
    backend = loaded(as_model_bytes="16GB", as_kv_bytes_per_token="131072")
    assert backend.profile().memory_total_bytes - backend.profile().memory_free_bytes == pytest.approx(16e9, rel=0.02)
    assert backend.kv_block_bytes(CONFIG, [whole(CONFIG)], 16) == 131072 * 16


def test_layers_can_cost_what_those_of_a_known_model_do() -> None:
    small = replace(LLAMA_8B, vocab_size=259)  # its head is small, the timed one is not
    backend = loaded(small, as_model="llama-3.1-8b")
    used = backend.profile().memory_total_bytes - backend.profile().memory_free_bytes
    assert used > slice_parameters(LLAMA_8B, whole(LLAMA_8B)) * 2


def share_read(tokens: int, *, skew: str = "0") -> float:
    """Share of the experts of qwen3-30b-a3b's layers that a step reads."""
    backend = loaded(as_model="qwen3-30b-a3b", expert_skew=skew)
    step = step_of(row(0, tokens, (0, 4)))
    ids = np.zeros(tokens, dtype=np.int32)
    return backend.collect(backend.submit(backend.prepare(step), ids)).expert_share


def test_a_step_tells_the_share_of_experts_that_its_time_counts() -> None:
    assert share_read(1) == 0.0, "one token reads what it always does"
    assert share_read(16) == pytest.approx(1 - (120 / 128) ** 16)
    skewed = skewed_shares(128, 8, 1.5)[3]
    assert skewed.tokens == 16
    assert share_read(16, skew="1.5") == pytest.approx(skewed.share)
    assert share_read(16, skew="1.5") < 0.5 * share_read(16)
    assert share_read(16, skew="1e9") == pytest.approx(8 / 128), "all tokens choose the same experts"


def test_a_skew_that_is_no_skew_is_refused() -> None:
    for skew in ("-1", "nan", "steep"):
        with pytest.raises(ConfigInvalid):
            EmulatedBackend(BackendOptions(settings={"expert_skew": skew}))


def test_progress_is_told_per_layer() -> None:
    progress: list[LoadProgress] = []
    EmulatedBackend(BackendOptions()).load([whole(CONFIG)], EmulatedWeights(CONFIG), progress.append)
    assert [4 * item.bytes_done // item.bytes_total for item in progress] == [1, 2, 3, 4]
    assert progress[-1].bytes_done == progress[-1].bytes_total > 0


def test_no_tensor_can_be_read() -> None:
    source = EmulatedWeights(CONFIG)
    assert source.tensors(whole(CONFIG)) == ()
    assert source.bytes_read == 0
    with pytest.raises(ModelInvalid):
        source.read("model.norm.weight")


@pytest.mark.parametrize(
    "step",
    [
        step_of(),
        step_of(row(0, 17, (0, 1))),
        step_of(row(0, 1, (8, 1))),
        step_of(row(4096, 1, (0, 8))),
        step_of(row(0, 0, (0, 1))),
        step_of(row(0, 2, (0, 1)), logit_rows=[2]),
    ],
    ids=["no rows", "short table", "unknown block", "behind the context", "no tokens", "logit row"],
)
def test_steps_that_cannot_be_right_are_refused(step: Step) -> None:
    with pytest.raises(StepFailed):
        loaded().prepare(step)


def test_two_sequences_writing_one_slot_are_refused() -> None:
    with pytest.raises(StepFailed, match="block 2, slot 3"):
        loaded().prepare(step_of(row(3, 1, (2, 1)), row(2, 2, (2, 1), sequence=2)))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    backend = loaded()
    prepared = backend.prepare(step_of(row(0, 1, (0, 1))))
    with pytest.raises(ShardMismatch, match="vocabulary"):
        backend.submit(prepared, np.array([CONFIG.vocab_size], dtype=np.int32))


def test_a_third_step_must_wait_for_the_first() -> None:
    backend = loaded()
    prepared = [backend.prepare(step_of(row(i, 1, (0, 1)))) for i in range(3)]
    token = np.array([7], dtype=np.int32)
    tickets = [backend.submit(item, token) for item in prepared[:2]]
    with pytest.raises(RuntimeError, match="not collected"):
        backend.submit(prepared[2], token)
    backend.collect(tickets[0])
    backend.collect(backend.submit(prepared[2], token))


def step_s(num_tokens: int, *, position: int = 0, rows: int = 1, device: str = "h100", **settings: str) -> float:
    work = StepWork.of_rows([position] * rows, [num_tokens // rows] * rows, logit_rows=rows)
    emulated = read_settings(BackendOptions(device=device, settings=settings)).device
    return CostModel(LLAMA_8B, emulated).slice_cost(whole(LLAMA_8B)).step_s(work)


def test_decode_of_an_8b_model_is_bound_by_its_weights() -> None:
    device = device_models()["h100"]
    read_s = 15.0e9 / device.bandwidth_bytes_per_s
    assert step_s(1) == pytest.approx(read_s + device.step_overhead_s + 32 * device.layer_overhead_s, rel=0.1)


def test_step_time_jumps_at_tile_edges_and_grows_with_kv_and_tokens() -> None:
    assert step_s(16, tile_steps="17:1.2") == pytest.approx(step_s(1, tile_steps=""), rel=0.01)
    assert step_s(17, tile_steps="17:1.2") > 1.1 * step_s(16, tile_steps="17:1.2")
    assert step_s(1, position=8000) > step_s(1)
    assert step_s(4096) > 8 * step_s(16)
    assert step_s(16, rows=16, sequence_overhead="1ms") == pytest.approx(step_s(16, rows=16) + 0.016)


def test_a_bare_device_takes_the_time_of_its_cost_model() -> None:
    backend = loaded(time_factor="1", step_overhead="20ms", layer_overhead="0us")
    token = np.array([7], dtype=np.int32)
    started = time.monotonic()
    tickets = [backend.submit(backend.prepare(step_of(row(i, 1, (0, 1)))), token) for i in range(2)]
    submitted = time.monotonic()
    for ticket in tickets:
        backend.collect(ticket)
    assert tickets[1].done_at_s - tickets[0].done_at_s >= 0.02
    assert time.monotonic() >= tickets[1].done_at_s >= started + 0.04
    assert submitted < tickets[1].done_at_s


def test_jitter_is_repeatable() -> None:
    def moments() -> list[float]:
        backend = loaded(time_factor="1000", step_overhead="1s", layer_overhead="0us", jitter="0.5", seed="3")
        token = np.array([7], dtype=np.int32)
        tickets = [backend.submit(backend.prepare(step_of(row(i, 1, (0, 1)))), token) for i in range(2)]
        return [tickets[1].done_at_s - tickets[0].done_at_s]

    first, second = moments(), moments()
    assert first[0] != pytest.approx(1000, abs=1)
    assert first == pytest.approx(second, abs=1e-3)


@pytest.mark.parametrize(("weights", "gigabytes"), [("auto", 5.0), ("wide", 16.1)])
def test_a_type_gives_the_timed_model_s_memory_and_time(weights: str, gigabytes: float) -> None:
    small = replace(LLAMA_8B, vocab_size=259)
    backend = loaded(small, as_model="llama-3.1-8b:q4_k_m", weights=weights)
    used = backend.profile().memory_total_bytes - backend.profile().memory_free_bytes
    assert used == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert backend.profile().packing == ("emulated" if weights == "auto" else "")


def test_an_emulated_model_has_the_memory_of_its_mix() -> None:
    def used(mix: str) -> int:
        backend = EmulatedBackend(BackendOptions(settings={"time_factor": "0"}))
        backend.load([whole(LLAMA_8B)], EmulatedWeights(LLAMA_8B, mix=mix), lambda _: None)
        return backend.profile().memory_total_bytes - backend.profile().memory_free_bytes

    assert used("") == used("bf16") == slice_parameters(LLAMA_8B, whole(LLAMA_8B)) * 2
    assert used("q4_k_m") == pytest.approx(5.0e9, rel=0.02)


def test_weights_are_packed_or_wide() -> None:
    with pytest.raises(ConfigInvalid, match="tall"):
        EmulatedBackend(BackendOptions(settings={"weights": "tall"}))
