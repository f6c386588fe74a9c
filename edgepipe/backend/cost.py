"""Cost model of a named device: time of a step, and memory of weights and KV.

The emulated backend and the simulator use the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgepipe.backend.devices import DeviceModel
from edgepipe.backend.types import Step
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.resident import WIDE, resident_sizes
from edgepipe.model.weight_table import FLOATS, WeightTable

_DRAWS_AT_ONCE = 256

# Rows above which a backend widens packed weights before it multiplies, by kind (``edgepipe.model.resident``). Others
# multiply packed weights at any size.
_WIDENS_ABOVE_ROWS = {"torch-cuda": 64, "emulated": 64}


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
        pairs = float(kv_tokens)  # for rows of one token
        if tokens != rows:
            pairs = sum(count * (at + (count + 1) / 2) for at, count in zip(positions, num_tokens, strict=True))
        return cls(tokens=tokens, rows=rows, kv_tokens=kv_tokens, attention_pairs=pairs, logit_rows=logit_rows)

    def later(self, turns: int) -> StepWork:
        """Return the work of the same decodes, ``turns`` tokens later."""
        more = turns * self.rows
        return self._replace(kv_tokens=self.kv_tokens + more, attention_pairs=self.attention_pairs + more)


def work_of(step: Step) -> StepWork:
    """Return the work of ``step``."""
    positions, counts = [row.position for row in step.rows], [row.num_tokens for row in step.rows]
    num_scored = len(step.scores.rows) if step.scores is not None else 0
    return StepWork.of_rows(positions, counts, logit_rows=len(step.logit_rows) + num_scored)


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
    ) -> None:
        """``kind`` and ``dtype``: as for ``resident_bytes``. ``kv``: form of the KV; empty: the dtype.

        ``as_model_bytes`` and ``as_kv_bytes_per_token`` (all layers): sizes of the model to time; None: the config's.
        """
        self._config = config
        self._device = device
        self._sizes = resident_sizes(config, weights, kind=kind, dtype=dtype)
        self._widened = resident_sizes(config, weights, kind=WIDE, dtype=dtype)
        self._widens_above = _WIDENS_ABOVE_ROWS.get(kind)
        # size of the timed model over the config's
        self._scale = (as_model_bytes or self._sizes.matrices) / self._sizes.matrices
        own_kv = config.kv_bytes_per_token(num_layers=config.num_layers, form=kv or dtype)
        self._layer_kv_bytes = (as_kv_bytes_per_token or own_kv) / config.num_layers  # per token

    def weight_bytes(self, slices: Sequence[Slice]) -> int:
        """Return the memory of the slices' weights."""
        sizes = self._sizes
        return int(sum(sizes.of_layers(part.layers) + sizes.of_tables(part) for part in slices) * self._scale)

    def kv_bytes_per_token(self, slices: Sequence[Slice]) -> int:
        """Return the memory of one token's KV in all layers of the slices."""
        return int(self._layer_kv_bytes * sum(len(part.layers) for part in slices))

    def slice_cost(self, part: Slice) -> SliceCost:
        """Return the cost of steps on a slice."""
        layers = part.layers
        return self._cost(len(layers), self._sizes.of_layers(layers), self._widened.of_layers(layers), head=part.head)

    def mean_cost(self, num_layers: int, *, head: bool) -> SliceCost:
        """Return the cost of steps on so many layers of mean size."""
        share = num_layers / self._config.num_layers
        return self._cost(num_layers, sum(self._sizes.layers) * share, sum(self._widened.layers) * share, head=head)

    def _cost(self, layers: int, layer_bytes: float, wide_bytes: float, *, head: bool) -> SliceCost:
        """``layer_bytes``, ``wide_bytes``: of all layers, as they are kept and widened."""
        device = self._device
        layer_weights = layers * self._config.layer_parameters() * self._scale
        head_weights = self._config.vocab_size * self._config.hidden_size * self._scale if head else 0.0
        width = self._config.num_heads * self._config.head_dim
        head_bytes, wide_head_bytes = (self._sizes.head, self._widened.head) if head else (0, 0)
        return SliceCost(
            read_s=self._read_s(layer_bytes),
            token_s=2 * layer_weights / device.flops,
            head_read_s=self._read_s(head_bytes),
            head_row_s=2 * head_weights / device.flops,
            kv_token_s=layers * self._layer_kv_bytes / device.bandwidth_bytes_per_s,
            pair_s=4 * layers * width / device.flops,
            step_overhead_s=device.step_overhead_s + layers * device.layer_overhead_s,
            row_overhead_s=device.sequence_overhead_s,
            tile_steps=device.tile_steps,
            widen_s=self._read_s(layer_bytes + wide_bytes) if layer_bytes < wide_bytes else 0.0,
            head_widen_s=self._read_s(head_bytes + wide_head_bytes) if head_bytes < wide_head_bytes else 0.0,
            widens_above_rows=self._widens_above,
        )

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes * self._scale / self._device.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCost:
    """Step costs of one slice. Matrices and attention each take the longer of reading and multiplying."""

    read_s: float  # reading the layers' weights
    token_s: float  # multiplying with them, per token
    head_read_s: float  # reading the head's weights; 0 without the head
    head_row_s: float  # multiplying with them, per row of logits
    kv_token_s: float  # reading one token's KV
    pair_s: float  # multiplying, per pair of tokens
    step_overhead_s: float
    row_overhead_s: float
    tile_steps: tuple[tuple[int, float], ...]
    widen_s: float = 0.0  # reading packed layers and writing their values, in a step of many tokens
    head_widen_s: float = 0.0  # the head's
    widens_above_rows: int | None = None  # None: never

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of the step on the device, without jitter."""
        seconds = max(self.read_s * self._stretch(work.tokens), self.token_s * work.tokens)
        seconds += self.widen_s if self._widens(work.tokens) else 0.0
        if work.logit_rows:
            seconds += max(self.head_read_s * self._stretch(work.logit_rows), self.head_row_s * work.logit_rows)
            seconds += self.head_widen_s if self._widens(work.logit_rows) else 0.0
        seconds += max(self.kv_token_s * work.kv_tokens, self.pair_s * work.attention_pairs)
        return seconds + self.step_overhead_s + work.rows * self.row_overhead_s

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
