"""Named devices for the cost model: data-sheet figures times the practical efficiency of dense kernels."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from edgepipe.errors import ConfigInvalid
from edgepipe.units import parse_bytes, parse_duration_s

# CUDA reports a part of a card's gigabytes (2^30 bytes each): 23.64 GiB of 24 (RTX 4090), 9.78 of 10 (RTX 3080),
# 31.37 of 32 (RTX 5090) and 7.75 of 8 (RTX 4060). This is the smallest part.
_NVIDIA_BYTES_PER_GB = int(0.968 * (1 << 30))
_DESKTOP_BYTES = 1_500_000_000  # part of a GPU's memory that windows, a browser and workspaces take
# No GPU and no Mac has measured these constants. They follow from the compiled kernels and from counts of launches:
# docs/architecture/planner.md#data-sheets. Where the arithmetic leaves a choice, they are the slower side.
_BANDWIDTH_EFFICIENCY = 0.85  # share of the data sheet's memory rate that streaming reads reach
_GPU_BANDWIDTH_EFFICIENCY, _HOPPER_BANDWIDTH_EFFICIENCY = 0.93, 0.60  # one block an SM holds too little for HBM3
_APPLE_BANDWIDTH_EFFICIENCY = 0.71
_MATRIX_EFFICIENCY = 0.70  # share of the dense bf16 rate that large matrix products reach
_GPU_MATRIX_EFFICIENCY = 0.75
# Starts and tails of kernels, 2.5 us each: 19 in a dense layer, 8 more with experts, 10 more in recurrent ones.
_GPU_LAYER_S, _GPU_EXPERTS_S, _GPU_RECURRENT_S = 49e-6, 21e-6, 25e-6
_GPU_STEP_S = 1.3e-3  # the process around a step: inputs, launch, candidates, sampling
# Measured on an H100's host with SmolLM2 (docs/experiments.md): steps without graphs, of one sequence and of sixteen.
CUDA_LAUNCH_LAYER_S, CUDA_LAUNCH_ROW_S = 400e-6, 76e-6
# Building the graph of a layer and starting its kernels, for one row and for each more.
_APPLE_LAYER_S, _APPLE_ROW_S, _APPLE_STEP_S = 60e-6, 14e-6, 0.5e-3

# (first number of tokens, factor): step time jumps at tile edges, as measured on an L20.
_CUDA_TILES = ((17, 1.20), (129, 1.28), (257, 1.51))
_CUDA_PACKED_TILES = ((9, 1.16), (17, 1.35), (33, 1.56))  # packed weights: instructions of the compiled kernels
_MLX_TILES = ((33, 1.15),)

_ALIASES = {
    "auto": "rtx4090",
    "emulated": "rtx4090",
    "a100": "a100-40g",
    "spark": "dgxspark",
    "gb10": "dgxspark",
    **dict.fromkeys(("ryzenaimax395", "aimax395", "strixhalo"), "ryzenaimax"),
    **{f"a100{size}": f"a100-{size}" for size in ("40g", "80g")},
}
_CPU = re.compile(  # "cpu 6 cores 32GB", "6-core cpu 32 GB", "cpu"
    r"(?:(?P<before>[1-9]\d{0,2})[\s-]*cores?[\s-]+)?cpu(?:[\s-]+(?P<cores>[1-9]\d{0,2})[\s-]*c(?:ores?)?)?"
    r"(?:[\s-]+(?P<gb>[1-9]\d{0,3})\s*gb?)?",
    flags=re.IGNORECASE,
)
_COUNTED = re.compile(  # "4x m4" is four; "7900 XTX" is one device
    r"(?:(?P<count>\d{1,3})\s*x\s*|(?P<large>\d{4,})\s*x\s+)?(?P<device>\S.*)", flags=re.IGNORECASE
)
_CPU_CORES, _CPU_GB = 8, 32  # defaults of a processor named alone
_CORE_BYTES_PER_S, _CORE_FLOPS = 12e9, 110e9  # one core: streaming reads; products with AVX2 at 3.5 GHz
_SIZED = re.compile(r"(?P<name>.+?)[\s-]+(?P<gb>[1-9]\d{0,3})\s*gb?", flags=re.IGNORECASE)  # a device and its memory
_ADDED_TO_NAMES = re.compile(r"emulated|nvidia|amd|sxm\d?|pcie|hbm\w*|\d+gb")  # drivers add these words
_PC_RAM_BYTES, _PC_RAM_BYTES_PER_S = 56_000_000_000, 40e9  # assumed: of 64 GB of DDR5-5600 in two channels
_MOST_DEVICES = 256  # longest list; prevents a typing error from creating a thousand stages


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Properties of a device that determine a step's time."""

    name: str  # name of the device, for people
    memory_bytes: int
    bandwidth_bytes_per_s: float  # effective
    flops: float  # effective, bf16, FLOP/s
    step_overhead_s: float  # time per step: launch, synchronisation
    layer_overhead_s: float  # time per layer and step
    sequence_overhead_s: float = 0.0  # time per sequence and step, for attention that runs per sequence
    tile_steps: tuple[tuple[int, float], ...] = ()
    packed_tile_steps: tuple[tuple[int, float], ...] = ()  # the same of packed weights
    experts_overhead_s: float = 0.0  # time per layer with experts and step, in addition
    recurrent_overhead_s: float = 0.0  # time per recurrent layer and step, in addition
    layer_row_s: float = 0.0  # time per layer and sequence, in addition
    # Time of the host that starts a layer's kernels one by one, and in addition for each sequence, whose attention has
    # kernels of its own. Steps without graphs take at least that. 0: the other overheads have it.
    launch_layer_s: float = 0.0
    launch_row_s: float = 0.0
    reads_as: str = ""  # kind of packing whose bytes it reads (``edgepipe.weights.resident``); empty: those of the file
    jitter: float = 0.0  # coefficient of variation of step times; their mean stays
    shared_memory: bool = False  # the device uses the machine's memory; macOS gives the GPU three quarters
    ram_bytes: int = 0  # free memory of the machine for experts beside the device; 0: it cannot keep experts there
    ram_bytes_per_s: float = 0.0  # rate at which the machine's CPU reads experts; 0: not known
    # Rate of copies between the device and host memory: pinned memory over PCIe 4 x16, where nothing else is known.
    host_link_bytes_per_s: float = 24e9
    disk_bytes_per_s: float = 3e9  # rate of the machine's disk: an NVMe drive on PCIe 3 x4

    @property
    def usable_bytes(self) -> int:
        """Memory available on a machine that only shows its desktop."""
        if self.shared_memory:
            return self.memory_bytes * 3 // 4
        return self.memory_bytes - min(_DESKTOP_BYTES, self.memory_bytes // 10)


class KernelTiles(TypedDict, total=False):
    """Numbers of tokens at which kernels take longer, see ``DeviceModel``."""

    tile_steps: tuple[tuple[int, float], ...]
    packed_tile_steps: tuple[tuple[int, float], ...]


def kernel_tiles(kind: str) -> KernelTiles:
    """Return the tiles of the kernels of a packing (``edgepipe.weights.resident``), where they are known."""
    if kind == "torch-cuda":
        return {"tile_steps": _CUDA_TILES, "packed_tile_steps": _CUDA_PACKED_TILES}
    if kind in ("mlx", "mlx-blocks"):
        return {"tile_steps": _MLX_TILES, "packed_tile_steps": _MLX_TILES}
    return {}


def _gpu(name: str, *, memory_gb: float, peak_gb_per_s: float, peak_tflops: float) -> DeviceModel:
    return DeviceModel(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth_bytes_per_s=peak_gb_per_s * 1e9 * _GPU_BANDWIDTH_EFFICIENCY,
        flops=peak_tflops * 1e12 * _GPU_MATRIX_EFFICIENCY,
        step_overhead_s=_GPU_STEP_S,
        layer_overhead_s=_GPU_LAYER_S,
        experts_overhead_s=_GPU_EXPERTS_S,
        recurrent_overhead_s=_GPU_RECURRENT_S,
        launch_layer_s=CUDA_LAUNCH_LAYER_S,
        launch_row_s=CUDA_LAUNCH_ROW_S,
        **kernel_tiles("torch-cuda"),
        reads_as="torch-cuda",
        ram_bytes=_PC_RAM_BYTES,
        ram_bytes_per_s=_PC_RAM_BYTES_PER_S,
    )


def _apple(name: str, *, memory_gb: float, peak_gb_per_s: float, peak_tflops: float) -> DeviceModel:
    return DeviceModel(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth_bytes_per_s=peak_gb_per_s * 1e9 * _APPLE_BANDWIDTH_EFFICIENCY,
        flops=peak_tflops * 1e12 * _MATRIX_EFFICIENCY,
        step_overhead_s=_APPLE_STEP_S,
        layer_overhead_s=_APPLE_LAYER_S,
        sequence_overhead_s=10e-6,
        layer_row_s=_APPLE_ROW_S,
        **kernel_tiles("mlx"),
        shared_memory=True,
        reads_as="mlx",
    )


def device_models() -> dict[str, DeviceModel]:
    """Return the named devices, with a common memory size."""
    return {**_gpus(), **_radeons(), **_small_computers(), **_macs()}


def _gpus() -> dict[str, DeviceModel]:
    """Return NVIDIA's cards: GB, GB/s, TFLOP/s of dense bf16 products that add in float32."""
    table = {
        "rtx3060": ("GeForce RTX 3060", 12, 360, 25),
        "rtx3080": ("GeForce RTX 3080", 10, 760, 60),
        "rtx3090": ("GeForce RTX 3090", 24, 936, 71),
        "rtx4060ti": ("GeForce RTX 4060 Ti", 16, 288, 44),
        "rtx4070": ("GeForce RTX 4070", 12, 504, 58),
        "rtx4080": ("GeForce RTX 4080", 16, 717, 97),
        "rtx4090": ("GeForce RTX 4090", 24, 1008, 165),
        "rtx5060ti": ("GeForce RTX 5060 Ti", 16, 448, 47),
        "rtx5070": ("GeForce RTX 5070", 12, 672, 62),
        "rtx5070ti": ("GeForce RTX 5070 Ti", 16, 896, 88),
        "rtx5080": ("GeForce RTX 5080", 16, 960, 113),
        "rtx5090": ("GeForce RTX 5090", 32, 1792, 209),
        "rtxpro6000": ("RTX PRO 6000", 96, 1792, 504),
        "a100-40g": ("A100 40GB", 40, 1555, 312),
        "a100-80g": ("A100 80GB", 80, 2039, 312),
        "h100": ("H100 80GB", 80, 3350, 989),
    }
    found = {
        key: replace(
            _gpu(f"NVIDIA {name}", memory_gb=memory, peak_gb_per_s=rate, peak_tflops=flops),
            memory_bytes=int(memory * _NVIDIA_BYTES_PER_GB),
        )
        for key, (name, memory, rate, flops) in table.items()
    }
    hopper_bytes_per_s = 1e9 * table["h100"][2] * _HOPPER_BANDWIDTH_EFFICIENCY
    return found | {"h100": replace(found["h100"], bandwidth_bytes_per_s=hopper_bytes_per_s)}


def _radeons() -> dict[str, DeviceModel]:
    """Return AMD's cards: GB, GB/s, TFLOP/s of dense fp16 products."""
    table = {
        "rx6800xt": ("Radeon RX 6800 XT", 16, 512, 41),
        "rx6900xt": ("Radeon RX 6900 XT", 16, 512, 46),
        "rx7600xt": ("Radeon RX 7600 XT", 16, 288, 45),
        "rx7800xt": ("Radeon RX 7800 XT", 16, 624, 75),
        "rx7900gre": ("Radeon RX 7900 GRE", 16, 576, 92),
        "rx7900xt": ("Radeon RX 7900 XT", 20, 800, 103),
        "rx7900xtx": ("Radeon RX 7900 XTX", 24, 960, 123),
        "rx9060xt": ("Radeon RX 9060 XT", 16, 320, 103),
        "rx9070": ("Radeon RX 9070", 16, 640, 145),
        "rx9070xt": ("Radeon RX 9070 XT", 16, 640, 195),
        "r9700": ("Radeon AI PRO R9700", 32, 640, 191),
        "w7900": ("Radeon PRO W7900", 48, 864, 123),
    }
    return {key: _unmeasured_gpu(f"AMD {row[0]}", *row[1:]) for key, row in table.items()}


def _small_computers() -> dict[str, DeviceModel]:
    """Return computers whose GPU uses the machine's memory: GB, GB/s, TFLOP/s of dense bf16 products."""
    spark = _unmeasured_gpu("NVIDIA DGX Spark", 120, 273, 125)  # the system keeps some of the 128 GB
    ryzen = _unmeasured_gpu("AMD Ryzen AI Max+ 395", 128, 256, 59)
    return {
        "dgxspark": replace(spark, ram_bytes=0, ram_bytes_per_s=0.0),
        "ryzenaimax": replace(ryzen, ram_bytes=0, ram_bytes_per_s=0.0, shared_memory=True),
    }


def _unmeasured_gpu(name: str, memory_gb: float, peak_gb_per_s: float, peak_tflops: float) -> DeviceModel:
    """Return a GPU without measured decode rates to compare with: it gets a careful share of its memory rate."""
    device = _gpu(name, memory_gb=memory_gb, peak_gb_per_s=peak_gb_per_s, peak_tflops=peak_tflops)
    return replace(device, bandwidth_bytes_per_s=peak_gb_per_s * 1e9 * _BANDWIDTH_EFFICIENCY)


def _cpu(cores: int, memory_gb: int) -> DeviceModel:
    """Return a desktop's processor with two channels of DDR5-5600. Few cores cannot use all of the memory's rate."""
    return DeviceModel(
        name=f"CPU, {cores} cores",
        memory_bytes=memory_gb * 10**9,
        bandwidth_bytes_per_s=min(_PC_RAM_BYTES_PER_S, cores * _CORE_BYTES_PER_S),
        flops=cores * _CORE_FLOPS * _MATRIX_EFFICIENCY,
        step_overhead_s=300e-6,
        layer_overhead_s=60e-6,
    )


def _macs() -> dict[str, DeviceModel]:
    """Return Apple's chips: GB, GB/s, TFLOP/s of the largest GPU in fp16. The M5's are Apple's four times an M4's."""
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
        "m5": (16, 153, 18.4),
        "m5pro": (48, 307, 36.8),
        "m5max": (64, 614, 73.6),
    }
    kinds = {"pro": " Pro", "max": " Max", "ultra": " Ultra"}
    return {
        key: _apple(
            f"Apple {key[:2].upper()}{kinds.get(key[2:], '')}", memory_gb=memory, peak_gb_per_s=rate, peak_tflops=flops
        )
        for key, (memory, rate, flops) in table.items()
    }


