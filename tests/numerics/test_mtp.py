"""The layer that predicts one token more, on both backends: its logits are those of the reference in numpy.

Prompts come in chunks, guesses are three deep, and guesses go on behind a window of which a part was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from edgepipe_torch import TorchBackend
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels
from edgepipe_torch.cpu.replay import DecodeReplays
from edgepipe_torch.layers.decoder import Decoder

from edgepipe.backend.protocol import Backend, DraftingBackend
from edgepipe.backend.types import UNKNOWN_ID, ActivationType, BackendOptions, DraftRow, DraftStep, Step
from edgepipe.ids import StepId
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.spec.layout import model_tensors
from edgepipe.spec.tensors import WeightSource
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.weights.weights import Weights, open_weights
from tests.support.backends.graph_recorder import CpuGraph
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging
from tests.support.models.mtp_files import VALUES, write_mtp_folder
from tests.support.models.packed import PackedTinyModel, exact_float32
from tests.support.numerics.harness import Blocks, Track, cut
from tests.support.numerics.spec_reference import float_weights, reference_drafts, reference_logits

PROMPT = np.random.default_rng(5).integers(0, 64, 37).tolist()
CHUNKS = (13, 1, 20)
DEPTH, BLOCK = 3, 8
TOLERANCE = 2e-4  # share of the largest logit

Floats = Mapping[str, np.ndarray]


def options() -> BackendOptions:
    return BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)


def mlx_backend() -> Backend:
    return pytest.importorskip("edgepipe_mlx", reason="MLX is not installed").MlxBackend(options())


def cuda_on_host() -> Backend:
    return TorchBackend(options(), device=CudaOnHost(paging=cpu_paging(page_tokens=BLOCK)))


BACKENDS: Mapping[str, Callable[[], Backend]] = {"torch": lambda: TorchBackend(options()), "mlx": mlx_backend}


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Every result of the head's product, newest last."""
    found: list[np.ndarray] = []

    def record(original: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any) -> Any:
            result = original(*args)
            found.append(np.asarray(result).copy())
            return result

        return recording

    monkeypatch.setattr(Decoder, "logits_of", record(Decoder.logits_of))
    try:
        from edgepipe_mlx.slice_ends import SliceEnds
    except ImportError:
        return found
    monkeypatch.setattr(SliceEnds, "logits", record(SliceEnds.logits))
    return found


@dataclass
class Run:
    """One sequence on the last of some slices, all on backends of their own."""

    backends: Sequence[Backend]
    slices: Sequence[Slice]
    sequence: Track
    tokens: list[int] = field(default_factory=list)  # with KV
    steps: int = 0

    def step(self, new: Sequence[int], next_ids: Sequence[int]) -> tuple[np.ndarray, Any]:
        """Compute new tokens; return all logits, and what the head's slice keeps."""
        self.steps += 1
        data: np.ndarray = np.array(new, np.int32)
        kept = None
        for backend, part in zip(self.backends, self.slices, strict=True):
            step = Step(
                step=StepId(self.steps),
                slice_index=part.index,
                rows=(self.sequence.row(len(new)),),
                logit_rows=np.arange(len(new), dtype=np.int32),
                next_ids=np.array(next_ids, np.int32) if part.head else None,
            )
            output = backend.collect(backend.submit(backend.prepare(step), data))
            found = output.logits if output.logits is not None else output.activations
            assert found is not None
            data, kept = found, output.kept
        self.sequence.length += len(new)
        self.tokens += new
        return data, kept

    def back_to(self, length: int) -> None:
        """Forget the tokens behind."""
        self.sequence.length, self.tokens = length, self.tokens[:length]

    def draft(self, position: int, kept: Any, next_ids: Sequence[int], depth: int = DEPTH) -> list[int]:
        backend = self.backends[-1]
        assert isinstance(backend, DraftingBackend)
        row = DraftRow(
            sequence=self.sequence.row(1).sequence,
            position=position,
            kept=(kept[:1], kept[1:]) if len(kept) > 1 else (kept,),
            next_ids=np.array(next_ids, np.int32),
            depth=depth,
            runs=self.sequence.runs,
        )
        (found,) = backend.draft(DraftStep(slice_index=self.slices[-1].index, rows=(row,)))
        return found.tolist()


def run_of(weights: WeightSource, make: Callable[[], Backend], ranges: Sequence[LayerRange]) -> Run:
    slices = make_slices(list(ranges), weights.config.num_layers)
    backends = [make() for _ in slices]
    states = 16 if weights.config.state_bytes() else 0
    for backend, part in zip(backends, slices, strict=True):
        backend.load([part], weights, lambda _: None)
        backend.allocate_kv(num_blocks=16, block_size=BLOCK, state_slots=states)
    track = Track(3, Blocks(16, BLOCK, scattered=True).take(64), slot=2 if states else None)
    return Run(backends, slices, track)


