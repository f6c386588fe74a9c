"""Small GGUF files of llama.cpp's converter and quantiser, and its logits of each (``scripts/referee_keep.py``)."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_FOLDER = Path(__file__).parents[2] / "data" / "llama_cpp"
NAMES = sorted(path.name.removesuffix(".gguf.xz") for path in _FOLDER.glob("*.gguf.xz"))
RECURRENT = [name for name in NAMES if name.startswith(("qwen3-next", "qwen35", "nemotron", "granite-4", "lfm2"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppFile:
    """One file, and what llama.cpp computes from its values in float32."""

    path: Path
    tokens: list[int]
    top: npt.NDArray[np.int32]  # [T] the most likely token of each position
    rows: npt.NDArray[np.int32]  # [R] positions whose logits are kept
    logits: npt.NDArray[np.float32]  # [R, V]


def llama_cpp_file(name: str, folder: Path) -> LlamaCppFile:
    """Unpack one of NAMES into a folder."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        path.write_bytes(lzma.decompress((_FOLDER / f"{name}.gguf.xz").read_bytes()))
    with np.load(_FOLDER / "logits.npz") as facts:
        return LlamaCppFile(
            path=path,
            tokens=facts[f"{name}.tokens"].tolist(),
            top=facts[f"{name}.top"],
            rows=facts[f"{name}.rows"],
            logits=facts[f"{name}.logits"],
        )
