"""How far two sets of logits lie apart, and the table of all that was compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FLOAT_BAR = 1e-4  # share of the largest logit
FLOAT_FORMS = ("folder", "F32", "F16", "BF16")
_KL_NOISE = 1e-8  # nats; below it, rounding of float32 decides


@dataclass(frozen=True, slots=True)
class Difference:
    """How far logits are from the right ones."""

    largest: float  # relative to the largest logit
    other_tokens: int  # positions whose most likely token differs
    positions: int
    kl: float  # nats, mean over positions

    def text(self) -> str:
        """Return one cell of a table."""
        other = f", {self.other_tokens} of {self.positions} other" if self.other_tokens else ""
        return f"{self.largest:.0e}, KL {self.kl:.0e}{other}"


@dataclass(frozen=True, slots=True)
class Line:
    """One form of one family."""

    family: str
    form: str
    llama: Difference | None = None  # F32: of llama.cpp to transformers; else to its own result on the file's values;
    # None: it is not asked, or cannot compute the file
    sides: Mapping[str, Difference] = field(default_factory=dict[str, Difference])
    refused: str = ""

    @property
    def met(self) -> bool:
        """Whether every side keeps the bar of its form."""
        return not self.refused and all(self._keeps(side) for side in self.sides.values())

    def _keeps(self, side: Difference) -> bool:
        if self.form in FLOAT_FORMS:
            return side.largest <= FLOAT_BAR and side.other_tokens == 0
        return self.llama is None or side.kl <= max(self.llama.kl, _KL_NOISE)

    def text(self) -> str:
        """One line for people who wait."""
        return " | ".join(self.cells())

    def cells(self) -> list[str]:
        """The cells of the table."""
        if self.refused:
            return [self.family, self.form, self.refused.replace("\n", " ")[:160], "", "", "", "missed"]
        unable = "" if self.form == "folder" else "cannot compute it"
        shown = [self.llama.text() if self.llama else unable, *(side.text() for side in self.sides.values())]
        return [self.family, self.form, *shown, "" if self.met else "missed"]


def difference(found: npt.NDArray[np.floating], right: npt.NDArray[np.floating]) -> Difference:
    """Return how far logits [T, V] are from the right ones."""
    a, b = found.astype(np.float64), right.astype(np.float64)
    if a.shape != b.shape:
        raise RuntimeError(f"logits {a.shape} beside {b.shape}")
    log_a, log_b = log_softmax(a), log_softmax(b)
    return Difference(
        largest=float(np.abs(a - b).max() / np.abs(b).max()),
        other_tokens=int((a.argmax(1) != b.argmax(1)).sum()),
        positions=len(a),
        kl=float(max((np.exp(log_b) * (log_b - log_a)).sum(1).mean(), 0.0)),
    )


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return log-probabilities [T, V]."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def page(lines: Sequence[Line], served: Sequence[Sequence[str]], versions: str, date: str) -> str:
    """Return the page with the table, as Markdown."""
    rows = ["| " + " | ".join(line.cells()) + " |" for line in lines]
    head = "| family | form | llama.cpp | torch | MLX | torch, MLX | |\n|---|---|---|---|---|---|---|"
    text = _PAGE.format(date=date, versions=versions, table="\n".join([head, *rows]))
    if not served:
        return text
    return text + _SERVED + "".join("| " + " | ".join(cells) + " |\n" for cells in served)


_PAGE = """# Numbers beside other programs

Written by `scripts/referee --write docs/numerics.md` on {date}: {versions}.

Each family's tiny random checkpoint is made with transformers. llama.cpp's own converter and quantiser make GGUF
files of it. edgepipe computes the logits of 60 positions in float32 on a CPU: with torch, with MLX, and in a ring of
two stages, one of torch and one of MLX.

A cell has the largest difference relative to the largest logit, the mean KL divergence in nats, and how many of the
60 positions have another most likely token, if any. llama.cpp stops with an error on some files: "cannot compute it".

| form | compared with | bar |
|---|---|---|
| `folder`: safetensors in float32 | transformers | 1e-4, same most likely tokens |
| `F32`: GGUF | llama.cpp, whose own column is its difference to transformers | 1e-4, same most likely tokens |
| `F16`, `BF16` | llama.cpp on the file's values in F32 | 1e-4, same most likely tokens |
| other GGUF | llama.cpp on the file's values in F32 | KL no larger than llama.cpp's own |

llama.cpp keeps its keys and values in float32 here, and computes GELU in float32: its table in float16 moves Gemma's
logits by 1e-3. It rounds the bounds of YaRN, which gpt-oss's class in transformers does not; edgepipe computes what
transformers computes. So gpt-oss in this table has plain rotary positions. Weights are random in float32, those of
the second table are exact in bf16.

MLX has no groups of 16 weights, so Q6_K becomes 8 bits in groups of 32 there, also for the embedding of other forms.
Its error is about that of llama.cpp's 8-bit activations, and may be the larger one where it moves a token to another
expert.

{table}
"""

_SERVED = """
## Through a served cluster

Two nodes, one of torch and one of MLX, serve an F32 file of each family. `POST /v1/completions` with `echo` and
`logprobs` gives the log-probabilities of the prompt. The table has their largest difference to llama.cpp's, relative
to the largest logit. For families with recurrent layers, `edgepipe demo --backends torch,mlx` answers the prompt, and
its greedy tokens are compared with each backend's own.

| family | difference | tokens of the demo | |
|---|---|---|---|
"""
