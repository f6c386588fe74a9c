"""Packed weights for tests: random blocks of every GGUF type with sensible values, and a tiny model made of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.layout import model_tensors, slice_weights
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo
from edgepipe.weights.dequantise import block_values
from edgepipe.weights.gguf_blocks import LAYOUTS
from edgepipe.weights.gguf_packing import gguf_form, pack_gguf

SPREAD = 0.02  # standard deviation of the values
FLOATS = ("F32", "F16", "BF16")
QUANTISED = tuple(scheme for scheme in BLOCKS_BY_NAME if scheme not in FLOATS)
EXACT = tuple(LAYOUTS)  # types whose values a Packed holds exactly

_SCALE_AT = {"IQ2_XXS": 0, "IQ2_XS": 0, "IQ2_S": 0, "IQ3_XXS": 0, "IQ3_S": 0, "IQ1_S": 0}  # bytes before the scale
_OFFSET_TO_SCALE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # values around zero


def random_blocks(scheme: str, shape: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return valid blocks [num_bytes] of a type for a weight [O, I], finite, with values of about ``SPREAD``.

    I must be a multiple of the type's block.
    """
    if scheme in FLOATS:
        return _floats(scheme, rng.normal(0, SPREAD, shape).astype(np.float32))
    block = BLOCKS_BY_NAME[scheme]
    count = shape[0] * shape[1] // block.block_values
    blocks = rng.integers(0, 256, (count, block.block_bytes), dtype=np.uint8)
    if scheme in ("MXFP4", "NVFP4"):
        blocks[:, : 1 if scheme == "MXFP4" else 4] = rng.integers(*_exponents(scheme), (count, 1), dtype=np.uint8)
        return blocks.reshape(-1)
    relative = rng.uniform(0.5, 1.5, count)
    _set_scale(scheme, blocks, relative)
    unit = block_values(scheme, blocks[:512]).std()
    _set_scale(scheme, blocks, relative * SPREAD / float(unit))
    return blocks.reshape(-1)


def _exponents(scheme: str) -> tuple[int, int]:
    return (119, 122) if scheme == "MXFP4" else (2, 7)  # scales of 2**-8 to 2**-6, and of 2/512 to 6/512


def _floats(scheme: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    if scheme == "BF16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8).reshape(-1)
    return values.astype(np.float32 if scheme == "F32" else np.float16).view(np.uint8).reshape(-1)


def _set_scale(scheme: str, blocks: npt.NDArray[np.uint8], scale: npt.NDArray[np.float64]) -> None:
    """Write the scale of every block, and an offset in proportion to it."""
    bits = scale.astype(np.float16).view(np.uint16)
    if scheme == "IQ1_M":  # four bits of the scale at the top of each of the last four words
        words = blocks[:, 48:].copy().view(np.uint16)
        for index in range(4):
            words[:, index] = (words[:, index] & 0x0FFF) | ((bits >> np.uint16(4 * index) & 15) << 12)
        blocks[:, 48:] = words.view(np.uint8)
        return
    if scheme in _SCALE_AT:
        blocks[:, :2] = bits.view(np.uint8).reshape(-1, 2)
        return
    records = blocks.view(LAYOUTS[scheme].struct)[:, 0]
    records["d"] = bits
    for name in ("dmin", "m"):
        if name in (LAYOUTS[scheme].struct.names or ()):
            records[name] = (scale * _OFFSET_TO_SCALE[scheme]).astype(np.float16).view(np.uint16)


def random_raw(
    name: str, scheme: str, shape: tuple[int, int], rng: np.random.Generator, *, rounded: bool = False
) -> StoredTensor:
    """Return a stored tensor [O, I] of random blocks."""
    data = random_blocks(scheme, shape, rng)
    info = TensorInfo(name=name, shape=shape, scheme=scheme, num_bytes=data.nbytes, rounded=rounded)
    return StoredTensor(info=info, data=data)


def random_packed(scheme: str, shape: tuple[int, int], rng: np.random.Generator, *, name: str = "w") -> Packed:
    """Return a packed weight [O, I] of random blocks of a quantised type."""
    return pack_gguf(random_raw(name, scheme, shape, rng))


class PackedTinyModel:
    """A ``WeightSource`` with random matrices of given types; norms and biases are F32.

    ``schemes``: type by the end of a weight's name, first match (``{"q_proj.weight": "Q4_K", "": "Q6_K"}``); matrices
    that no key matches are F32. A weight depends on its name, its type and ``seed`` only.
    """

    def __init__(
        self, config: ModelConfig, schemes: Mapping[str, str], *, seed: int = 0, rounded: bool = False
    ) -> None:
        self._config = config
        self._seed = seed
        self._bytes_read = 0
        self._infos: dict[str, TensorInfo] = {}
        for name, shape in model_tensors(config).items():
            scheme = next((scheme for end, scheme in schemes.items() if name.endswith(end)), "F32")
            scheme = scheme if len(shape) == 2 else "F32"
            block, values = BLOCKS_BY_NAME[scheme], int(np.prod(shape))
            num_bytes = values // block.block_values * block.block_bytes
            self._infos[name] = TensorInfo(name=name, shape=shape, scheme=scheme, num_bytes=num_bytes, rounded=rounded)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far."""
        return self._bytes_read

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """See ``WeightSource``."""
        return [self._infos[name] for name in slice_weights(self._config, part)]

    def read(self, name: str) -> StoredTensor:
        """See ``WeightSource``."""
        info = self._infos[name]
        self._bytes_read += info.num_bytes
        rng = np.random.default_rng([self._seed, zlib.crc32(f"{name} {info.scheme}".encode())])
        if len(info.shape) == 2:
            data = random_blocks(info.scheme, (info.shape[0], info.shape[1]), rng)
        else:
            centre = 1.0 if "norm" in name else 0.0
            data = rng.normal(centre, SPREAD, info.shape).astype(np.float32).view(np.uint8)
        return StoredTensor(info=info, data=data)

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """See ``WeightSource``."""
        return [
            WeightInfo(
                name=info.name,
                shape=info.shape,
                scheme=info.scheme,
                form=gguf_form(info.scheme) if len(info.shape) == 2 else None,
                num_bytes=info.num_bytes,
                rounded=info.rounded,
            )
            for info in self.tensors(part)
        ]

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """See ``WeightSource``."""
        return self.read(name).data[offset : offset + num_bytes]

    def load(self, name: str) -> StoredTensor | Packed:
        """See ``WeightSource``."""
        raw = self.read(name)
        packable = len(raw.info.shape) == 2 and gguf_form(raw.info.scheme) is not None
        return pack_gguf(raw) if packable else raw


def exact_float32(weight: StoredTensor | Packed) -> npt.NDArray[np.float32]:
    """Return a weight's values in float32, never rounded to bf16: the reference for backends."""
    if isinstance(weight, Packed):
        return weight.float32()
    block = BLOCKS_BY_NAME[weight.info.scheme]
    return block_values(weight.info.scheme, weight.data.reshape(-1, block.block_bytes)).reshape(weight.info.shape)
