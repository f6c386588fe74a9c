"""``WeightSource`` over safetensors folders, GGUF files and folders of single tensors: one way in, ``open_weights``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.model.config import gguf_config, read_hf_config
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.gguf_file import open_gguf, read_rope_factors
from edgepipe.model.layout import check_layout, slice_tensors
from edgepipe.model.safetensors_file import open_safetensors
from edgepipe.model.tensors import RawTensor, TensorInfo


class TensorFiles(Protocol):
    """Tensors of whatever format, by Hugging Face's name, in logical row order."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """A whole tensor's bytes. Raises ModelInvalid."""
        ...

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Part of a tensor's bytes. Raises ModelInvalid."""
        ...


class Weights:
    """The tensors of one model, read lazily; a ``WeightSource``."""

    def __init__(self, config: ModelConfig, files: TensorFiles) -> None:
        self._config = config
        self._files = files
        self._infos = files.infos
        self._bytes_read = 0

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far (headers not counted)."""
        return self._bytes_read

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What is known of every tensor in the files, by name."""
        return self._infos

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """The tensors that a slice needs, in reading order. Raises ModelInvalid if one is not here."""
        return [self._info(name) for name in slice_tensors(self._config, part)]

    def read(self, name: str) -> RawTensor:
        """Read one tensor. Raises ModelInvalid if it is not here or its file is shorter than promised."""
        info = self._info(name)
        data = self._files.read(name)
        self._bytes_read += info.num_bytes
        return RawTensor(info=info, data=data)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes ``[offset, offset + num_bytes)`` of a tensor as ``read`` would give it. Raises ModelInvalid."""
        info = self._info(name)
        if not 0 <= offset <= offset + num_bytes <= info.num_bytes:
            raise ModelInvalid(
                f"tensor '{name}' has no bytes {offset}-{offset + num_bytes}", fact=f"{info.num_bytes} bytes"
            )
        self._bytes_read += num_bytes
        return self._files.read_range(name, offset, num_bytes)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise ModelInvalid(f"tensor '{name}' is not here", fact=f"{len(self._infos)} tensors are")
        return self._infos[name]


def open_weights(path: Path) -> Weights:
    """Open a GGUF file or a folder with ``config.json`` and safetensors; config and tensors are checked to agree.

    Raises ModelInvalid, ArchitectureUnsupported.
    """
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf_weights(path)
    if not path.is_dir():
        raise ModelInvalid(f"'{path.name}' is no model", fact="a .gguf file or a folder with config.json is needed")
    config = read_hf_config(path)
    files = open_safetensors(path)
    check_layout(config, files.infos)
    return Weights(config, files)


def open_gguf_weights(path: Path) -> Weights:
    """Open a GGUF file. Raises ModelInvalid, ArchitectureUnsupported."""
    header, files = open_gguf(path)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    config = gguf_config(header.metadata, shapes, read_rope_factors(path, header))
    check_layout(config, files.infos)
    return Weights(config, files)
