"""Named devices for the cost model: data-sheet figures times the practical efficiency of dense kernels."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgepipe.errors import ConfigInvalid
from edgepipe.units import parse_bytes, parse_duration_s

_DESKTOP_BYTES = 1_500_000_000  # of a GPU's memory: windows, a browser, workspaces
# Share of the data sheet's memory rate that streaming reads reach, and a layer's time beside its reads (some 20
# kernels). NVIDIA's are the least squares of decode rates of dense models on an RTX 4090: docs/architecture.md.
_BANDWIDTH_EFFICIENCY = 0.85
_GPU_BANDWIDTH_EFFICIENCY, _GPU_LAYER_S = 0.96, 44e-6
_MATRIX_EFFICIENCY = 0.70  # share of the dense bf16 rate that large matrix products reach

# (first number of tokens, factor): step time jumps at tile edges, as measured on an L20.
_CUDA_TILES = ((17, 1.20), (129, 1.28), (257, 1.51))

_ALIASES = {
    "auto": "rtx4090",
    "emulated": "rtx4090",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "a100": "a100-40g",
}
_PC_RAM_BYTES, _PC_RAM_BYTES_PER_S = 56_000_000_000, 40e9  # assumed: of 64 GB of DDR5-5600 in two channels
_MOST_DEVICES = 256  # in one list; prevents a typing error from creating a thousand stages


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Properties of a device that determine a step's time."""

    name: str  # for people
    memory_bytes: int
    bandwidth_bytes_per_s: float  # effective
    flops: float  # effective, bf16, FLOP/s
    step_overhead_s: float  # per step: launch, synchronisation
    layer_overhead_s: float  # per layer and step
    sequence_overhead_s: float = 0.0  # per sequence and step, for attention that runs per sequence
    tile_steps: tuple[tuple[int, float], ...] = ()
    jitter: float = 0.0  # coefficient of variation of step times; their mean stays
    shared_memory: bool = False  # it is the machine's memory, of which macOS gives the GPU three quarters
    ram_bytes: int = 0  # of the machine, free for experts beside the device; 0: it cannot keep experts there
    ram_bytes_per_s: float = 0.0  # at which its CPU reads them; 0: not known

    @property
    def usable_bytes(self) -> int:
        """Memory available on a machine that only shows its desktop."""
        if self.shared_memory:
            return self.memory_bytes * 3 // 4
        return self.memory_bytes - min(_DESKTOP_BYTES, self.memory_bytes // 10)


def _gpu(name: str, *, memory_gb: float, peak_gb_per_s: float, peak_tflops: float) -> DeviceModel:
    return DeviceModel(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth_bytes_per_s=peak_gb_per_s * 1e9 * _GPU_BANDWIDTH_EFFICIENCY,
        flops=peak_tflops * 1e12 * _MATRIX_EFFICIENCY,
        step_overhead_s=60e-6,
        layer_overhead_s=_GPU_LAYER_S,
        tile_steps=_CUDA_TILES,
        ram_bytes=_PC_RAM_BYTES,
        ram_bytes_per_s=_PC_RAM_BYTES_PER_S,
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
        shared_memory=True,
    )


def device_models() -> dict[str, DeviceModel]:
    """Return the named devices. Peaks: memory rate in GB/s, dense bf16 (Apple: fp16) rate in TFLOP/s."""
    return {
        "rtx3090": _gpu("NVIDIA GeForce RTX 3090", memory_gb=24, peak_gb_per_s=936, peak_tflops=71),
        "rtx4090": _gpu("NVIDIA GeForce RTX 4090", memory_gb=24, peak_gb_per_s=1008, peak_tflops=165),
        "rtx5090": _gpu("NVIDIA GeForce RTX 5090", memory_gb=32, peak_gb_per_s=1792, peak_tflops=209),
        "a100-40g": _gpu("NVIDIA A100 40GB", memory_gb=40, peak_gb_per_s=1555, peak_tflops=312),
        "a100-80g": _gpu("NVIDIA A100 80GB", memory_gb=80, peak_gb_per_s=2039, peak_tflops=312),
        "h100": _gpu("NVIDIA H100 80GB", memory_gb=80, peak_gb_per_s=3350, peak_tflops=989),
        **_macs(),
    }


def _macs() -> dict[str, DeviceModel]:
    """Return Apple's chips with a common memory size: GB, GB/s, TFLOP/s of the largest GPU."""
    table = {
        "m1": (16, 68, 2.6),
        "m1pro": (32, 200, 5.2),
        "m1max": (64, 400, 10.4),
        "m1ultra": (128, 800, 20.8),
        "m2": (16, 100, 3.6),
        "m2pro": (32, 200, 6.8),
        "m2max": (64, 400, 13.6),
        "m2ultra": (192, 800, 27.2),
        "m3": (16, 100, 4.1),
        "m3pro": (36, 150, 7.4),
        "m3max": (64, 400, 16.4),
        "m3ultra": (256, 819, 32.8),
        "m4": (16, 120, 4.6),
        "m4pro": (48, 273, 9.2),
        "m4max": (64, 546, 18.4),
    }
    kinds = {"pro": " Pro", "max": " Max", "ultra": " Ultra"}
    return {
        key: _apple(
            f"Apple {key[:2].upper()}{kinds.get(key[2:], '')}", memory_gb=memory, peak_gb_per_s=rate, peak_tflops=flops
        )
        for key, (memory, rate, flops) in table.items()
    }


def device_key(text: str) -> str:
    """Return the table's key for a device name (``RTX 4090``, ``auto``). Raises ConfigInvalid."""
    models = device_models()
    key = re.sub(r"[\s_]", "", text.lower())
    key = _ALIASES.get(key, key)
    if key not in models:
        close = difflib.get_close_matches(key, models, n=1)
        raise ConfigInvalid(
            f"no device is called '{text.strip()}'",
            fact=f"there are {', '.join(models)}",
            next_step=f"did you mean '{close[0]}'?" if close else "name one of them, such as rtx4090",
        )
    return key


def named_device(text: str) -> DeviceModel:
    """Return the device of that name. Raises ConfigInvalid."""
    return device_models()[device_key(text)]


def parse_devices(text: str) -> tuple[str, ...]:
    """Parse ``"4x rtx4090"``, ``"2x m4max, 1x rtx4090"``, ``"m4, m4"`` to one key per device. Raises ConfigInvalid."""
    keys: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:(\d{1,4})\s*x\s*)?(\S.*)", part.strip(), flags=re.IGNORECASE)
        if match is None:
            raise _no_devices(text, "a part is empty")
        count = int(match[1] or 1)
        if not 1 <= count <= _MOST_DEVICES:
            raise _no_devices(text, f"a count is 1 to {_MOST_DEVICES}")
        keys += [device_key(match[2])] * count
    if len(keys) > _MOST_DEVICES:
        raise _no_devices(text, f"at most {_MOST_DEVICES} devices")
    return tuple(keys)


