"""How a request wants its tokens drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgepipe.errors import RequestInvalid

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by less would overflow long before it changed a draw."""

MAX_TEMPERATURE = 100.0  # all but even among all tokens; far above it float32 would fail

MAX_SEED = 2**64 - 1

MAX_TOP_LOGPROBS = 20  # OpenAI's bound, and what devices keep room for
MAX_BIASED_TOKENS = 300  # OpenAI's bound on logit_bias
MAX_BIAS = 100.0
MAX_PENALTY = 2.0  # of frequency and presence, either sign
MAX_REPETITION_PENALTY = 100.0
MAX_GRAMMAR_CHARS = 256 << 10  # a schema of 64 KiB, and what tool definitions add around it


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output may look like, as text that llguidance compiles (``edgepipe.sampling.grammar``).

    Whoever makes one has compiled it before. Raises RequestInvalid if it is too long to travel.
    """

    text: str

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MAX_GRAMMAR_CHARS:
            raise RequestInvalid(
                "the output's grammar cannot be used",
                fact=f"it has {len(self.text)} characters, at most {MAX_GRAMMAR_CHARS} can be used",
                next_step="make the schema smaller",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked where it is built. Raises RequestInvalid, which the gateway hands to the client.

    Logits are changed in this order: repetition penalty, frequency and presence penalties, bias, then what may not
    come (end tokens before ``min_tokens``, the grammar) is barred. Then temperature, top-k, top-p of what top-k left,
    min-p. Log-probabilities are the model's own, before all of this.
    """

    temperature: float = 1.0  # 0: the most likely token
    seed: int = 0  # 0 to MAX_SEED; with choice and position it decides every draw
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
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestInvalid(f"seed {self.seed} cannot be used", next_step=f"give an integer from 0 to {MAX_SEED}")
        if self.top_k < 0:
            raise RequestInvalid(f"top_k {self.top_k} cannot be used", next_step="give 0 for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise RequestInvalid(f"top_p {self.top_p} cannot be used", next_step="give a number above 0, up to 1")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _within("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _within("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.min_tokens < 0:
            raise RequestInvalid(f"min_tokens {self.min_tokens} cannot be used", next_step="give 0 or more")
        self._check_bias()

    @property
    def greedy(self) -> bool:
        """Whether no draw is needed."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises_output(self) -> bool:
        """Whether logits depend on what was sampled."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_prompt(self) -> bool:
        """Whether the sampler has to know the prompt's tokens."""
        return self.repetition_penalty != 1 or self.prompt_logprobs

    @property
    def needs_output(self) -> bool:
        """Whether the sampler has to know what was sampled before."""
        return self.penalises_output or self.grammar is not None

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise RequestInvalid(
                "logit_bias names too many tokens",
                fact=f"it has {len(self.logit_bias)}, at most {MAX_BIASED_TOKENS} can be given",
            )
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise RequestInvalid("logit_bias names a token twice")
        for token, bias in self.logit_bias:
            if token < 0:
                raise RequestInvalid(f"logit_bias names token {token}", next_step="token ids begin at 0")
            _within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def _within(name: str, value: float, lowest: float, highest: float) -> None:
    if math.isfinite(value) and lowest <= value <= highest:
        return
    raise RequestInvalid(
        f"{name} {value} cannot be used",
        fact=f"it goes from {lowest:g} to {highest:g}",
        next_step="give a number such as 0.7" if name == "temperature" else "",
    )
