"""Log-probabilities that a client asked for: the model's own, before penalties, bias, masks and temperature."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the token at one position, and of the most likely ones there. Natural logarithms, at most 0."""

    logprob: float  # of the token that stands there
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Of consecutive prompt tokens of one sequence. The first token of a prompt has none."""

    position: int  # absolute, of the first token; 1 or more
    tokens: tuple[TokenLogprobs, ...]
