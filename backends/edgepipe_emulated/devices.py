"""Named devices for the cost model. Data-sheet figures times an efficiency that dense kernels reach in practice."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from edgepipe.errors import ConfigInvalid
from edgepipe.units import parse_bytes, parse_duration_s

T = TypeVar("T")

_BANDWIDTH_EFFICIENCY = 0.85  # share of the data sheet's memory rate that streaming reads reach
_MATRIX_EFFICIENCY = 0.70  # share of the dense bf16 rate that large matrix products reach

# (tokens from which it holds, factor): step time jumps at tile edges; as measured on an L20.
_CUDA_TILES = ((17, 1.20), (129, 1.28), (257, 1.51))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What decides how long a step takes."""

    name: str  # for people
    memory_bytes: int
    bandwidth_bytes_per_s: float  # effective
    flops: float  # effective, bf16, FLOP/s
    step_overhead_s: float  # per step: launch, synchronisation
    layer_overhead_s: float  # per layer and step
    sequence_overhead_s: float = 0.0  # per sequence and step (attention that runs per sequence)
    tile_steps: tuple[tuple[int, float], ...] = ()
    jitter: float = 0.0  # step times spread evenly over [1, 1 + jitter)


def _gpu(name: str, *, memory_gb: float, peak_gb_per_s: float, peak_tflops: float) -> DeviceModel:
    return DeviceModel(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth_bytes_per_s=peak_gb_per_s * 1e9 * _BANDWIDTH_EFFICIENCY,
        flops=peak_tflops * 1e12 * _MATRIX_EFFICIENCY,
        step_overhead_s=60e-6,
        layer_overhead_s=6e-6,
        tile_steps=_CUDA_TILES,
    )


def _apple(name: str, *, memory_gb: float, peak_gb_per_s: float, peak_tflops: float) -> DeviceModel:
    return DeviceModel(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth_bytes_per_s=peak_gb_per_s * 1e9 * _BANDWIDTH_EFFICIENCY,
        flops=peak_tflops * 1e12 * _MATRIX_EFFICIENCY,
        step_overhead_s=250e-6,
        layer_overhead_s=20e-6,
        sequence_overhead_s=10e-6,
        tile_steps=((33, 1.15),),
    )


def device_models() -> dict[str, DeviceModel]:
    """The named devices. Peaks: memory rate in GB/s, dense bf16 (fp16 on Apple's) rate in TFLOP/s."""
    return {
        "rtx4090": _gpu("NVIDIA GeForce RTX 4090", memory_gb=24, peak_gb_per_s=1008, peak_tflops=165),
        "rtx5090": _gpu("NVIDIA GeForce RTX 5090", memory_gb=32, peak_gb_per_s=1792, peak_tflops=209),
        "a100-40g": _gpu("NVIDIA A100 40GB", memory_gb=40, peak_gb_per_s=1555, peak_tflops=312),
        "h100": _gpu("NVIDIA H100 80GB", memory_gb=80, peak_gb_per_s=3350, peak_tflops=989),
        "m4max": _apple("Apple M4 Max", memory_gb=64, peak_gb_per_s=546, peak_tflops=18.4),
        "m4": _apple("Apple M4", memory_gb=16, peak_gb_per_s=120, peak_tflops=4.6),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSettings:
    """A device, and how it is emulated."""

    device: DeviceModel
    time_factor: float  # 1: real time of the device, 0: as fast as the checksums go
    as_model_bytes: int | None  # weights of the model whose times are wanted; None: bf16 of the config's shape
    as_kv_bytes_per_token: int | None  # likewise its KV, all layers
    seed: int  # of the jitter


_KNOWN = (
    "time_factor",
    "memory",
    "bandwidth",
    "flops",
    "step_overhead",
    "layer_overhead",
    "sequence_overhead",
    "tile_steps",
    "jitter",
    "seed",
    "as_model_bytes",
    "as_kv_bytes_per_token",
)


def read_settings(device: str, settings: dict[str, str]) -> EmulationSettings:
    """The device of that name (``auto``: RTX 4090) with what the settings override. Raises ConfigInvalid.

    Sizes are written ``24GB``, ``bandwidth`` as bytes per second (``800GB``), times ``50us``, ``tile_steps`` as
    ``17:1.2,129:1.28``.
    """
    unknown = sorted(set(settings) - set(_KNOWN))
    if unknown:
        raise ConfigInvalid(f"the emulated backend has no setting '{unknown[0]}'", fact=f"it has {', '.join(_KNOWN)}")
    changes = {
        "memory_bytes": _maybe(settings, "memory", parse_bytes),
        "bandwidth_bytes_per_s": _maybe(settings, "bandwidth", parse_bytes),
        "flops": _maybe(settings, "flops", _number),
        "step_overhead_s": _maybe(settings, "step_overhead", parse_duration_s),
        "layer_overhead_s": _maybe(settings, "layer_overhead", parse_duration_s),
        "sequence_overhead_s": _maybe(settings, "sequence_overhead", parse_duration_s),
        "tile_steps": _maybe(settings, "tile_steps", _tile_steps),
        "jitter": _maybe(settings, "jitter", _number),
    }
    named = replace(_named(device), **{key: value for key, value in changes.items() if value is not None})
    if named.memory_bytes <= 0 or named.bandwidth_bytes_per_s <= 0 or named.flops <= 0:
        raise ConfigInvalid("an emulated device needs memory, bandwidth and flops above zero")
    return EmulationSettings(
        device=named,
        time_factor=_number(settings.get("time_factor", "1")),
        as_model_bytes=_maybe(settings, "as_model_bytes", parse_bytes),
        as_kv_bytes_per_token=_maybe(settings, "as_kv_bytes_per_token", parse_bytes),
        seed=int(_number(settings.get("seed", "0"))),
    )


_ALIASES = {"auto": "rtx4090", "emulated": "rtx4090", "4090": "rtx4090", "5090": "rtx5090", "a100": "a100-40g"}


def _named(device: str) -> DeviceModel:
    models = device_models()
    key = re.sub(r"[\s_]", "", device.lower())
    key = _ALIASES.get(key, key)
    if key not in models:
        raise ConfigInvalid(f"no emulated device is called '{device}'", fact=f"there are {', '.join(models)}")
    return models[key]


def _maybe(settings: dict[str, str], key: str, parse: Callable[[str], T]) -> T | None:
    return parse(settings[key]) if key in settings else None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigInvalid(f"'{text}' is not a number of zero or more")
    return value


def _tile_steps(text: str) -> tuple[tuple[int, float], ...]:
    if not re.fullmatch(r"(\d+:\d+(\.\d+)?)?(,\d+:\d+(\.\d+)?)*", text):
        raise ConfigInvalid(f"'{text}' are no tile steps", next_step="write them like 17:1.2,129:1.28")
    pairs = (part.split(":") for part in text.split(",") if part)
    return tuple((int(tokens), float(factor)) for tokens, factor in pairs)
