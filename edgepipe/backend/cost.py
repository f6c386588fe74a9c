"""Cost model of a named device: time of a step, and memory of weights and KV.

The emulated backend and the simulator use the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from edgepipe.backend.devices import DeviceModel
from edgepipe.backend.expert_reads import ExpertShare, distinct_share, skewed_shares
from edgepipe.backend.expert_wait import mean_wait_s
from edgepipe.backend.types import Step
from edgepipe.spec.expert_places import num_in_ram, split_kind, with_ram_percent
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.kv_forms import KV_FORMS, pages_fit
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.layout import multiplied_parameters, used_expert_parameters
from edgepipe.weights.resident import WIDE, resident_sizes
from edgepipe.weights.weight_table import FLOATS, WeightTable

_DRAWS_AT_ONCE = 256
RAM_BYTES_PER_S = 40e9
"""Estimate of the rate at which a CPU reads experts: a desktop with two channels of DDR5. A profile measures it."""
_RAM_FLOPS = 0.5e12  # estimate: float32 products of experts on a desktop's CPU
# Estimate, of a layer and step: two copies of some KB and a wait, and kernels launched one by one instead of from a
# graph, less the experts' own kernels, which run beside the CPU.
_CROSSING_S = 30e-6
_STATE_VALUE_BYTES = 4
_STATE_FLOPS = 8  # operations per value and token: it decays, is read twice, and takes a product

# Rows above which a backend widens packed weights before it multiplies, by kind (``edgepipe.weights.resident``). Others
# multiply packed weights at any size.
_WIDENS_ABOVE_ROWS = {"torch-cuda": 64, "emulated": 64}
# No Mac has timed the kernels of K types, so steps count the bytes of the forms that take their place. Memory is exact.
_TIMED_AS = {"mlx-blocks": "mlx"}


def _codes_fit(config: ModelConfig, kv: str) -> bool:
    """Return whether CUDA's own kernels read KV of a form in every layer, which graphs need."""
    every = (spec.attention for spec in config.layers if spec.attention is not None)
    return all(pages_fit(each.head_dim, each.latent_width or each.head_dim, kv) for each in every)


class StepWork(NamedTuple):
    """Amount of work in a step."""

    tokens: int
    rows: int  # sequences
    kv_tokens: int  # tokens whose keys and values are read, summed over rows
    attention_pairs: float  # pairs of a token and one that it attends to
    logit_rows: int

    @classmethod
    def of_rows(cls, positions: Sequence[int], num_tokens: Sequence[int], *, logit_rows: int) -> StepWork:
        """Compute the work from two columns with one entry per row: position of the first token, number of tokens."""
        rows, tokens = len(positions), sum(num_tokens)
        kv_tokens = sum(positions) + tokens
        pairs = float(kv_tokens)  # right if every row has one token
        if tokens != rows:
            pairs = sum(count * (at + (count + 1) / 2) for at, count in zip(positions, num_tokens, strict=True))
        return cls(tokens=tokens, rows=rows, kv_tokens=kv_tokens, attention_pairs=pairs, logit_rows=logit_rows)

    def within(self, window: int) -> StepWork:
        """Return the work of attention that sees the last ``window`` tokens, if all rows are alike."""
        per_row = self.tokens / self.rows  # a chunk of n tokens reads n - 1 more than one
        kv_tokens = min(self.kv_tokens, round(self.rows * (window + per_row - 1)))
        return self._replace(
            kv_tokens=kv_tokens, attention_pairs=min(self.attention_pairs, float(self.tokens * window))
        )

    def later(self, turns: int) -> StepWork:
        """Return the work of the same decodes, ``turns`` tokens later."""
        more = turns * self.rows
        return self._replace(kv_tokens=self.kv_tokens + more, attention_pairs=self.attention_pairs + more)


def work_of(step: Step) -> StepWork:
    """Return the work of ``step``."""
    positions, counts = [row.position for row in step.rows], [row.num_tokens for row in step.rows]
    num_scored = len(step.scores.rows) if step.scores is not None else 0
    return StepWork.of_rows(positions, counts, logit_rows=len(step.logit_rows) + num_scored)


