"""Integers modulo 2**64 in place of hidden states. One token's state is one uint64.

::

    x        = mix(token + 1)                            embedding
    kv_l[p]  = (x ^ w[p]) * key[l]                       written by layer l for position p
    x        = shift((x + sum_j kv_l[j] * w[j]) * key[l])           p - window < j <= p; w[j], key[l] odd;
                                                                    shift(x) = x ^ (x >> 29)
    s_l[p]   = s_l[p - 1] * factor[l] + kv_l[p]          recurrent layers instead, factor[l] odd, s_l[-1] = 0:
    x        = shift((x + s_l[p]) * key[l])
    x        = shift(x * key[l, (x >> 40) mod E])        experts: a token uses one of E, chosen by its own state
    token    = mix(x) mod V                              head

Shape letters: T packed tokens, H hidden, V vocabulary, R rows with logits, L layers.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import Activations, ActivationType

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, 2**64 / golden ratio: the step of splitmix64
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_LAYER_SALT = np.uint64(0x6C61796572)
_POSITION_SALT = np.uint64(0x706F736974)
_ELEMENT_SALT = np.uint64(0x656C656D)
_EXPERT_SALT = np.uint64(0x657870657274)
_STATE_SALT = np.uint64(0x7374617465)
_ROUTER_SHIFT = np.uint64(40)

TOP_LOGIT = 32.0
RUNNER_UP_LOGITS = (31.0, 30.0, 29.0, 28.0, 26.0, 24.0)  # the next best tokens; all others have 0..12
_NUM_BASE_LOGITS = np.uint64(13)


def mix(values: Words) -> Words:
    """Apply splitmix64's finaliser: a bijection where every input bit affects every output bit (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def _odd(start: int, stop: int, salt: np.uint64) -> Words:
    """Return odd pseudo-random multipliers for the indices ``[start, stop)``."""
    return mix(np.arange(start, stop, dtype=np.uint64) * _GOLDEN + salt) | _ONE


def position_weights(start: int, stop: int) -> Words:
    """Return ``w[p]`` for absolute positions ``[start, stop)``."""
    return _odd(start, stop, _POSITION_SALT)


@lru_cache(maxsize=64)  # a process's slices
def layer_keys(start: int, stop: int) -> Words:
    """Return ``key[l]`` for the model's layers ``[start, stop)``."""
    return _odd(start, stop, _LAYER_SALT)


def embed(tokens: npt.NDArray[np.integer]) -> Words:
    """Convert token ids ``[T]`` to states ``[T]``."""
    return mix((tokens.astype(np.uint64) + _ONE) * _GOLDEN)


def kv_values(state: Words, weights: Words, key: np.uint64) -> Words:
    """Return the values that one layer stores for each token, ``[T]``."""
    return (state ^ weights) * key


def rests(values: Words) -> Words:
    """Return the lower bits that a form of KV keeps beside the codes of values."""
    return mix(values)


def leave_layer(state: Words, attended: Words, key: np.uint64) -> Words:
    """Return states ``[T]`` after a layer. ``attended`` [T]: weighted sum over the slots that it sees."""
    state = (state + attended) * key
    return state ^ (state >> np.uint64(29))


@lru_cache(maxsize=256)  # a process's layers
def state_factors(layer: int) -> tuple[np.uint64, np.uint64]:
    """Return ``factor[l]`` of one of the model's layers, and its inverse."""
    factor = _odd(layer, layer + 1, _STATE_SALT)[0]
    return factor, np.uint64(pow(int(factor), -1, 1 << 64))


def next_states(before: np.uint64, values: Words, factors: tuple[np.uint64, np.uint64]) -> Words:
    """Return a layer's states ``[n]`` behind each of n tokens of a sequence, with the values ``[n]`` that they add."""
    powers = np.multiply.accumulate(np.full(len(values), factors[0], np.uint64))
    inverse = np.multiply.accumulate(np.full(len(values), factors[1], np.uint64))
    return powers * (before + np.cumsum(values * inverse))


