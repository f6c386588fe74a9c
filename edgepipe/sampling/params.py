"""How a request wants its tokens drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgepipe.errors import RequestInvalid
from edgepipe.sampling.bounds import Biases, Bound, Flag, Optional, Text, Within, refusal

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by less would overflow long before it changed a draw."""

MAX_TEMPERATURE = 100.0  # all but even among all tokens; far above it float32 would fail
MAX_COUNT = (1 << 31) - 1  # of tokens; the context bounds it further
MAX_GRAMMAR_BYTES = 256 << 10  # a schema of 64 KiB, and what tool definitions add around it

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
    "top_logprobs": Within(0, 20),  # OpenAI's, and what devices keep room for
    "prompt_logprobs": Flag(),
    "min_tokens": Within(0, MAX_COUNT),
    "grammar": Optional("text", Text(MAX_GRAMMAR_BYTES)),
}
"""Of every field of SamplingParams."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output may look like, as text that llguidance compiles (``edgepipe.sampling.grammar``).

    Whoever makes one has compiled it before. Raises RequestInvalid if it is too long to travel.
    """

    text: str

    def __post_init__(self) -> None:
        if fact := Text(MAX_GRAMMAR_BYTES).fault(self.text, None) or ("it is empty" if not self.text else ""):
            raise RequestInvalid("the output's grammar cannot be used", fact=fact, next_step="make the schema smaller")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked where it is built, but for token ids. Raises RequestInvalid, which the gateway hands to the client.

    Logits are changed in this order: repetition penalty, frequency and presence penalties, bias, then what may not
    come (end tokens before ``min_tokens``, the grammar) is banned. Then temperature, top-k, top-p of what top-k left,
    min-p. Log-probabilities are the model's own, before all of this.
    """

    temperature: float = 1.0  # 0: the most likely token
    seed: int = 0  # of 64 bits; with choice and position it decides every draw
    top_k: int = 0  # only the k most likely; 0: all
    top_p: float = 1.0  # only the most likely that together have this share
    min_p: float = 0.0  # only those with at least this share of the most likely one's
    frequency_penalty: float = 0.0  # taken off a token's logit once for every time that it was sampled
    presence_penalty: float = 0.0  # taken off once if it was sampled
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens of prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once
    logprobs: bool = False  # of every sampled token
    top_logprobs: int = 0  # so many alternatives beside it
    prompt_logprobs: bool = False  # of every prompt token but the first, with ``top_logprobs`` alternatives
    min_tokens: int = 0  # before so many output tokens the choice does not end by EOS or stop ids
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        if (refused := refusal(self, SAMPLING_BOUNDS, None)) is not None:
            raise RequestInvalid(f"{refused.field} cannot be used", fact=refused.fact)

    @property
    def greedy(self) -> bool:
        """Whether no draw is needed."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises_output(self) -> bool:
        """Whether logits depend on what was sampled."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def penalises_prompt(self) -> bool:
        """Whether logits depend on which tokens the prompt has."""
        return self.repetition_penalty != 1

    @property
    def needs_output(self) -> bool:
        """Whether the sampler has to know what was sampled before."""
        return self.penalises_output or self.grammar is not None
