"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgepipe.errors import RequestInvalid
from edgepipe.sampling.bounds import Biases, Bound, Flag, Optional, Text, Within, refusal

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by less would overflow long before it changed a draw."""

MAX_TEMPERATURE = 100.0  # almost uniform over all tokens; far above it float32 would fail
MAX_COUNT = (1 << 31) - 1  # most tokens; the context limits them further
MAX_USER_CHARS = 32
MAX_GRAMMAR_BYTES = 256 << 10  # a schema of 64 KiB with the overhead of tool definitions

SAMPLING_BOUNDS: Mapping[str, Bound] = {
    "temperature": Within(0.0, MAX_TEMPERATURE),
    "seed": Within(0, 2**64 - 1),
    "top_k": Within(0, MAX_COUNT),
    "top_p": Within(0.0, 1.0, above=True),
    "min_p": Within(0.0, 1.0),
    "frequency_penalty": Within(-2.0, 2.0),  # OpenAI's
    "presence_penalty": Within(-2.0, 2.0),  # OpenAI's
    "repetition_penalty": Within(0.01, 100.0),
    "logit_bias": Biases(300, Within(-100.0, 100.0)),  # OpenAI's
    "logprobs": Flag(),
    "top_logprobs": Within(0, 20),  # OpenAI's; devices reserve memory for it
    "prompt_logprobs": Flag(),
    "min_tokens": Within(0, MAX_COUNT),
    "grammar": Optional("text", Text(MAX_GRAMMAR_BYTES)),
}
"""Bounds of every field of SamplingParams."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Constraint on the output, as text that llguidance compiles (``edgepipe.sampling.grammar``).

    The gateway compiles it before it sends one. Raises RequestInvalid if it is too long to send.
    """

    text: str
    user: str = ""  # label of the gateway's user, at most MAX_USER_CHARS: grammars of several users compile in turns

    def __post_init__(self) -> None:
        if fact := Text(MAX_GRAMMAR_BYTES).fault(self.text, None) or ("it is empty" if not self.text else ""):
            raise RequestInvalid("the output's grammar cannot be used", fact=fact, next_step="make the schema smaller")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, checked on construction except for token ids.

    Raises RequestInvalid, which the gateway returns to the client. Logits change in this order: repetition penalty,
    frequency and presence penalties, bias, bans (end tokens before ``min_tokens``, the grammar). Then temperature,
    top-k, top-p of the rest, min-p. Log-probabilities are the model's own, before all changes.
    """

    temperature: float = 1.0  # 0: always the most likely token
    seed: int = 0  # 64 bits; determines every draw, with choice and position
    top_k: int = 0  # sample from the k most likely tokens only; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens with this total probability
    min_p: float = 0.0  # sample from tokens with at least this share of the highest probability
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time it was sampled
    presence_penalty: float = 0.0  # subtracted once if the token was sampled
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once
    logprobs: bool = False  # return them for every sampled token
    top_logprobs: int = 0  # number of alternatives per token
    prompt_logprobs: bool = False  # return them for every prompt token except the first, with ``top_logprobs``
    min_tokens: int = 0  # ban EOS and stop ids before this many output tokens
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        if (refused := refusal(self, SAMPLING_BOUNDS, None)) is not None:
            raise RequestInvalid(f"{refused.field} cannot be used", fact=refused.fact)

    @property
    def greedy(self) -> bool:
        """Whether sampling needs no draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises_output(self) -> bool:
        """Whether logits depend on sampled tokens."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def penalises_prompt(self) -> bool:
        """Whether logits depend on the prompt's tokens."""
        return self.repetition_penalty != 1

    @property
    def needs_output(self) -> bool:
        """Whether the sampler needs the earlier output."""
        return self.penalises_output or self.grammar is not None
