"""Sampling: logits, parameters and a seed give token ids. A pure function of a sequence's tokens, run on the CPU.

The package imports what a program asks for: a command that only reads bounds and parameters loads no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgepipe.sampling.device import logit_edits, sample_picked
    from edgepipe.sampling.draws import draw
    from edgepipe.sampling.logprobs import LogprobLog, PromptLogprobs, TokenLogprobs
    from edgepipe.sampling.params import GrammarSpec, SamplingParams
    from edgepipe.sampling.sampler import SKIPPED, Sampled, SampleRow, sample, window_starts
    from edgepipe.sampling.sequence import SequenceSampler, StartGrammar

_MODULES = {
    "SKIPPED": "sampler",
    "GrammarSpec": "params",
    "LogprobLog": "logprobs",
    "PromptLogprobs": "logprobs",
    "SampleRow": "sampler",
    "Sampled": "sampler",
    "SamplingParams": "params",
    "SequenceSampler": "sequence",
    "StartGrammar": "sequence",
    "TokenLogprobs": "logprobs",
    "draw": "draws",
    "logit_edits": "device",
    "sample": "sampler",
    "sample_picked": "device",
    "window_starts": "sampler",
}

__all__ = [
    "SKIPPED",
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
    "window_starts",
]


def __getattr__(name: str) -> Any:
    """Import the module of a name."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
