"""An emulated draft model: it finds the emulated model's next token with a given probability, in a given time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from edgepipe.backend.drafting import Acceptance, Drafts, DraftSource
from edgepipe.spec.facts import ModelConfig
from edgepipe_emulated import arithmetic

_DRAW_BITS = 53
_SALT = 0x6472616674
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_POSITION_SALT = 0x706F736974
_MOST_BACK = 96  # tokens: more than all windows in flight have


class EmulatedDraftModel:
    """See ``DraftModel``."""

    def __init__(self, config: ModelConfig, acceptance: Acceptance, *, token_s: float, seed: int) -> None:
        """``token_s``: seconds that a draft takes."""
        self._config = config
        self._acceptance = acceptance
        self._token_s = token_s
        self._seed = seed

    def drafter(self, tokens: Sequence[int]) -> EmulatedDrafter:
        """See ``DraftModel.drafter``."""
        return EmulatedDrafter(SingleTokens(self._config, tokens), self._acceptance, self._token_s, self._seed)


class EmulatedDrafter:
    """See ``Drafter``. Whether a draft is right depends on the seed and on its position only."""

    def __init__(self, model: SingleTokens, acceptance: Acceptance, token_s: float, seed: int) -> None:
        self._model = model
        self._acceptance = acceptance
        self._token_s = token_s
        self._seed = seed
        self._ahead: list[int] = []  # right drafts that the model has behind the known tokens

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``. Takes the time of ``count`` drafts."""
        return self.go_on(tokens, (), count)

    def go_on(self, tokens: Sequence[int], assumed: Sequence[int], count: int) -> Drafts:
        """See ``ChainDrafter.go_on``. Takes the time of ``count`` drafts. What follows a wrong draft is wrong."""
        done_at_s = time.monotonic() + count * self._token_s
        model = self._model
        self._know(tokens)
        self._keep(_equal(self._ahead, assumed))
        length, ids, right = model.length, list[int](), len(self._ahead) == len(assumed)
        while len(ids) < count:
            token = model.next_token() if right else 0
            if right and not self._is_right(length + len(ids)):
                right, token = False, (token + 1) % model.vocab_size
            ids.append(token)
            if right:
                model.append(token)
                self._ahead.append(token)
        if (rest_s := done_at_s - time.monotonic()) > 0:
            time.sleep(rest_s)
        return Drafts(tuple(ids), (DraftSource.MODEL,) * len(ids))

    def _know(self, tokens: Sequence[int]) -> None:
        """Append known tokens. What the model has already is not computed again."""
        same = _equal(self._ahead, tokens)
        if same < len(tokens):
            self._keep(same)
            for token in tokens[same:]:
                self._model.append(token)
            self._ahead = []
        else:
            self._ahead = self._ahead[same:]

    def _keep(self, count: int) -> None:
        """Let the model have only the first ``count`` drafts."""
        self._model.go_back(self._model.length - len(self._ahead) + count)
        del self._ahead[count:]

    def _is_right(self, position: int) -> bool:
        word = _mix((position * _GOLDEN) ^ self._seed ^ _SALT)
        return (word >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS) < self._acceptance.at(position)


def _equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many of the first values are equal."""
    return sum(1 for _ in takewhile(bool, map(eq, some, others)))


class SingleTokens:
    """One sequence of the emulated model, token by token, and back.

    It computes with Python's integers, which take a tenth of numpy's time for single numbers.
    """

    def __init__(self, config: ModelConfig, tokens: Sequence[int]) -> None:
        self.vocab_size = config.vocab_size
        self._layers = [_Layer.of(config, layer, int(key)) for layer, key in enumerate(_keys(config))]
        self._sums = [0] * len(self._layers)  # one entry for each layer: the sum of what tokens left, or its state
        self._windows: list[list[int]] = [[0] for _ in self._layers]  # sums [tokens + 1] of layers with a window
        self._before: deque[tuple[list[int], int]] = deque(maxlen=_MOST_BACK)  # sums and state before the last tokens
        self._state = 0  # state behind the last layer, for the last token
        self.length = 0  # number of tokens
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token."""
        self._before.append((list(self._sums), self._state))
        position, self.length = self.length, self.length + 1
        weight = _mix(position * _GOLDEN + _POSITION_SALT) | 1
        state = _mix((token + 1) * _GOLDEN)
        for index, layer in enumerate(self._layers):
            value = (state ^ weight) * layer.key
            seen = 0
            if layer.factor:
                seen = self._sums[index] = (self._sums[index] * layer.factor + value) & _MASK
            elif layer.attends:
                seen = self._sums[index] = (self._sums[index] + value * weight) & _MASK
                if layer.window:
                    sums = self._windows[index]
                    sums.append(seen)
                    seen -= sums[max(position + 1 - layer.window, 0)]
            state = ((state + seen) * layer.key) & _MASK
            state ^= state >> 29
            if layer.experts:
                state = (state * layer.experts[(state >> 40) % len(layer.experts)]) & _MASK
                state ^= state >> 29
        self._state = state

    def go_back(self, length: int) -> None:
        """Forget all tokens but the first ``length``: at most the last few."""
        while self.length > length:
            self._sums, self._state = self._before.pop()
            self.length -= 1
        for sums in self._windows:
            del sums[length + 1 :]

    def next_token(self) -> int:
        """Return the token with the highest logit."""
        return _mix(self._state) % self.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    key: int
    attends: bool
    window: int  # tokens; 0: all
    factor: int  # factor of a recurrent layer; 0: another kind of layer
    experts: tuple[int, ...]  # their keys

    @classmethod
    def of(cls, config: ModelConfig, layer: int, key: int) -> _Layer:
        spec = config.layers[layer]
        experts = arithmetic.expert_keys(layer, spec.experts.count).tolist() if spec.experts is not None else ()
        return cls(
            key=key,
            attends=spec.attention is not None,
            window=(spec.attention.window or 0) if spec.attention is not None else 0,
            factor=int(arithmetic.state_factors(layer)[0]) if spec.recurrent is not None else 0,
            experts=tuple(experts),
        )


def _keys(config: ModelConfig) -> list[int]:
    return arithmetic.layer_keys(0, config.num_layers).tolist()


def _mix(value: int) -> int:
    """See ``arithmetic.mix``."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
