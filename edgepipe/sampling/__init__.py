"""Logits, parameters and a seed to token ids: pure functions that a stage runs beside its device."""

from edgepipe.sampling.draws import draw
from edgepipe.sampling.logprobs import PromptLogprobs, TokenLogprobs
from edgepipe.sampling.params import GrammarSpec, SamplingParams
from edgepipe.sampling.sampler import SampleRow, sample

__all__ = ["GrammarSpec", "PromptLogprobs", "SampleRow", "SamplingParams", "TokenLogprobs", "draw", "sample"]
