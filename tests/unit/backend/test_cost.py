import statistics

import pytest

from edgepipe.backend.cost import CostModel, Jitter, StepWork
from edgepipe.backend.devices import adjusted, device_models, named_device, parse_devices
from edgepipe.errors import ConfigInvalid, ModelUnknown
from edgepipe.shapes.loader import named_shape, shape_names
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layout import slice_parameters
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("4x rtx4090", ("rtx4090",) * 4),
        ("2x m4max, 1x RTX 4090", ("m4max", "m4max", "rtx4090")),
        ("m4,m4", ("m4", "m4")),
        ("2x4090", ("rtx4090", "rtx4090")),
        ("3060, a100, A100-80G", ("rtx3060", "a100-40g", "a100-80g")),
    ],
)
def test_lists_of_devices(text: str, keys: tuple[str, ...]) -> None:
    assert parse_devices(text) == keys


@pytest.mark.parametrize(
    ("text", "key", "memory_gb"),
    [
        ("m4max 128GB", "m4max-128gb", 128),
        ("4090 48 gb", "rtx4090-48gb", 48),
        ("M3_Ultra-512g", "m3ultra-512gb", 512),
        ("h100 96GB", "h100-96gb", 96),
    ],
)
def test_a_device_may_have_another_memory(text: str, key: str, memory_gb: int) -> None:
    assert parse_devices(f"2x {text}, m4") == (key, key, "m4")
    assert named_device(key).memory_bytes == memory_gb * 1e9


@pytest.mark.parametrize(
    "text",
    [
        *("", "4x", "4x rtx4090,", "0x m4", "999x m4", "3x toaster", "200x m4, 200x m4"),
        *("toaster 24GB", "m4max 0GB", "m4max 12345GB", "24GB", "m4max-"),
    ],
)
def test_what_is_no_list_of_devices_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse_devices(text)
    assert "rtx4090" in caught.value.fact + caught.value.next_step


def test_adjustments_are_checked() -> None:
    device = adjusted(named_device("h100"), {"jitter": "0.05", "memory": "10GB", "other": "left alone"})
    assert (device.jitter, device.memory_bytes) == (0.05, 10**10)
    with pytest.raises(ConfigInvalid):
        adjusted(named_device("h100"), {"jitter": "much"})


def test_jitter_keeps_the_mean_and_has_the_variation_asked_for() -> None:
    jitter = Jitter(variation=0.3, entropy=(1, 2))
    factors = [jitter.factor() for _ in range(20_000)]
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.01)
    assert statistics.pstdev(factors) == pytest.approx(0.3, abs=0.01)
    assert min(factors) > 0
    again, other = Jitter(variation=0.3, entropy=(1, 2)), Jitter(variation=0.3, entropy=(1, 3))
    assert again.factor() == factors[0] != other.factor()
    assert Jitter(variation=0.0, entropy=(1,)).factor() == 1.0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-32b", 32.8),
        ("qwen2.5-7b", 7.6),
        ("llama-3.3-70b", 70.6),
        ("llama-3.1-8b", 8.0),
        ("smollm2-135m", 0.135),
        ("qwen3-14b", 14.8),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 117),
        ("glm-4.5-air", 106.8),  # without the layer that drafts
        ("gemma-3-4b", 3.88),
        ("gemma-3-27b", 27.0),
        ("gemma-4-31b", 30.7),
        ("gemma-4-26b-a4b", 25.2),
        ("mixtral-8x7b", 46.7),
        ("minimax-m2", 229),
        ("deepseek-v3", 671),
        ("mistral-small-3.2-24b", 23.6),  # without vision
        ("phi-4", 14.7),
    ],
)
def test_shapes_have_the_published_size(name: str, billions: float) -> None:
    config = named_shape(name)
    whole = make_slices([LayerRange(0, config.num_layers)], config.num_layers)[0]
    assert slice_parameters(config, whole) / 1e9 == pytest.approx(billions, rel=0.01)


def test_unknown_shapes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelUnknown) as caught:
        named_shape("gpt-9")
    assert all(name in caught.value.fact for name in shape_names())


def test_kernels_that_no_device_has_timed_promise_no_speed() -> None:
    config, weights = named_model("llama-3.1-8b:q4_k_m")
    whole = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    own, other = (
        CostModel(config, named_device("m4max"), weights=weights, kind=kind, dtype="bfloat16")
        for kind in ("mlx-blocks", "mlx")
    )
    assert own.slice_cost(whole[0]).read_s == other.slice_cost(whole[0]).read_s
    assert own.weight_bytes(whole) < 0.9 * other.weight_bytes(whole)


def test_a_quarter_of_a_32b_model_takes_a_quarter_of_its_weights_to_read_on_each_of_four_gpus() -> None:
    config = named_shape("qwen2.5-32b")
    parts = make_slices([LayerRange(start, start + 16) for start in range(0, 64, 16)], 64)
    device = device_models()["rtx4090"]
    cost = CostModel(config, device)
    decode = StepWork.of_rows([500] * 16, [1] * 16, logit_rows=16)
    middle_s = cost.slice_cost(parts[1]).step_s(decode)
    beside_s = device.step_overhead_s + 16 * device.layer_overhead_s
    assert middle_s == pytest.approx(15.6e9 / device.bandwidth_bytes_per_s + beside_s, rel=0.05)
    assert cost.slice_cost(parts[3]).step_s(decode) > middle_s  # the head
    prefill = StepWork.of_rows([0], [2048], logit_rows=1)
    assert cost.slice_cost(parts[1]).step_s(prefill) > 5 * middle_s  # bound by multiplying


@pytest.mark.parametrize(
    ("text", "key", "usable_gb"),
    [
        ("cpu 6 cores 32GB", "cpu-6c-32gb", 30.5),
        ("6-core CPU 16 gb", "cpu-6c-16gb", 14.5),
        ("7900 XTX", "rx7900xtx", 22.5),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx", 22.5),
        ("RX-9070-XT", "rx9070xt", 14.5),
        ("DGX Spark", "dgxspark", 118.5),
        ("Ryzen AI Max+ 395", "ryzenaimax", 96),
        ("strix halo 64GB", "ryzenaimax-64gb", 48),
        ("NVIDIA GeForce RTX 3060", "rtx3060", 11.23),
        ("Apple M4 Max", "m4max", 48),
    ],
)
def test_computers_at_home_are_known_by_the_names_that_people_type(text: str, key: str, usable_gb: float) -> None:
    assert parse_devices(f"{text}, 2x {text}") == (key,) * 3
    assert named_device(key) == named_device(text)
    assert named_device(key).usable_bytes == pytest.approx(usable_gb * 1e9, abs=5e6)


def test_few_cores_cannot_use_the_memory_s_whole_rate() -> None:
    rates = [named_device(f"cpu {cores} cores 32GB").bandwidth_bytes_per_s for cores in (1, 2, 8, 32)]
    assert rates == [12e9, 24e9, 40e9, 40e9]
    assert named_device("cpu") == named_device("cpu 8 cores 32GB")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("wifi", "200mbit,2ms,2ms"),
        ("Wi-Fi 6", "200mbit,2ms,2ms"),
        ("gigabit", "1gbit,0.3ms"),
        ("2.5GbE", "2.5gbit,0.2ms"),
        ("10g", "10gbit,0.1ms"),
        ("Thunderbolt 4", "20gbit,0.1ms"),
        ("usb4", "20gbit,0.1ms"),
    ],
)
def test_links_at_home_have_names(text: str, same: str) -> None:
    assert parse_link(text) == parse_link(same)
