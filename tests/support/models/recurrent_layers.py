"""Tiny models with recurrent layers beside attention, by what the layers are. Own kernels compute their mixers, too."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe.testing.tiny_model import tiny_config

DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=96, taps=4)
TILED = replace(DELTA, tiled=True)
MAMBA = Mamba2(heads=4, head_dim=8, groups=2, state_dim=32, taps=4)
CONV = ShortConv(channels=16, taps=3)


def recurrent_model(*mixers: Recurrent | None) -> ModelConfig:
    """A model with a layer for each mixer; None: attention."""
    plain = tiny_config(num_layers=len(mixers), hidden_size=16, vocab_size=31)
    layers = [
        spec if mixer is None else replace(spec, attention=None, recurrent=mixer)
        for spec, mixer in zip(plain.layers, mixers, strict=True)
    ]
    return replace(plain, layers=tuple(layers))


MODELS = {
    "gated DeltaNet": recurrent_model(DELTA, None, TILED),
    "Mamba-2": recurrent_model(None, MAMBA, MAMBA),
    "short convolution": recurrent_model(CONV, None, CONV),
    "all of them": recurrent_model(MAMBA, DELTA, CONV, None),
}
