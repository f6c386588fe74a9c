"""A model with a shape but without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layer_spec import Attention, DeltaNet, Dense, Experts, LayerSpec, Norm, Rope, Router
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo
from edgepipe.weights.emulated_folder import BOS_TOKEN_ID, EOS_TOKEN_ID, SMALLEST_VOCAB
from edgepipe.weights.mixes import mix_weights


def emulated_model_config(
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = SMALLEST_VOCAB,
    context_length: int = 4096,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int | None = None,
    tied_embeddings: bool = True,
    experts: tuple[int, int] | None = None,
    windows: tuple[int | None, ...] = (None,),
    attention_every: int = 1,
) -> ModelConfig:
    """Make a llama-shaped config for the emulated backend. The default vocabulary fits ``write_model_folder``.

    ``experts``: how many each layer has, and how many of them a token uses; the shape is then that of Qwen3.
    ``windows``: of the first layers, and of those behind them in turns; None: they see the context.
    ``attention_every``: this layer and its multiples, counted from 1, have attention; the others are recurrent.
    """
    inner = intermediate_size or 3 * hidden_size
    feed = LayerSpec(dense=Dense(inner=inner))
    if experts is not None:
        feed = LayerSpec(experts=Experts(count=experts[0], used=experts[1], inner=inner, router=Router()))
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=Rope(),
        qk_norm="head" if experts else "",
    )
    mixer = DeltaNet(key_heads=num_kv_heads, value_heads=num_heads, key_dim=head_dim, value_dim=head_dim, taps=4)
    layers = tuple(
        replace(feed, recurrent=mixer)
        if (layer + 1) % attention_every
        else replace(feed, attention=replace(attention, window=windows[layer % len(windows)]))
        for layer in range(num_layers)
    )
    return ModelConfig(
        architecture="qwen3_moe" if experts else "llama",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_length=context_length,
        layers=layers,
        norm=Norm(eps=1e-5),
        tied_embeddings=tied_embeddings,
        eos_token_ids=(EOS_TOKEN_ID,),
        bos_token_id=BOS_TOKEN_ID,
        naming="qwen3_moe" if experts else "",
    )


class EmulatedWeights:
    """A ``WeightSource`` for a config without tensors."""

    def __init__(self, config: ModelConfig, *, mix: str = "") -> None:
        """``mix``: types of the imagined weights (``edgepipe.weights.mixes``); empty: bf16."""
        self._config = config
        self._mix = mix

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def bytes_read(self) -> int:
        """Always 0."""
        return 0

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """Return no tensors."""
        return ()

    def read(self, name: str) -> StoredTensor:
        """Raise ModelInvalid, since the model has no tensors."""
        raise ModelInvalid(f"an emulated model has no tensor '{name}'", fact="only the emulated backend can serve it")

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Raise ModelInvalid, since the model has no tensors."""
        return self.read(name).data[offset : offset + num_bytes]

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """Describe the weights of a mix; none without a mix."""
        return mix_weights(self._config, self._mix, part) if self._mix else ()

    def load(self, name: str) -> StoredTensor | Packed:
        """Raise ModelInvalid, since the model has no weights."""
        return self.read(name)
