"""Sampling: logits, parameters and a seed give token ids. A pure function of a sequence's tokens, run on the CPU."""

from edgepipe.sampling.device import logit_edits, sample_picked
from edgepipe.sampling.draws import draw
from edgepipe.sampling.logprobs import LogprobLog, PromptLogprobs, TokenLogprobs
from edgepipe.sampling.params import GrammarSpec, SamplingParams
from edgepipe.sampling.sampler import Sampled, SampleRow, sample
from edgepipe.sampling.sequence import SequenceSampler, StartGrammar

__all__ = [
    "GrammarSpec",
    "LogprobLog",
    "PromptLogprobs",
    "SampleRow",
    "Sampled",
    "SamplingParams",
    "SequenceSampler",
    "StartGrammar",
    "TokenLogprobs",
    "draw",
    "logit_edits",
    "sample",
    "sample_picked",
]