def device_key(text: str) -> str:
    """Return the key of a device's name, which may end with its memory: ``RTX 4090``, ``4090``, ``m4max 128GB``.

    A processor has its cores and the machine's memory: ``cpu 6 cores 32GB``. Raises ConfigInvalid.
    """
    if (cores_and_gb := _cpu_sizes(text)) is not None:
        return "cpu-{}c-{}gb".format(*cores_and_gb)
    models = device_models()
    plain = _plain_key(text, models)
    if plain not in models and (found := _SIZED.fullmatch(text.strip())):
        plain, size = _plain_key(found["name"], models), f"-{found['gb']}gb"
    else:
        size = ""
    if plain not in models:
        close = difflib.get_close_matches(plain, models, n=1)
        raise ConfigInvalid(
            f"no device is called '{text.strip()}'",
            fact=f"there are {', '.join(models)}, and any processor such as 'cpu 6 cores 32GB'",
            next_step=f"did you mean '{close[0]}'?" if close else "name one of them, such as rtx4090",
        )
    return plain + size


def _plain_key(text: str, models: Mapping[str, DeviceModel]) -> str:
    key = re.sub(r"[\s_+]|-(?=\w)|geforce|nvidia|radeon|amd|apple", "", text.lower())
    found = next((name for name in (key, f"rtx{key}", f"rx{key}") if name in models), text.lower().strip())
    return _ALIASES.get(key, found if found in models else re.sub(r"[\s_]", "", found))


