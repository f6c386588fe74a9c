"""Small files of llama.cpp's converter and quantiser for ``tests/data/llama_cpp``, and the logits it computes.

    python scripts/referee_keep.py FOLDER [NAME ...]

Each file is compressed by xz. ``logits.npz`` has, by the file's name, the prompt ``NAME.tokens`` [T], the most likely
token of every position ``NAME.top`` [T], and the logits ``NAME.logits`` [R, V] of the positions ``NAME.rows`` [R].
For a quantised file they are those of its own values in F32.
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from figures import ROOT

sys.path.insert(0, str(ROOT))

import referee_llama
from referee_llama import Llama
from referee_models import FAMILIES, TOKENS, conversion, slug, write_checkpoint

ROWS = (0, 1, 20, 41, 59)
_GRID = 1 / 64


@dataclass(frozen=True, slots=True)
class Kept:
    """One file that tests read."""

    family: str
    form: str = "F32"
    hidden: int = 64
    layers: int | None = None

    @property
    def name(self) -> str:
        """The file's name without suffixes."""
        return slug(f"{self.family} {self.form.lower()}")


KEPT = (
    Kept("llama"),
    Kept("gemma3"),
    Kept("gemma4"),
    Kept("gemma4 experts"),
    Kept("qwen3 experts"),
    Kept("gpt-oss", "MXFP4"),
    Kept("deepseek v3"),
    Kept("qwen3-next"),
    Kept("qwen3.5"),
    Kept("qwen3.5 experts"),
    Kept("nemotron-h"),
    Kept("nemotron-h experts"),
    Kept("granite 4"),
    Kept("granite 4 experts"),
    Kept("lfm2"),
    Kept("lfm2 experts"),
    Kept("qwen3.5", "Q8_0"),
    Kept("llama", "Q4_K_M", hidden=256, layers=2),
)


def main() -> None:
    """Write all files, or those named."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(os.environ["EP_REFEREE"])
    llama = referee_llama.build(cache)
    path = folder / "logits.npz"
    facts: dict[str, Any] = dict(np.load(path)) if path.exists() else {}
    chosen = [kept for kept in KEPT if not names or kept.name in names]
    jobs = [_checkpoint(kept, cache / "kept" / kept.name) for kept in chosen]
    if failed := {file: error for file, error in llama.convert(jobs, cache).items() if error}:
        raise RuntimeError(f"the converter refused {failed}")
    for kept, job in zip(chosen, jobs, strict=True):
        facts |= _keep(llama, kept, Path(job["file"]), folder)
        np.savez_compressed(path, **facts)
        print(kept.name, (folder / f"{kept.name}.gguf.xz").stat().st_size, flush=True)


def _checkpoint(kept: Kept, work: Path) -> dict[str, str]:
    """Write one checkpoint. Returns the job that converts it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_checkpoint(FAMILIES[kept.family], work, hidden=kept.hidden, layers=kept.layers, grid=_GRID)
    return conversion(kept.family, work, "F32.gguf")


def _keep(llama: Llama, kept: Kept, plain: Path, folder: Path) -> dict[str, Any]:
    """Write one file. Returns its facts."""
    file = plain
    if kept.form != "F32":
        file = llama.quantise(plain, plain.with_name("packed.gguf"), kept.form)
        plain = llama.quantise(file, plain.with_name("own.gguf"), "F32")
    logits = llama.logits(plain, TOKENS)
    with lzma.open(folder / f"{kept.name}.gguf.xz", "wb", preset=9) as packed:
        packed.write(file.read_bytes())
    rows = np.array(ROWS, np.int32)
    facts = {"tokens": np.array(TOKENS, np.int32), "top": logits.argmax(1).astype(np.int32), "rows": rows}
    return {f"{kept.name}.{key}": value for key, value in (facts | {"logits": logits[rows]}).items()}


if __name__ == "__main__":
    main()
