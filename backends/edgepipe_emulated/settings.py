"""Settings of the emulated backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgepipe.backend.devices import DeviceModel, adjustable, adjusted, named_device, number_setting
from edgepipe.backend.drafting import Acceptance
from edgepipe.backend.kv_setting import checked_kv
from edgepipe.backend.types import BackendOptions
from edgepipe.errors import ConfigInvalid
from edgepipe.spec.expert_places import SETTING, chosen_share, with_ram_percent
from edgepipe.spec.facts import ModelConfig
from edgepipe.units import parse_bytes, parse_duration_s
from edgepipe.weights.mixes import named_model
from edgepipe.weights.resident import WIDE
from edgepipe.weights.weight_table import WeightTable

T = TypeVar("T")

_OWN = (
    "time_factor",
    "seed",
    "as_model",
    "as_model_bytes",
    "as_kv_bytes_per_token",
    "contiguous_kv",
    "faults",
    "expert_skew",
    "draft_acceptance",
    "draft_time",
    "weights",
    SETTING,
)
_WEIGHTS = ("auto", "wide")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSettings:
    """A device and the options of its emulation."""

    device: DeviceModel
    time_factor: float  # 1: the device's real time, 0: no waiting
    as_model: tuple[ModelConfig, WeightTable] | None  # model to time; None: the loaded model
    as_model_bytes: int | None  # weights of the timed model; None: of its shape and types
    as_kv_bytes_per_token: int | None  # KV of the timed model, all layers; None: bf16 of the config's shape
    seed: int  # seed of the jitter
    contiguous_kv: bool  # block tables must be runs, as on CPU and MLX
    packing: str  # how it keeps packed weights: "emulated", or widened; with the share of experts in host memory
    expert_skew: float  # expert i is chosen (i + 1)^-skew times as often as the first; 0: all alike
    kv: str  # form of the KV, which changes its size and the time to read it; empty: bf16
    draft_acceptance: Acceptance | None  # how often a draft of its draft model is right; None: it has no such model
    draft_s: float  # seconds that a draft takes
    faults: Path | None  # folder of the device's fault files (``edgepipe_emulated.faults``); None: no faults


def read_settings(options: BackendOptions) -> EmulationSettings:
    """Read the settings of a named device (``auto``: RTX 4090). Raises ConfigInvalid, ModelUnknown."""
    settings = options.settings
    known = (*adjustable(), *_OWN)
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigInvalid(f"the emulated backend has no setting '{unknown[0]}'", fact=f"it has {', '.join(known)}")
    return EmulationSettings(
        device=adjusted(named_device(options.device), settings),
        time_factor=number_setting(settings.get("time_factor", "1")),
        as_model=_maybe(settings, "as_model", named_model),
        as_model_bytes=_maybe(settings, "as_model_bytes", parse_bytes),
        as_kv_bytes_per_token=_maybe(settings, "as_kv_bytes_per_token", parse_bytes),
        seed=int(number_setting(settings.get("seed", "0"))),
        contiguous_kv=bool(number_setting(settings.get("contiguous_kv", "0"))),
        packing=with_ram_percent(_packing(settings.get("weights", "auto")), chosen_share(settings)),
        expert_skew=number_setting(settings.get("expert_skew", "0")),
        kv=checked_kv(options.kv),
        draft_acceptance=_maybe(settings, "draft_acceptance", Acceptance),
        draft_s=parse_duration_s(settings.get("draft_time", "0s")),
        faults=_maybe(settings, "faults", Path),
    )


def _packing(weights: str) -> str:
    if weights not in _WEIGHTS:
        raise ConfigInvalid(f"weights cannot be '{weights}'", fact=f"it is {' or '.join(_WEIGHTS)}")
    return WIDE if weights == "wide" else "emulated"


def _maybe(settings: dict[str, str], key: str, parse: Callable[[str], T]) -> T | None:
    return parse(settings[key]) if key in settings else None
