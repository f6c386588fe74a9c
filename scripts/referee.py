"""edgepipe beside llama.cpp and transformers: all logits of tiny random models of every family, in ten forms.

    scripts/referee [--families llama,qwen3-next] [--forms F32,Q4_K_M] [--served lfm2] [--minutes 90] [--write FILE]

makes each family's checkpoint with transformers, converts and quantises it with llama.cpp's own programs, and computes
one prompt's logits with edgepipe on torch, on MLX, and in a ring of both. It prints the largest difference relative to
the largest logit, positions whose most likely token differs, and the mean KL divergence (nats).

    folder      safetensors in float32, against transformers
    F32         GGUF, against llama.cpp
    others      GGUF, against llama.cpp on the file's own values, widened to F32

Bars: float forms within 1e-4 and every most likely token equal; other forms: KL no larger than llama.cpp's own.
Then a cluster of two nodes serves the families of ``--served``, by default those with recurrent layers. The first run
builds llama.cpp (8 minutes of two cores), without its float16 table for GELU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from figures import ROOT  # also sets the environment of gRPC

sys.path.insert(0, str(ROOT))

import referee_llama
import referee_table
from referee_llama import Floats, Llama
from referee_models import FAMILIES, TOKENS, conversion, slug, write_checkpoint
from referee_product import SIDES, logits_of
from referee_serve import Served, served_lines
from referee_table import Difference, Line, difference

FLOATS = ("folder", "F32", "F16", "BF16")
QUANTISED = ("Q8_0", "Q6_K", "Q5_0", "Q4_K_M", "IQ4_NL")
_HIDDEN = 256  # a row of llama.cpp's larger blocks
_LATER = {"gpt-oss": {"IQ4_NL": "MXFP4"}}  # the form in which these models are published


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One family's model."""

    folder: Path  # with F32.gguf, unless the converter refused it
    logits: Floats  # [TOKENS, V], of transformers
    refused: str  # the converter's error; empty without one


def main() -> int:
    """Compare, print the table, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--forms", default=",".join(FLOATS + QUANTISED))
    parser.add_argument("--minutes", type=float, default=90.0, help="no family begins later")
    parser.add_argument("--served", default=",".join(name for name, one in FAMILIES.items() if one.recurrent))
    parser.add_argument("--write", type=Path, help="a page for the table")
    wanted = parser.parse_args()
    begun_s = time.monotonic()
    cache = Path(os.environ.get("EP_REFEREE", Path.home() / ".cache" / "edgepipe-referee"))
    llama = referee_llama.build(cache)
    print(f"{versions(llama)}; llama.cpp was ready after {time.monotonic() - begun_s:.0f} s", flush=True)
    lines: list[Line] = []
    made = prepare(llama, [name for name in wanted.families.split(",") if name], cache / "models")
    for name in made:
        if time.monotonic() - begun_s > wanted.minutes * 60:
            print(f"{name} and later ones were left out: {wanted.minutes:g} minutes are over")
            break
        for line in compare(llama, name, wanted.forms.split(","), made[name]):
            print(line.text(), flush=True)
            lines.append(line)
    served: list[Served] = []
    for one in served_lines(llama, [name for name in wanted.served.split(",") if name], cache / "models"):
        print(" | ".join(one.cells()), flush=True)
        served.append(one)
    page = referee_table.page(
        lines, [one.cells() for one in served], versions(llama), datetime.now(UTC).date().isoformat()
    )
    print(page)
    if wanted.write:
        wanted.write.write_text(page, encoding="utf-8")
    missed = [line for line in (*lines, *served) if not line.met]
    print(f"{len(lines) + len(served)} lines, {len(missed)} miss a bar; {time.monotonic() - begun_s:.0f} s")
    return 1 if missed else 0


def versions(llama: Llama) -> str:
    """Return the versions of all sides."""
    names = ("transformers", "torch", "mlx")
    return ", ".join([llama.version, *(f"{name} {version(name)}" for name in names)])


def prepare(llama: Llama, names: Sequence[str], models: Path) -> dict[str, Checkpoint]:
    """Make all checkpoints, and convert them at once."""
    models.mkdir(parents=True, exist_ok=True)
    expected: dict[str, Floats] = {}
    for name in names:
        work = models / slug(name)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        expected[name] = write_checkpoint(FAMILIES[name], work, hidden=_HIDDEN)
    jobs = [conversion(name, models / slug(name), "F32.gguf") for name in names]
    errors = llama.convert(jobs, models)
    return {
        name: Checkpoint(folder=models / slug(name), logits=expected[name], refused=errors[job["file"]])
        for name, job in zip(names, jobs, strict=True)
    }


def compare(llama: Llama, name: str, forms: Sequence[str], made: Checkpoint) -> Iterator[Line]:
    """Compare one family in all forms. Its files are deleted at the end."""
    if "folder" in forms:
        yield _line(name, "folder", made.folder, made.logits)
    if made.refused:
        yield Line(name, "F32", refused=f"the converter: {made.refused}")
        return
    for form in (_LATER.get(name, {}).get(form, form) for form in forms if form != "folder"):
        try:
            yield _gguf_line(llama, name, form, made)
        except RuntimeError as failed:
            yield Line(name, form, refused=f"llama.cpp: {failed}")
    shutil.rmtree(made.folder)


def _gguf_line(llama: Llama, name: str, form: str, made: Checkpoint) -> Line:
    """Compare one GGUF file with what llama.cpp computes from its values in F32."""
    work, plain = made.folder, made.folder / "F32.gguf"
    if form == "F32":
        truth = llama.logits(plain, TOKENS)
        return _line(name, form, plain, truth, llama=difference(truth, made.logits))
    file = llama.quantise(plain, work / f"{form}.gguf", form)
    own_values = llama.quantise(file, work / "own.gguf", "F32")
    truth = llama.logits(own_values, TOKENS)
    try:
        own = difference(llama.logits(file, TOKENS), truth)
    except RuntimeError:  # it lacks a kernel for such small shapes, or for a type
        own = None
    line = _line(name, form, file, truth, llama=own)
    file.unlink()
    return line


def _line(name: str, form: str, model: Path, truth: Floats, *, llama: Difference | None = None) -> Line:
    """Compute with edgepipe on every side."""
    found: dict[str, Difference] = {}
    for side in SIDES:
        try:
            found[side] = difference(logits_of(model, side, TOKENS), truth)
        except Exception as failed:  # a refusal is a finding, whatever raises it
            return Line(name, form, refused=f"{side}: {type(failed).__name__}: {failed}")
    return Line(name, form, llama=llama, sides=found)


if __name__ == "__main__":
    sys.exit(main())