@lru_cache(maxsize=256)  # a process's layers
def expert_keys(layer: int, count: int) -> Words:
    """Return ``key[l, e]`` for the experts ``[0, count)`` of one of the model's layers."""
    return _odd(layer * count, (layer + 1) * count, _EXPERT_SALT)


def pass_experts(state: Words, keys: Words) -> Words:
    """Return states ``[T]`` after a layer's experts, with their keys ``[E]``."""
    state = state * keys[(state >> _ROUTER_SHIFT) % np.uint64(len(keys))]
    return state ^ (state >> np.uint64(29))


@lru_cache(maxsize=4)  # hidden sizes; a process serves one model
def _element_factors(num_words: int) -> Words:
    factors = _odd(0, num_words, _ELEMENT_SALT)
    factors[0] = _ONE
    return factors


def _expand(state: Words, hidden_size: int) -> npt.NDArray[np.uint16]:
    """Return ``[T, H]``: the state in elements 0-3, then 64-bit words that are bijections of it."""
    words = state[:, None] * _element_factors(-(-hidden_size // 4))[None, :]
    return np.ascontiguousarray(words.astype("<u8", copy=False).view("<u2")[:, :hidden_size])


def encode(state: Words, hidden_size: int, kind: ActivationType) -> Activations:
    """Convert states ``[T]`` to activations ``[T, H]``: 16 bits per element, raw or as an exact float32."""
    elements = _expand(state, hidden_size)
    return elements if kind is ActivationType.BF16 else elements.astype(np.float32)


def decode(activations: Activations, kind: ActivationType) -> Words:
    """Convert activations ``[T, H]`` to states ``[T]``. A row with any altered element gives a wrong state."""
    state = _first_word(activations)
    expected = encode(state, activations.shape[1], kind)
    bits = np.uint16 if kind is ActivationType.BF16 else np.uint32
    if np.array_equal(activations.view(bits), expected.view(bits)):
        return state
    difference = activations.view(bits) ^ expected.view(bits)
    places = _odd(0, activations.shape[1], _POSITION_SALT)
    damage = (difference.astype(np.uint64) * places).sum(axis=1, dtype=np.uint64)
    return np.where(difference.any(axis=1), mix(state ^ mix(damage + _GOLDEN)), state)


def _first_word(activations: Activations) -> Words:
    """Return the state in elements 0-3. Elements that are not 16-bit integers are rounded to the nearest."""
    first = activations[:, :4]
    if first.dtype != np.uint16:
        first = np.clip(np.nan_to_num(first), 0, 0xFFFF).astype(np.uint16)
    return np.ascontiguousarray(first.astype("<u2", copy=False)).view("<u8").reshape(-1).astype(np.uint64)


def next_tokens(state: Words, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the correct next token of each state, ``[R]``."""
    return (mix(state) % np.uint64(vocab_size)).astype(np.int64)


def base_logits(vocab_size: int) -> npt.NDArray[np.float32]:
    """Return small integers ``[V]``, the initial logits of every row."""
    return (mix(np.arange(vocab_size, dtype=np.uint64)) % _NUM_BASE_LOGITS).astype(np.float32)


def make_logits(state: Words, base: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return exact small integers ``[R, V]``: 32 for the correct token, 24 to 31 for up to six others, else 0 to 12."""
    vocab_size = len(base)
    logits = np.repeat(base[None, :], len(state), axis=0)
    rows = np.arange(len(state))
    steps = np.arange(1, len(RUNNER_UP_LOGITS) + 1, dtype=np.uint64) * _GOLDEN
    for step, logit in reversed(list(zip(steps, RUNNER_UP_LOGITS, strict=True))):
        logits[rows, next_tokens(state + step, vocab_size)] = logit
    logits[rows, next_tokens(state, vocab_size)] = TOP_LOGIT
    return logits
