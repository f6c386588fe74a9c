"""How a request wants its tokens drawn."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.errors import RequestInvalid

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by less would overflow long before it changed a draw."""

MAX_TEMPERATURE = 100.0  # all but even among all tokens; far above it float32 would fail

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked where it is built. Raises RequestInvalid, which the gateway hands to the client."""

    temperature: float = 1.0  # 0: the most likely token
    seed: int = 0  # 0 to MAX_SEED; with choice and position it decides every draw

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:  # also false for NaN
            raise RequestInvalid(
                f"temperature {self.temperature} cannot be used",
                fact=f"it goes from 0 to {MAX_TEMPERATURE:g}",
                next_step="give a number such as 0.7",
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestInvalid(f"seed {self.seed} cannot be used", next_step=f"give an integer from 0 to {MAX_SEED}")

    @property
    def greedy(self) -> bool:
        """Whether no draw is needed."""
        return self.temperature < GREEDY_BELOW
