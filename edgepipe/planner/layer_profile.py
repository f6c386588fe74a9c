"""Measured times of a layer, as nodes report them. PURE. Apart from ``profiles`` so that commands load no numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    size: float  # rows, or tokens
    seconds: float
    expert_share: float = 0.0  # share of a layer's experts that it read; 0: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Measured times of one layer, the head and a step on a node's real backend."""

    base_s: float  # time per step, independent of the layers
    decode: tuple[Point, ...]  # time of one layer, by rows of one token each, at ``decode_context``
    prefill: tuple[Point, ...]  # time of one layer, by tokens of one row from position 0
    head: tuple[Point, ...]  # time of norm and head, by rows
    kv_token_s: float  # time of one layer per token of context beyond ``decode_context``, summed over rows
    decode_context: int  # tokens that each row attended to while ``decode`` was measured
    busy: bool = False  # other programs used much of the machine: the device may be faster than this
    measured_ms: int = 0  # wall clock, since 1970; 0: not known