def check_drafts(weights: WeightSource, floats: Floats, run: Run, guessed: list[np.ndarray]) -> None:
    """Guess behind the prompt, behind single tokens, and behind a window whose second guess is wrong."""
    config = weights.config
    *parts, last = cut(PROMPT, CHUNKS)
    for part in parts:
        behind = PROMPT[len(run.tokens) + 1 : len(run.tokens) + 1 + len(part)]
        _, kept = run.step(list(part), behind)
        assert not len(kept)
    logits, kept = run.step(list(last), [*last[1:], UNKNOWN_ID])
    close(logits, reference_logits(config, floats, PROMPT)[-len(last) :])
    assert len(kept) == 1
    first = int(logits[-1].argmax())
    guessed.clear()
    drafts = run.draft(len(PROMPT) - 1, kept, [first])
    expected = reference_drafts(config, floats, [*PROMPT, first], DEPTH)
    close(np.concatenate(guessed), expected)
    assert drafts == expected.argmax(-1).tolist()

    tokens = [*PROMPT, first]
    for _ in range(3):  # the second step of a size is recorded, and the third repeats it
        logits, kept = run.step(tokens[-1:], [UNKNOWN_ID])
        tokens.append(int(logits[-1].argmax()))
        guessed.clear()
        run.draft(len(tokens) - 2, kept, tokens[-1:], depth=1)
        close(np.concatenate(guessed), reference_drafts(config, floats, tokens, 1))

    _, kept = run.step([tokens[-1], 5, 6], [UNKNOWN_ID] * 3)  # the second guess turns out to be wrong
    assert len(kept) == 3
    guessed.clear()
    again = run.draft(len(tokens) - 1, kept[:2], [5, 7])
    expected = reference_drafts(config, floats, [*tokens, 5, 7], DEPTH)
    close(np.concatenate(guessed), expected)
    assert again == expected.argmax(-1).tolist()


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))


def halves(weights: WeightSource) -> list[LayerRange]:
    count = weights.config.num_layers
    return [LayerRange(0, count // 2), LayerRange(count // 2, count)]


IN_SHORT = ("qwen35", "deepseek_v3")  # families that the quick suite tries on MLX, too
CASES = [
    pytest.param(family, backend, marks=() if backend == "torch" or family in IN_SHORT else pytest.mark.long)
    for family in VALUES
    for backend in BACKENDS
]


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_guesses_are_those_of_the_reference(
    family: str, backend: str, tmp_path: Path, guessed: list[np.ndarray]
) -> None:
    opened = open_weights(write_mtp_folder(tmp_path, family))
    weights = opened.holding([last_slice(opened)])
    assert weights.config.has_mtp
    check_drafts(weights, float_weights(weights), run_of(weights, BACKENDS[backend], halves(weights)), guessed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_may_hold_that_layer_alone(backend: str, tmp_path: Path, guessed: list[np.ndarray]) -> None:
    opened = open_weights(write_mtp_folder(tmp_path, "qwen35moe"))
    weights = opened.holding([last_slice(opened)])
    count = weights.config.num_layers
    run = run_of(weights, BACKENDS[backend], [LayerRange(0, count - 1), LayerRange(count - 1, count)])
    check_drafts(weights, float_weights(weights), run, guessed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_guesses_of_packed_weights_behind_recorded_steps(
    backend: str, guessed: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_config(num_layers=4, hidden_size=64, vocab_size=64)
    layer = plain.layers[0].with_attention(num_heads=2, num_kv_heads=1, head_dim=32, rotary_dim=16, gated=True)
    config = replace(plain, layers=(*[layer] * 4, replace(layer, mtp=True)))
    weights = PackedTinyModel(config, {"": "Q8_0"})
    floats = {name: exact_float32(weights.load(name)) for name in model_tensors(config)}
    replayed: list[bool] = []
    run = DecodeReplays.run

    def counted(self: DecodeReplays, *args: Any) -> Any:
        replayed.append(self._decoder.part.head)
        return run(self, *args)

    monkeypatch.setattr(DecodeReplays, "run", counted)
    check_drafts(weights, floats, run_of(weights, BACKENDS[backend], halves(weights)), guessed)
    recorded = backend == "torch" and isinstance(cpu_kernels(), CpuKernels)
    assert sum(replayed) == 4 * recorded, "tokens and windows are recorded steps, also where their output is kept"


@pytest.mark.parametrize("family", ["qwen35", "glm4_moe"])
def test_graphs_keep_the_output_too(
    family: str, tmp_path: Path, guessed: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's pages and graphs, with torch's operations on a CPU in the place of kernels."""
    opened = open_weights(write_mtp_folder(tmp_path, family))
    weights = opened.holding([last_slice(opened)])
    replayed: list[int] = []
    replay = CpuGraph.replay
    monkeypatch.setattr(CpuGraph, "replay", lambda self: replayed.append(1) or replay(self))
    check_drafts(weights, float_weights(weights), run_of(weights, cuda_on_host, halves(weights)), guessed)
    assert len(replayed) >= 2


def last_slice(weights: Weights) -> Slice:
    count = weights.config.num_layers
    return Slice(index=1, layers=LayerRange(count - 1, count + 1), embedding=False, head=True)
