"""The emulated model's correct answers, computed without slices, blocks, steps or activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe_emulated import arithmetic
from edgepipe_emulated.arithmetic import Words

Choose = Callable[[npt.NDArray[np.float32], int], int]
"""``(logits [V], output position) -> token id``."""


class Oracle:
    """One sequence of the emulated model, with one running sum per layer."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._keys = arithmetic.layer_keys(0, config.num_layers)
        # Each layer's running sums [tokens + 1] of a window, or the last of them.
        self._sums = [np.zeros(1, dtype=np.uint64) for _ in config.layers]
        self._states = [np.uint64(0) for _ in config.layers]  # state of each recurrent layer
        self._length = 0
        self._last = np.zeros(0, dtype=np.uint64)

    def append(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` (at least one) to the sequence."""
        state = arithmetic.embed(np.asarray(tokens, dtype=np.int64))
        weights = arithmetic.position_weights(self._length, self._length + len(tokens))
        for layer, key in enumerate(self._keys):
            spec = self._config.layers[layer]
            seen = self._seen(layer, spec, arithmetic.kv_values(state, weights, key), weights)
            state = arithmetic.leave_layer(state, seen, key)
            experts = spec.experts
            if experts is not None:
                state = arithmetic.pass_experts(state, arithmetic.expert_keys(layer, experts.count))
        self._length += len(tokens)
        self._last = state[-1:]

    def _seen(self, layer: int, spec: LayerSpec, values: Words, weights: Words) -> Words:
        """Return what a layer's mixer gives each appended token."""
        if spec.recurrent is not None:
            states = arithmetic.next_states(self._states[layer], values, arithmetic.state_factors(layer))
            self._states[layer] = states[-1]
            return states
        if spec.attention is None:
            return np.zeros_like(values)
        sums = self._sums[layer][-1] + np.cumsum(values * weights)
        if (window := spec.attention.window) is None:
            self._sums[layer] = sums[-1:]
            return sums
        self._sums[layer] = every = np.concatenate([self._sums[layer], sums])
        ends = np.arange(self._length, self._length + len(values)) + 1
        return sums - every[np.maximum(ends - window, 0)]

    def next_token(self) -> int:
        """Return the token with the highest logit after the appended tokens."""
        return int(arithmetic.next_tokens(self._last, self._config.vocab_size)[0])

    def logits(self) -> npt.NDArray[np.float32]:
        """Return logits ``[V]`` after the appended tokens."""
        return arithmetic.make_logits(self._last, arithmetic.base_logits(self._config.vocab_size))[0]


def next_token(tokens: Sequence[int], config: ModelConfig) -> int:
    """Return the greedy token after ``tokens``."""
    oracle = Oracle(config)
    oracle.append(tokens)
    return oracle.next_token()


def logits(tokens: Sequence[int], config: ModelConfig) -> npt.NDArray[np.float32]:
    """Return logits ``[V]`` after ``tokens``."""
    oracle = Oracle(config)
    oracle.append(tokens)
    return oracle.logits()


def generate(
    prompt: Sequence[int], n: int, config: ModelConfig, *, ignore_eos: bool = False, choose: Choose | None = None
) -> list[int]:
    """Generate up to ``n`` tokens after ``prompt``, ending after an EOS unless that is ignored.

    ``choose`` picks from the logits (a sampler under test); None is greedy.
    """
    oracle = Oracle(config)
    oracle.append(prompt)
    tokens: list[int] = []
    while len(tokens) < n:
        token = oracle.next_token() if choose is None else choose(oracle.logits(), len(tokens))
        tokens.append(token)
        if token in config.eos_token_ids and not ignore_eos:
            break
        oracle.append([token])
    return tokens
