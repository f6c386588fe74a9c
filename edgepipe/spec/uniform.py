"""Decoders whose layers are alike except for their windows: Llama, Mistral, Qwen2, Qwen3.

Their flat description is the JSON that earlier versions read and write, and what a model's digest is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Norm, Rope
from edgepipe.spec.quantisation import Quantisation

UNIFORM_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformShape:
    """The shape of such a decoder. Names and defaults of the fields enter digests: neither may change."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k before rotary (Qwen3)
    sliding_windows: tuple[int | None, ...] = ()  # per layer: tokens that a query sees incl. itself; (): no windows
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantisation: Quantisation | None = None

    def config(self) -> ModelConfig:
        """Return the shape by its layers."""
        windows = self.sliding_windows or (None,) * self.num_layers
        specs = {window: self._layer(window) for window in set(windows)}
        return ModelConfig(
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            layers=tuple(specs[window] for window in windows),
            norm=Norm(eps=self.rms_norm_eps),
            tied_embeddings=self.tied_embeddings,
            eos_token_ids=self.eos_token_ids,
            bos_token_id=self.bos_token_id,
            quantisation=self.quantisation,
        )

    def _layer(self, window: int | None) -> LayerSpec:
        attention = Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            window=window,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            qk_norm="head" if self.qk_norm else "",
        )
        return LayerSpec(attention=attention, dense=Dense(inner=self.intermediate_size, bias=self.mlp_bias))


def uniform_shape(config: ModelConfig) -> UniformShape | None:
    """Return the flat description of a config; None if its family has none."""
    first = config.layers[0]
    attention, dense = first.attention, first.dense
    if config.architecture not in UNIFORM_FAMILIES or dense is None or attention is None or attention.rope is None:
        return None
    windows = tuple(spec.window for spec in config.layers)
    shape = UniformShape(
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=dense.inner,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        rms_norm_eps=config.norm.eps,
        rope=attention.rope,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        mlp_bias=dense.bias,
        qk_norm=attention.qk_norm == "head",
        sliding_windows=windows if any(windows) else (),
        tied_embeddings=config.tied_embeddings,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        quantisation=config.quantisation,
    )
    return shape if shape.config() == config else None