def _cpu_sizes(text: str) -> tuple[int, int] | None:
    """Return a processor's cores and its machine's memory in GB; None if the text is of no processor."""
    if (found := _CPU.fullmatch(text.strip())) is None:
        return None
    return int(found["cores"] or found["before"] or _CPU_CORES), int(found["gb"] or _CPU_GB)


def named_device(text: str) -> DeviceModel:
    """Return the device of that name, see ``device_key``. Raises ConfigInvalid."""
    if (cores_and_gb := _cpu_sizes(text)) is not None:
        return _cpu(*cores_and_gb)
    models, key = device_models(), device_key(text)
    found = _SIZED.fullmatch(key)
    if key in models or found is None:
        return models[key]
    return replace(models[found["name"]], memory_bytes=int(found["gb"]) * 10**9)


def reported_device(name: str) -> DeviceModel | None:
    """Return the data sheet of a device by the name that its driver reports; None if the table lacks it.

    Drivers may add the memory's size and kind and the form of the card. With any other word, such as "Laptop" or "Ti",
    it is another device.
    """
    reported = _words(name)
    for model in device_models().values():
        words = _words(model.name)
        if words <= reported and all(_ADDED_TO_NAMES.fullmatch(word) for word in reported - words):
            return model
    return None


def _words(name: str) -> set[str]:
    return set(re.sub(r"[-_()]", " ", name.lower()).split())


def parse_devices(text: str) -> tuple[str, ...]:
    """Parse ``"4x rtx4090"``, ``"2x m4max, 1x rtx4090"``, ``"m4, m4"`` to one key per device. Raises ConfigInvalid."""
    keys: list[str] = []
    for part in text.split(","):
        match = _COUNTED.fullmatch(part.strip())
        if match is None:
            raise _no_devices(text, "a part is empty")
        count = int(match["count"] or match["large"] or 1)
        if not 1 <= count <= _MOST_DEVICES:
            raise _no_devices(text, f"a count is 1 to {_MOST_DEVICES}")
        keys += [device_key(match["device"])] * count
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
    if "tile_steps" in found:
        found["packed_tile_steps"] = found["tile_steps"]
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
        "host_link": ("host_link_bytes_per_s", parse_bytes),
        "disk": ("disk_bytes_per_s", parse_bytes),
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
