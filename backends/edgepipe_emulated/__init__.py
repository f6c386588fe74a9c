"""The emulated backend: no weights, checksums instead of numbers, the time that a named device would take.

Every layer mixes a token's 64-bit state with *all* KV slots of its sequence up to its position, so that an activation
that is lost, doubled, reordered or misrouted, or KV that is missing, stale or somebody else's, gives a wrong token. The
answer depends on the prompt, the number of layers and the vocabulary alone: not on the split into slices, sequence ids,
block ids, batch shapes or step numbers. ``edgepipe_emulated.oracle`` computes it in a few lines.
"""

from edgepipe_emulated.backend import EmulatedBackend
from edgepipe_emulated.source import EmulatedWeights, emulated_model_config

__all__ = ["EmulatedBackend", "EmulatedWeights", "emulated_model_config"]
