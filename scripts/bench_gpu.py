"""Tests and figures of the torch backend on an NVIDIA GPU, by worth; ``scripts/gpu_check`` runs it.

``--from NAME`` goes on with a check, and keeps the results before it. ``--json PATH`` names the file of results.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_backend import backend_rows
from bench_foundation import stored_demo
from check_series import Check, Series
from edgepipe_torch import TorchBackend
from edgepipe_torch.cuda.kernels.checking import worst_error
from edgepipe_torch.cuda.kernels.forms import KernelForm
from edgepipe_torch.cuda.kernels.library import cuda_library
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from figures import ROOT, Row, at_least, at_most, below, machine, print_rows
from gpu_experts import expert_exact_rows, expert_rows
from gpu_paged import paged_rows
from gpu_recurrent import recurrent_exact_rows, recurrent_layer_rows

from edgepipe.backend.types import BackendOptions, BlockRun, LogitEdits, Step, StepOutput, StepRow
from edgepipe.config import kernel_dir
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.layout import slice_parameters
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.tensors import StoredTensor
from edgepipe.stage.made_up import MadeUpWeights
from edgepipe.weights.mixes import named_model
from edgepipe.weights.resident import resident_sizes
from edgepipe.weights.weight_table import WeightTable
from tests.support.backends.kernel_forms import FORMS

LARGE = "llama-3.1-8b"
WIDE, PACKED = "bf16", "q4_k_m"
BUDGET_S = 450.0
_PAGE = 256  # tokens
_LONGEST = 32_768
_BLOCKS = _LONGEST // _PAGE + 1
_PROMPT_CHUNK = 2048
_STEPS, _WARM_UP = 24, 4  # a size's second step records its graph
_ROUNDS = 3
_EDITS = 64  # changed tokens of a row
_EXACT_ROWS = (1, 3, 8, 9, 16, 17, 32, 33, 64)  # each number of column tiles, full and not
_LOAD_S_PER_GB = 1.0


class ReadyWeights(MadeUpWeights):
    """Made-up weights whose arrays exist before they load, so that loading is timed without making them."""

    def __init__(self, config: ModelConfig, table: WeightTable) -> None:
        super().__init__(config, table)
        self._made: dict[tuple[tuple[int, ...], PackedForm | None], StoredTensor | Packed] = {}

    def load(self, name: str) -> StoredTensor | Packed:
        """See ``WeightSource.load``."""
        key = (self._shapes[name], self._table.form(name))
        if key not in self._made:
            self._made[key] = super().load(name)
        found = self._made[key]
        return replace(found, name=name) if isinstance(found, Packed) else replace(found, info=self._tensor(name))


class Large:
    """A whole model of a usual size with made-up weights. All its KV blocks hold computed values."""

    def __init__(self, mix: str) -> None:
        """``mix``: the types of its weights. Raises RuntimeError if the device is too small."""
        self.mix = mix
        self.config, table = named_model(f"{LARGE}:{mix}")
        (whole,) = make_slices([LayerRange(0, self.config.num_layers)], self.config.num_layers)
        self._backend = TorchBackend(BackendOptions(device="cuda", threads=1))
        profile = self._backend.profile()
        self.bandwidth = profile.bandwidth_bytes_per_s
        self.flops = profile.flops
        parameters = slice_parameters(self.config, whole)
        sizes = resident_sizes(self.config, table, kind="torch-cuda", dtype="bfloat16")
        self.weight_bytes = sizes.of_slice(whole)
        self._read_bytes = self.weight_bytes - sizes.embedding
        self.kv_token_bytes = self.config.kv_bytes_per_token(form="bfloat16")
        if profile.memory_free_bytes < self.weight_bytes + self.kv_token_bytes * _BLOCKS * _PAGE + (1 << 30):
            raise RuntimeError(f"{LARGE} does not fit: {profile.memory_free_bytes / 1e9:.1f} GB are free")
        self._read_parameters = parameters - self.config.vocab_size * self.config.hidden_size  # but the embedding
        weights = ReadyWeights(self.config, table)
        for info in weights.weights(whole):
            weights.load(info.name)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        self._backend.load([whole], weights, lambda _progress: None)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - began_s
        self._backend.allocate_kv(num_blocks=_BLOCKS, block_size=_PAGE)
        prompt = np.random.default_rng(1).integers(0, self.config.vocab_size, _LONGEST).astype(np.int32)
        for at in range(0, _LONGEST, _PROMPT_CHUNK):
            part = prompt[at : at + _PROMPT_CHUNK]
            self._backend.collect(self._backend.submit(self._prepare(1, at, len(part)), part))

    def close(self) -> None:
        """Release the device's memory."""
        self._backend.close()

    def memory_s(self, count: int, context: int) -> float:
        """Seconds to read all weights and the KV of ``count`` sequences once."""
        return (self._read_bytes + count * context * self.kv_token_bytes) / self.bandwidth

    def roofline_s(self, count: int, context: int) -> float:
        """Seconds of the slower of reading and multiplying."""
        return max(self.memory_s(count, context), 2 * self._read_parameters * count / self.flops)

    def step_s(self, count: int, context: int, edits: LogitEdits | None = None) -> float:
        """Seconds from a step's input to the next: each needs the tokens of the one before."""

        def run() -> float:
            tokens = np.zeros(count, np.int32)
            start = 0.0
            for index in range(_WARM_UP + _STEPS):
                if index == _WARM_UP:
                    start = time.perf_counter()
                prepared = self._prepare(count, context + index, 1)
                tokens = _best(self._backend.collect(self._backend.submit(prepared, tokens, edits)))
            return (time.perf_counter() - start) / _STEPS

        return statistics.median(run() for _ in range(_ROUNDS))

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of a prompt's first ``num_tokens``."""

        def run() -> float:
            start = time.perf_counter()
            self._backend.collect(self._backend.submit(self._prepare(1, 0, num_tokens), np.zeros(num_tokens, np.int32)))
            return time.perf_counter() - start

        run()
        return min(run() for _ in range(_ROUNDS))

    def in_flight_s(self, count: int, context: int, *, depth: int) -> float:
        """Seconds a step with ``depth`` of them submitted, each prepared before the one ahead of it is collected."""

        def run() -> float:
            tokens, waiting = np.zeros(count, np.int32), []
            start = 0.0
            for index in range(_WARM_UP + _STEPS):
                if index == _WARM_UP:
                    start = time.perf_counter()
                prepared = self._prepare(count, context + index, 1)
                if len(waiting) == depth:
                    _best(self._backend.collect(waiting.pop(0)))
                waiting.append(self._backend.submit(prepared, tokens))
            taken_s = time.perf_counter() - start
            for ticket in waiting:
                self._backend.collect(ticket)
            return taken_s / _STEPS

        return statistics.median(run() for _ in range(_ROUNDS))

    def edits(self, count: int) -> LogitEdits:
        """Penalties for some tokens of each row, and a mask that allows all."""
        vocabulary = self.config.vocab_size
        return LogitEdits(
            rows=np.repeat(np.arange(count, dtype=np.int32), _EDITS),
            ids=np.tile(np.arange(_EDITS, dtype=np.int32) * (vocabulary // _EDITS), count),
            repetition=np.full(count * _EDITS, 1.1, np.float32),
            add=np.full(count * _EDITS, -0.5, np.float32),
            masks=np.full((count, -(-vocabulary // 32)), -1, np.int32),
            temperatures=np.full(count, 0.8, np.float32),
            num_top=0,
        )

    def _prepare(self, count: int, position: int, num_tokens: int) -> Any:
        each = -(-(position + num_tokens) // _PAGE)
        assert count * each <= _BLOCKS
        rows = tuple(
            StepRow(
                sequence=SequenceId(index),
                position=position,
                num_tokens=num_tokens,
                runs=(BlockRun(index * each, each),),
            )
            for index in range(count)
        )
        last = np.arange(1, count + 1, dtype=np.int32) * num_tokens - 1
        return self._backend.prepare(Step(step=StepId(1), slice_index=0, rows=rows, logit_rows=last))


class Shelf:
    """Holds one large model at a time, since small devices hold no two, and what was measured with others."""

    def __init__(self) -> None:
        self._held: Large | None = None
        self._figures: dict[tuple[str, str, int], float] = {}  # keys are mix, kind and count

    def model(self, mix: str = WIDE) -> Large:
        """Load a model unless it is held."""
        if self._held is None or self._held.mix != mix:
            self.clear()
            self._held = Large(mix)
        return self._held

    def clear(self) -> None:
        """Release the model that is held."""
        if self._held is not None:
            self._held.close()
        self._held = None

    def step_s(self, mix: str, count: int) -> float:
        """Seconds of a decode step of ``count`` sequences, measured once."""
        return self._once(mix, "step", count, lambda model: model.step_s(count, 200))

    def prefill_s(self, mix: str, num_tokens: int) -> float:
        """Seconds of a prompt, measured once."""
        return self._once(mix, "prefill", num_tokens, lambda model: model.prefill_s(num_tokens))

    def _once(self, mix: str, kind: str, count: int, measure: Callable[[Large], float]) -> float:
        key = (mix, kind, count)
        if key not in self._figures:
            self._figures[key] = measure(self.model(mix))
        return self._figures[key]


shelf = Shelf()


def large() -> Large:
    """Return the bf16 model."""
    return shelf.model()


def _best(output: StepOutput) -> np.ndarray:
    """Most likely tokens [R] int32."""
    if output.candidates is not None:
        return output.candidates.ids[:, 0]
    assert output.logits is not None
    return output.logits.argmax(-1).astype(np.int32)


def decode_rows(*contexts: int) -> Iterator[Row]:
    """One sequence against the time that reading takes."""
    for context in contexts:
        allowed_s = large().memory_s(1, context)
        name = f"decode, 1 of {LARGE}'s shape, context {context}"
        yield at_most(name, 1e3 * large().step_s(1, context), "ms", 1e3 * allowed_s, "memory time", 1.20)


def batch_rows() -> Iterator[Row]:
    """64 sequences against the roofline."""
    rate, allowed = 64 / shelf.step_s(WIDE, 64), 64 / large().roofline_s(64, 200)
    yield at_least(f"decode, 64 of {LARGE}'s shape, context 200", rate, "tok/s", allowed, "roofline", 0.8)


def sampling_rows() -> Iterator[Row]:
    """Steps with edits, whose 256 candidates come to the host, beside steps whose logits all come."""
    for count in (1, 64):
        greedy_ms, edited_ms = (1e3 * large().step_s(count, 200, edits) for edits in (None, large().edits(count)))
        ratio = edited_ms / greedy_ms
        yield Row(f"step with edits and 256 candidates, {count} rows", edited_ms, "ms", greedy_ms, "greedy", ratio)


def gap_rows() -> Iterator[Row]:
    """Time between steps in which the GPU waits for the host: what a second submitted step saves."""
    for count in (1, 64):
        alone_ms, paired_ms = (1e3 * large().in_flight_s(count, 200, depth=depth) for depth in (1, 2))
        gap_ms = alone_ms - paired_ms
        yield Row(f"host gap between steps, {count} rows", gap_ms, "ms", paired_ms, "step without", gap_ms / paired_ms)


def exact_rows() -> Iterator[Row]:
    """Own kernels of every form against exact values: the largest error in units of one rounding of the result."""
    library = cuda_library(torch.device("cuda", 0), kernel_dir())
    if isinstance(library, KernelsUnavailable):
        raise library
    for name, form in FORMS.items():
        worst = worst_error(library.products(form), form, torch.device("cuda", 0), rows=_EXACT_ROWS, **_sizes(form))
        yield below(f"own kernel, {name}", worst, "roundings", 1.0)


def _sizes(form: KernelForm) -> dict[str, int]:
    """A weight with many tiles, not all of them full."""
    unit = max(form.group, form.span, 16)
    return {"out_features": 4000, "in_features": 4048 // unit * unit}


def packed_rows() -> Iterator[Row]:
    """A packed model: bf16 first, so that one model is loaded at a time."""
    counts: Sequence[int] = (16, 64)
    wide_s = {count: shelf.step_s(WIDE, count) for count in counts}
    wide_prefill_s = shelf.prefill_s(WIDE, _PROMPT_CHUNK)
    packed = shelf.model(PACKED)
    name = f"{LARGE}'s shape, {PACKED}"
    allowed_s = packed.memory_s(1, 200)
    yield at_most(f"decode, 1 of {name}", 1e3 * shelf.step_s(PACKED, 1), "ms", 1e3 * allowed_s, "memory time", 1.35)
    for count in counts:
        rate = count / shelf.step_s(PACKED, count)
        yield at_least(f"decode, {count} of {name}", rate, "tok/s", count / wide_s[count], "bf16", 1.0)
    rate, wide = (_PROMPT_CHUNK / seconds for seconds in (shelf.prefill_s(PACKED, _PROMPT_CHUNK), wide_prefill_s))
    yield at_least(f"prefill of {_PROMPT_CHUNK}, {name}", rate, "tok/s", wide, "bf16", 0.8)
    limit_s = _LOAD_S_PER_GB * packed.weight_bytes / 1e9
    yield below(f"load {packed.weight_bytes / 1e9:.1f} GB from arrays, {name}", packed.load_s, "s", round(limit_s, 2))


def expert_layer_rows() -> Iterator[Row]:
    """Layers with experts beside dense ones."""
    shelf.clear()
    yield from expert_rows()


def own_attention_rows() -> Iterator[Row]:
    """Attention that FlashAttention-2 excludes."""
    shelf.clear()
    yield from paged_rows()


def recurrent_rows() -> Iterator[Row]:
    """Recurrent layers: exactness first."""
    shelf.clear()
    yield from recurrent_exact_rows()
    yield from recurrent_layer_rows()


def gpu_test_rows(folder: str, limit_s: float) -> Iterator[Row]:
    """GPU tests of a folder. Raises RuntimeError if one fails or none ran."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        raise RuntimeError("\n".join(done.stdout.splitlines()[-15:]) or done.stderr[-1000:])
    yield Row(f"GPU tests in {folder}", int(passed[1]), "passed")


def demo_rows() -> Iterable[Row]:
    """The demo model against ``transformers``."""
    return backend_rows(stored_demo().open_weights(), device="cuda")


def _figures(rows: Callable[[], Iterable[Row]]) -> Callable[[float], Iterable[Row]]:
    return lambda _limit_s: rows()


CHECKS = (
    Check(name="cuda", limit_s=120, run=lambda limit_s: gpu_test_rows("tests/unit/torch", limit_s)),
    Check(name="contract", limit_s=100, run=lambda limit_s: gpu_test_rows("tests/contract", limit_s)),
    Check(name="decode", limit_s=90, run=_figures(lambda: decode_rows(200))),  # loads the large model
    Check(name="batch", limit_s=20, run=_figures(batch_rows)),
    Check(name="contexts", limit_s=20, run=_figures(lambda: decode_rows(8_000, 32_000))),
    Check(name="sampling", limit_s=20, run=_figures(sampling_rows)),
    Check(name="gap", limit_s=20, run=_figures(gap_rows)),
    Check(name="exact", limit_s=40, run=_figures(exact_rows)),
    Check(name="attention", limit_s=40, run=_figures(own_attention_rows)),
    Check(name="recurrent", limit_s=60, run=_figures(recurrent_rows)),
    Check(name="packed", limit_s=60, run=_figures(packed_rows)),
    Check(name="expert-forms", limit_s=40, run=_figures(expert_exact_rows)),
    Check(name="experts", limit_s=60, run=_figures(expert_layer_rows)),
    Check(name="demo", limit_s=60, run=_figures(demo_rows)),
)


def main() -> int:
    """Run the checks and print a table of all figures at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="start", choices=[check.name for check in CHECKS])
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu_check.json")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No NVIDIA GPU was found on this machine: nothing was measured.")
        return 0
    device, rows = torch.cuda.get_device_name(0), list[Row]()

    def show(row: Row) -> None:
        rows.append(row)
        mark = {True: "met", False: "MISSED", None: ""}[row.met]
        ratio = f", {row.ratio:.2f}x of {row.baseline_name} ({row.target or 'no target'}) {mark}" if row.ratio else ""
        print(f"  {row.name}: {row.value:.4g} {row.unit}{ratio}", flush=True)

    facts = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "commit": machine()["commit"]}
    series = Series(
        checks=CHECKS,
        facts=facts,
        path=given.json,
        budget_s=BUDGET_S,
        now_s=time.monotonic,
        show=show,
        say=lambda line: print(line, flush=True),
    )
    passed = series.run(start=given.start)
    print_rows(device, rows)
    print(f"all results: {given.json}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
