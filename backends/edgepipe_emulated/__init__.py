"""The emulated backend: no weights, checksums instead of activations, and the timing of a named device.

Every layer mixes a token's 64-bit state with *all* KV slots of its sequence up to its position. So any lost,
duplicated, reordered or misrouted activation, and any missing, stale or foreign KV, gives a wrong token. The answer
depends only on the prompt, the number of layers and the vocabulary, not on slices, sequence ids, block ids, batch
shapes or step numbers. ``edgepipe_emulated.oracle`` computes it in a few lines.
"""

from edgepipe_emulated.backend import EmulatedBackend
from edgepipe_emulated.source import EmulatedWeights, emulated_model_config

__all__ = ["EmulatedBackend", "EmulatedWeights", "emulated_model_config"]
