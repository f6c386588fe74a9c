"""How long a step would take on the emulated device, and how much memory things would need there."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.backend.types import Step
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe_emulated.devices import EmulationSettings

_BYTES_PER_WEIGHT = 2  # bf16
_BYTES_PER_KV_VALUE = 2


class CostModel:
    """Roofline of one device for one model: the slower of reading and multiplying, plus KV reads and overheads.

    Weights that a step reads are its layers', and the head's table where logits are wanted; embedding rows are few.
    """

    def __init__(self, config: ModelConfig, settings: EmulationSettings) -> None:
        self._config = config
        self._device = settings.device
        table = config.vocab_size * config.hidden_size
        whole = config.num_layers * config.layer_parameters() + table * (1 if config.tied_embeddings else 2)
        wanted = settings.as_model_bytes or whole * _BYTES_PER_WEIGHT
        self._scale = wanted / (whole * _BYTES_PER_WEIGHT)  # how much larger the model is that is timed
        own_kv = config.kv_bytes_per_token(num_layers=config.num_layers, bytes_per_value=_BYTES_PER_KV_VALUE)
        self._layer_kv_bytes = (settings.as_kv_bytes_per_token or own_kv) / config.num_layers  # per token

    def weight_bytes(self, slices: Sequence[Slice]) -> int:
        """Memory that the slices' weights take."""
        return int(sum(self._config.slice_parameters(part) for part in slices) * _BYTES_PER_WEIGHT * self._scale)

    def kv_bytes_per_token(self, slices: Sequence[Slice]) -> int:
        """Memory that one token's KV takes in all layers of the slices."""
        return int(self._layer_kv_bytes * sum(len(part.layers) for part in slices))

    def step_s(self, part: Slice, step: Step) -> float:
        """Seconds that the step would take on the device, without jitter."""
        tokens = step.num_tokens
        layers = len(part.layers)
        layer_weights = layers * self._config.layer_parameters() * self._scale
        busy = self._matrix_s(layer_weights, tokens)
        if part.head and len(step.logit_rows):
            head_weights = self._config.vocab_size * self._config.hidden_size * self._scale
            busy += self._matrix_s(head_weights, len(step.logit_rows))
        busy += self._attention_s(layers, step)
        overhead = self._device.step_overhead_s + layers * self._device.layer_overhead_s
        return busy + overhead + len(step.rows) * self._device.sequence_overhead_s

    def _matrix_s(self, num_weights: float, tokens: int) -> float:
        read_s = num_weights * _BYTES_PER_WEIGHT / self._device.bandwidth_bytes_per_s
        for first_tokens, factor in self._device.tile_steps:
            if tokens >= first_tokens:
                read_s *= factor
        return max(read_s, 2 * num_weights * tokens / self._device.flops)

    def _attention_s(self, layers: int, step: Step) -> float:
        """Reading each sequence's KV once, or multiplying with it, whichever is slower."""
        kv_tokens = sum(row.position + row.num_tokens for row in step.rows)
        pairs = sum(row.num_tokens * (row.position + (row.num_tokens + 1) / 2) for row in step.rows)
        read_s = kv_tokens * layers * self._layer_kv_bytes / self._device.bandwidth_bytes_per_s
        width = self._config.num_heads * self._config.head_dim
        return max(read_s, 4 * pairs * layers * width / self._device.flops)