def layer_kinds(config: ModelConfig, weights: WeightTable) -> tuple[int, ...]:
    """Return the kind of each layer: layers of one kind take the same time and memory. Kinds count from 0."""
    kinds: dict[tuple[LayerSpec, int | None], int] = {}
    found: list[int] = []
    for index, spec in enumerate(config.layers):
        alike = spec.with_attention(rope=None)
        forms = weights.layers[index] if index < len(weights.layers) else None
        found.append(kinds.setdefault((alike, forms), len(kinds)))
    return tuple(found)


class CostModel:
    """Roofline of one device for one model: the slower of reading and multiplying, plus KV reads and overheads.

    A step reads its layers' weights, and the head's table if it needs logits. Embedding rows are negligible. A step of
    many rows first widens packed weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: DeviceModel,
        *,
        weights: WeightTable = FLOATS,
        kind: str = "emulated",
        dtype: str = "bfloat16",
        kv: str = "",
        as_model_bytes: int | None = None,
        as_kv_bytes_per_token: int | None = None,
        expert_skew: float = 0.0,
    ) -> None:
        """``kind`` and ``dtype``: as for ``resident_bytes``. ``kv``: form of the KV; empty: the dtype.

        Experts in host memory are read at the device's ``ram_bytes_per_s``, by default ``RAM_BYTES_PER_S``.
        ``as_model_bytes`` and ``as_kv_bytes_per_token`` (all layers): sizes of the model to time; None: the config's.
        ``expert_skew``: how unequally tokens choose experts, see ``skewed_shares``.
        """
        self._expert_skew = expert_skew
        self._with_kind = partial(
            CostModel,
            config,
            device,
            weights=weights,
            dtype=dtype,
            kv=kv,
            as_model_bytes=as_model_bytes,
            as_kv_bytes_per_token=as_kv_bytes_per_token,
            expert_skew=expert_skew,
        )
        weights = replace(weights, draft=None)  # a draft model's process takes memory, and no time of a step
        self._kind, self._dtype = split_kind(kind)[0], dtype
        self._has_graphs = kv not in KV_FORMS or _codes_fit(config, kv)
        self._config = config
        self._device = device
        self._sizes = resident_sizes(config, weights, kind=kind, dtype=dtype)
        kind, percent = split_kind(kind)
        read_kind = device.reads_as if kind == "emulated" and device.reads_as else _TIMED_AS.get(kind, kind)
        self._read = resident_sizes(config, weights, kind=with_ram_percent(read_kind, percent), dtype=dtype)
        self._widened = resident_sizes(config, weights, kind=with_ram_percent(WIDE, percent), dtype=dtype)
        self._widens_above = _WIDENS_ABOVE_ROWS.get(read_kind)
        # size of the timed model over the config's
        self._scale = (as_model_bytes or self._sizes.matrices) / self._sizes.matrices
        own_kv = config.kv_bytes_per_token(form=kv or dtype) or 1  # a model without attention keeps none
        kv_scale = (as_kv_bytes_per_token or own_kv) / own_kv
        self._kv_bytes = [  # bytes per token
            config.kv_bytes_per_token((layer,), form=kv or dtype) * kv_scale for layer in range(config.num_layers)
        ]
        self._weights = [multiplied_parameters(spec, config.hidden_size) * self._scale for spec in config.layers]
        counts = [spec.experts.count if spec.experts else 0 for spec in config.layers]
        self._moved = [num_in_ram(count, percent) for count in counts]  # experts of each layer in host memory
        self._used_in_ram = [  # weights that a token uses of experts in host memory, in the mean
            used_expert_parameters(spec, config.hidden_size) * self._scale * moved / count if moved else 0.0
            for spec, count, moved in zip(config.layers, counts, self._moved, strict=True)
        ]
        self._widths = [spec.attention.query_width if spec.attention else 0 for spec in config.layers]
        self._states = [spec.state_values() for spec in config.layers]
        self.kinds = layer_kinds(config, weights)  # kind of each layer
        self.has_experts = any(spec.experts is not None for spec in config.layers)

    def with_ram_percent(self, percent: int) -> CostModel:
        """Return the cost with ``percent`` of each layer's experts in host memory."""
        return self._with_kind(kind=with_ram_percent(self._kind, percent))

    def of_model(self, config: ModelConfig, weights: WeightTable) -> CostModel:
        """Return the cost of another model on the same device, without experts in host memory."""
        return CostModel(config, self._device, weights=weights, kind=self._kind, dtype=self._dtype)

    def weight_bytes(self, slices: Sequence[Slice]) -> int:
        """Return the memory of the slices' weights."""
        sizes = self._sizes
        layers = sum(self._sum(sizes.layers, part.layers) + sizes.of_tables(part) for part in slices)
        return int(layers * self._scale)

    def kv_bytes_per_token(self, slices: Sequence[Slice]) -> int:
        """Return the memory of one token's KV in all layers of the slices."""
        return int(sum(self._sum(self._kv_bytes, part.layers) for part in slices))

    def slice_cost(self, part: Slice) -> SliceCost:
        """Return the cost of steps on a slice."""
        if part.layers.end > self._config.num_layers:  # the timed model has fewer layers
            return self.mean_cost(len(part.layers), head=part.head)
        return self._cost(part.layers, 1.0, head=part.head)

    def kind_costs(self) -> list[SliceCost]:
        """Return the cost of steps on one layer of each kind."""
        firsts = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        return [self._cost(LayerRange(first, first + 1), 1.0, head=False) for first in firsts]

    def mean_cost(self, num_layers: int, *, head: bool) -> SliceCost:
        """Return the cost of steps on ``num_layers`` layers of mean size."""
        every = LayerRange(0, self._config.num_layers)
        return self._cost(every, num_layers / len(every), head=head)

    def _cost(self, layers: LayerRange, share: float, *, head: bool) -> SliceCost:
        """Return the cost of ``share`` times the layers."""
        device, sizes = self._device, self._read
        run = slice(layers.start, layers.end)
        layer_bytes, wide_bytes = share * sum(sizes.layers[run]), share * sum(self._widened.layers[run])
        expert_bytes = share * sum(sizes.experts[run])
        head_weights = self._config.vocab_size * self._config.hidden_size * self._scale if head else 0.0
        specs, moved = self._config.layers[run], self._moved[run]
        experts = next((spec.experts for spec in specs if spec.experts is not None), None)
        head_bytes, wide_head_bytes = (sizes.head, self._widened.head) if head else (0, 0)
        attention = [self._attention(layers, window, share) for window in self._windows(layers)]
        return SliceCost(
            read_s=self._read_s(layer_bytes - expert_bytes),
            expert_read_s=self._read_s(expert_bytes),
            ram_read_s=share * sum(sizes.in_ram[run]) * self._scale / (device.ram_bytes_per_s or RAM_BYTES_PER_S),
            ram_token_s=2 * share * sum(self._used_in_ram[run]) / _RAM_FLOPS,
            num_experts=experts.count if experts is not None else 0,
            ram_experts=max(moved, default=0),
            beside_read_s=self._read_s(share * sum(sizes.shared[run])),
            crossing_s=_CROSSING_S * share * sum(map(bool, moved)),
            expert_share=experts.used / experts.count if experts is not None else 1.0,
            expert_shares=skewed_shares(experts.count, experts.used, self._expert_skew)
            if experts is not None and self._expert_skew
            else (),
            token_s=2 * share * (sum(self._weights[run]) - sum(self._used_in_ram[run])) / device.flops,
            head_read_s=self._read_s(head_bytes),
            head_row_s=2 * head_weights / device.flops,
            attention=tuple(attention),
            state_row_s=2 * share * _STATE_VALUE_BYTES * sum(self._states[run]) / device.bandwidth_bytes_per_s,
            state_token_s=_STATE_FLOPS * share * sum(self._states[run]) / device.flops,
            step_overhead_s=device.step_overhead_s + share * sum(self._overhead_s(spec) for spec in specs),
            row_overhead_s=device.sequence_overhead_s + share * len(layers) * device.layer_row_s,
            launch_s=0.0 if self._has_graphs else device.step_overhead_s + share * len(layers) * device.launch_layer_s,
            launch_row_s=0.0 if self._has_graphs else share * len(layers) * device.launch_row_s,
            tile_steps=device.packed_tile_steps if layer_bytes < wide_bytes else device.tile_steps,
            widen_s=self._read_s(layer_bytes + wide_bytes) if layer_bytes < wide_bytes else 0.0,
            head_widen_s=self._read_s(head_bytes + wide_head_bytes) if head_bytes < wide_head_bytes else 0.0,
            widens_above_rows=self._widens_above,
        )

    def _overhead_s(self, spec: LayerSpec) -> float:
        """Return the seconds of a layer beside its reads."""
        device = self._device
        found = device.layer_overhead_s
        found += device.experts_overhead_s if spec.experts is not None else 0.0
        return found + (device.recurrent_overhead_s if spec.recurrent is not None else 0.0)

    def _windows(self, layers: LayerRange) -> list[int | None]:
        """Return the windows of some layers with attention, each once; one without limit if none has attention."""
        specs = [self._config.layers[index] for index in layers]
        return list(dict.fromkeys(spec.window for spec in specs if spec.attention is not None)) or [None]

    def _attention(self, layers: LayerRange, window: int | None, share: float) -> AttentionCost:
        """Return the cost of attention in ``share`` times the layers that have this window."""
        own = [index for index in layers if self._config.layers[index].window == window]
        return AttentionCost(
            window=window,
            kv_token_s=share * sum(self._kv_bytes[index] for index in own) / self._device.bandwidth_bytes_per_s,
            pair_s=4 * share * sum(self._widths[index] for index in own) / self._device.flops,
        )

    def _sum(self, values: Sequence[float], layers: LayerRange) -> float:
        """Return the sum of some layers' values; if the timed model has fewer layers, of mean ones."""
        if layers.end > len(values):
            return sum(values) / len(values) * len(layers)
        return sum(values[layers.start : layers.end])

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes * self._scale / self._device.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Attention of the layers with one window: the longer of reading and multiplying."""

    window: int | None  # tokens that a query sees; None: all
    kv_token_s: float  # reading one token's KV
    pair_s: float  # multiplying, per pair of tokens

    def seen(self, work: StepWork) -> StepWork:
        """Return the work of what the layers see."""
        return work if self.window is None else work.within(self.window)

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        seen = work if self.window is None else work.within(self.window)
        read_s, pairs_s = self.kv_token_s * seen.kv_tokens, self.pair_s * seen.attention_pairs
        return read_s if read_s > pairs_s else pairs_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCost:
    """Step costs of one slice. Matrices and attention each take the longer of reading and multiplying."""

    read_s: float  # reading the layers' weights, without experts
    token_s: float  # multiplying with them, per token
    head_read_s: float  # reading the head's weights; 0 without the head
    head_row_s: float  # multiplying with them, per row of logits
    attention: tuple[AttentionCost, ...]
    step_overhead_s: float
    row_overhead_s: float
    tile_steps: tuple[tuple[int, float], ...]
    launch_s: float = 0.0  # least time of a step without graphs, whose kernels the host starts; 0: graphs start them
    launch_row_s: float = 0.0  # the same, in addition for each sequence
    widen_s: float = 0.0  # reading packed layers and writing their values, in a step of many tokens
    head_widen_s: float = 0.0  # the head's
    widens_above_rows: int | None = None  # None: never
    expert_read_s: float = 0.0  # reading all experts on the device
    expert_share: float = 1.0  # share of the experts that one token uses
    num_experts: int = 0  # experts of a layer; 0: none
    ram_experts: int = 0  # experts of a layer that are in host memory
    ram_read_s: float = 0.0  # reading all experts in host memory
    ram_token_s: float = 0.0  # multiplying with them on the CPU, per token
    beside_read_s: float = 0.0  # part of ``read_s``: the shared experts, which the device reads while the CPU computes
    crossing_s: float = 0.0  # way to the CPU and back
    expert_shares: tuple[ExpertShare, ...] = ()  # shares that steps of the model read; empty: not known
    state_row_s: float = 0.0  # reading and writing one sequence's state
    state_token_s: float = 0.0  # multiplying with it, per token

    @property
    def has_experts(self) -> bool:
        """Whether a layer of the slice has experts, which steps read as far as their tokens use them."""
        return self.expert_share < 1.0

    def distinct_share(self, tokens: int) -> float:
        """Return the share of the experts that ``tokens`` tokens use together: an upper bound while not measured."""
        return distinct_share(tokens, self.expert_share, self.expert_shares)

    def ram_s(self, work: StepWork) -> float:
        """Return the mean seconds in which the CPU computes experts: the longer of reading and multiplying."""
        return max(self.ram_read_s * self.distinct_share(work.tokens), self.ram_token_s * work.tokens)

    def wait_s(self, work: StepWork) -> float:
        """Return the mean seconds of the step in which the device waits for the CPU's experts."""
        read = round(self.distinct_share(work.tokens) * self.num_experts)
        if not self.ram_experts or not read:
            return 0.0
        on_device = self.num_experts - self.ram_experts
        each_s = self.ram_s(work) * self.num_experts / (read * self.ram_experts)
        device_s = self.expert_read_s / on_device if on_device else 0.0
        return self.crossing_s + mean_wait_s(
            read, self.num_experts, self.ram_experts, ram_s=each_s, device_s=device_s, beside_s=self.beside_read_s
        )

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of the step, without jitter: the device's, and those in which it waits for the CPU.

        Schedulers compare many steps, and simulators time every one: keep it fast.
        """
        tokens, rows, logit_rows = work.tokens, work.rows, work.logit_rows
        read_s = self.read_s * self._stretch(tokens)
        if self.expert_read_s and (share := self.distinct_share(tokens)):
            each = round(tokens * self.expert_share / share)  # tokens of an expert that is read
            read_s += self.expert_read_s * share * self._stretch(each)
        seconds = max(read_s, self.token_s * tokens)
        if self._widens(tokens):
            seconds += self.widen_s
        if logit_rows:
            seconds += max(self.head_read_s * self._stretch(logit_rows), self.head_row_s * logit_rows)
            if self._widens(logit_rows):
                seconds += self.head_widen_s
        seconds += sum([attention.step_s(work) for attention in self.attention])
        if self.state_row_s or self.state_token_s:
            seconds += max(self.state_row_s * rows, self.state_token_s * tokens)
        if self.ram_experts:
            seconds += self.wait_s(work)
        seconds = seconds + self.step_overhead_s + rows * self.row_overhead_s
        return max(seconds, self.launch_s + rows * self.launch_row_s)

    def _widens(self, rows: int) -> bool:
        return self.widens_above_rows is not None and rows > self.widens_above_rows

    def _stretch(self, tokens: int) -> float:
        """Return the factor on reading weights for this number of tokens, by tiles."""
        factor = 1.0
        for first_tokens, more in self.tile_steps:
            if tokens >= first_tokens:
                factor *= more
        return factor


class Jitter:
    """Random factors around 1 for step times: gamma-distributed, so positive and skewed like real times."""

    def __init__(self, *, variation: float, entropy: Sequence[int]) -> None:
        """``variation``: coefficient of variation; equal ``entropy`` gives the same sequence of factors."""
        self._variation = variation
        self._generator = np.random.default_rng(tuple(entropy))
        self._drawn: list[float] = []

    def factor(self) -> float:
        """Return the next factor; 1 without variation."""
        if not self._variation:
            return 1.0
        if not self._drawn:
            square = self._variation**2
            self._drawn = self._generator.gamma(1 / square, square, _DRAWS_AT_ONCE).tolist()
        return self._drawn.pop()
