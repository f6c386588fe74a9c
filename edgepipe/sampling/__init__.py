"""Logits, parameters and a seed to token ids: pure functions that a stage runs beside its device."""

from edgepipe.sampling.draws import draw
from edgepipe.sampling.params import SamplingParams
from edgepipe.sampling.sampler import SampleRow, sample

__all__ = ["SampleRow", "SamplingParams", "draw", "sample"]