def adjusted(device: DeviceModel, settings: Mapping[str, str]) -> DeviceModel:
    """Return the device with ``settings`` applied; unknown settings are ignored. Raises ConfigInvalid.

    Formats: ``memory`` and ``ram`` as ``24GB``, ``bandwidth`` and ``ram_bandwidth`` in bytes per second (``800GB``),
    ``step_overhead`` and the other overheads as ``50us``, ``tile_steps`` as ``17:1.2,129:1.28``, ``jitter`` as
    ``0.05``.
    """
    found: dict[str, Any] = {
        field: parse(settings[key]) for key, (field, parse) in _adjustments().items() if key in settings
    }
    changed = replace(device, **found)
    if changed.memory_bytes <= 0 or changed.bandwidth_bytes_per_s <= 0 or changed.flops <= 0:
        raise ConfigInvalid("an emulated device needs memory, bandwidth and flops above zero")
    return changed


def adjustable() -> tuple[str, ...]:
    """Return the names of the settings of ``adjusted``."""
    return tuple(_adjustments())


def number_setting(text: str) -> float:
    """Parse a finite number of zero or more. Raises ConfigInvalid."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigInvalid(f"'{text}' is not a number of zero or more")
    return value


def _adjustments() -> dict[str, tuple[str, Callable[[str], object]]]:
    """Return, by setting, the field that it overrides and its parser."""
    return {
        "memory": ("memory_bytes", parse_bytes),
        "bandwidth": ("bandwidth_bytes_per_s", parse_bytes),
        "flops": ("flops", number_setting),
        "ram": ("ram_bytes", parse_bytes),
        "ram_bandwidth": ("ram_bytes_per_s", parse_bytes),
        "step_overhead": ("step_overhead_s", parse_duration_s),
        "layer_overhead": ("layer_overhead_s", parse_duration_s),
        "sequence_overhead": ("sequence_overhead_s", parse_duration_s),
        "tile_steps": ("tile_steps", _tile_steps),
        "jitter": ("jitter", number_setting),
    }


def _tile_steps(text: str) -> tuple[tuple[int, float], ...]:
    if not re.fullmatch(r"(\d+:\d+(\.\d+)?)?(,\d+:\d+(\.\d+)?)*", text):
        raise ConfigInvalid(f"'{text}' are not tile steps", next_step="write them like 17:1.2,129:1.28")
    pairs = (part.split(":") for part in text.split(",") if part)
    return tuple((int(tokens), float(factor)) for tokens, factor in pairs)


def _no_devices(text: str, fact: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"'{text}' is not a list of devices",
        fact=fact,
        next_step='write it like "4x rtx4090" or "2x m4max, 1x rtx4090"',
    )
