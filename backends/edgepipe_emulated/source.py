"""A model with a shape but without tensors."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Attention, DeltaNet, Dense, Experts, LayerSpec, Norm, Rope, Router
from edgepipe.weights.emulated_folder import BOS_TOKEN_ID, EOS_TOKEN_ID, SMALLEST_VOCAB
from edgepipe.weights.weights import NoTensors, Weights


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


class EmulatedWeights(Weights):
    """A ``WeightSource`` for a config without tensors."""

    def __init__(self, config: ModelConfig, *, mix: str = "") -> None:
        """``mix``: types of the imagined weights (``edgepipe.weights.mixes``); empty: bf16."""
        super().__init__(config, NoTensors(), mix=mix)
