"""Small models with random weights, in memory: enough for a backend to compute something that depends on everything."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Norm, Rope
from edgepipe.spec.layout import model_tensors, slice_tensors
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.stored_weight import OneTensorPerWeight

_ROPE = Rope()


def tiny_config(
    *,
    architecture: str = "llama",
    num_layers: int = 4,
    hidden_size: int = 32,
    intermediate_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    vocab_size: int = 97,
    context_length: int = 256,
    rope: Rope = _ROPE,
    windows: Sequence[int | None] = (None,),
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    tied_embeddings: bool = False,
) -> ModelConfig:
    """Return the shape of a decoder of a few kilobytes.

    ``intermediate_size``: None for twice the hidden size.
    ``windows``: of the first layers, and of those behind them in turns; None: they see the context.
    """
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm="head" if qk_norm else "",
    )
    layer = LayerSpec(attention=attention, dense=Dense(inner=intermediate_size or 2 * hidden_size, bias=mlp_bias))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_length=context_length,
        layers=tuple(layer.with_attention(window=windows[index % len(windows)]) for index in range(num_layers)),
        norm=Norm(eps=1e-5),
        tied_embeddings=tied_embeddings,
        eos_token_ids=(0,),
    )


class TinyWeights(OneTensorPerWeight):
    """A ``WeightSource`` of seeded random tensors, stored as bf16; a tensor's values depend on seed, name and shape."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        self._config = config
        self._seed = seed
        self._bytes_read = 0
        self._infos = {
            name: TensorInfo(name=name, shape=shape, scheme="BF16", num_bytes=2 * int(np.prod(shape)))
            for name, shape in model_tensors(config).items()
        }

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def bytes_read(self) -> int:
        """Bytes of the tensors read so far."""
        return self._bytes_read

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """Return the tensors that a slice needs."""
        return [self._infos[name] for name in slice_tensors(self._config, part)]

    def read(self, name: str) -> StoredTensor:
        """Return one tensor. Raises ModelInvalid for a name that the model does not have."""
        if name not in self._infos:
            raise ModelInvalid(f"the tiny model has no tensor '{name}'")
        info = self._infos[name]
        self._bytes_read += info.num_bytes
        bits = (self.values(name).view(np.uint32) >> 16).astype("<u2")
        return StoredTensor(info=info, data=bits.reshape(-1).view(np.uint8))

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """Return the tensor in float32, each value exact in bf16: norms around 1, matrices scaled by their inputs."""
        shape = self._infos[name].shape
        random = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        spread = 0.1 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        values = (random.standard_normal(shape) * spread + ("norm" in name)).astype(np.float32)
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
