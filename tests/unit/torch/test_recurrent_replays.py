"""Recorded decode steps of slices with recurrent layers: states whose slots change from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgepipe_torch.cpu.device as cpu_device  # noqa: E402
from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.replay import DecodeReplays  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import ActivationType, BackendOptions, RowState, StateWrite, StepRow  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.spec.layer_spec import DeltaNet, LayerSpec, Mamba2, Recurrent, ShortConv  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.models.packed import PackedTinyModel  # noqa: E402
from tests.support.numerics.harness import Logits, Pipeline, Track  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")

PLAIN = tiny_config(num_layers=1, hidden_size=64, vocab_size=96)
ATTENTION = PLAIN.layers[0].with_attention(num_heads=2, num_kv_heads=1, head_dim=32, rotary_dim=16, gated=True)
DELTA = DeltaNet(key_heads=4, value_heads=8, key_dim=8, value_dim=16, taps=4)
MAMBA = Mamba2(heads=16, head_dim=8, groups=2, state_dim=16, taps=4)
SCHEMES = {"conv1d.weight": "F32", "conv.conv.weight": "F32", "": "Q8_0"}
TOKENS: list[int] = np.random.default_rng(1).integers(0, 96, 40).tolist()


def model(*layers: LayerSpec | Recurrent) -> ModelConfig:
    """A tiny model with layers, of which recurrent ones have a feed-forward part."""
    made = [
        each if isinstance(each, LayerSpec) else replace(ATTENTION, attention=None, recurrent=each) for each in layers
    ]
    return replace(PLAIN, layers=tuple(made))


BY_KERNELS = {
    "gated DeltaNet": model(DELTA, ATTENTION, DELTA),
    "Mamba-2": model(MAMBA, ATTENTION),
    "short convolution": model(ShortConv(channels=64, taps=3), ATTENTION),
    "no attention in a slice": model(DELTA, replace(ATTENTION, attention=None), MAMBA, ATTENTION),
}
CASES = {**BY_KERNELS, "gated DeltaNet by torch": model(replace(DELTA, value_dim=4), ATTENTION)}


@dataclass(slots=True)
class Placed(Track):
    """A sequence whose state is read from a slot and written to another."""

    writes: int = 0

    def row(self, num_tokens: int) -> StepRow:
        """See ``Track``; the state stays where it was written."""
        state = RowState(self.slot if self.length else None, (StateWrite(num_tokens, self.writes),))
        row = replace(Track.row(self, num_tokens), state=state)
        self.slot = self.writes
        return row


def pipeline_of(config: ModelConfig, kernels: CpuKernels | KernelsUnavailable | None = None) -> Pipeline:
    """Two slices, where the model has several layers before the last."""
    options = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
    devices = [CpuDevice(torch.float32, kernels=kernels) for _ in range(2 if config.num_layers > 3 else 1)]
    backends = [TorchBackend(options, device=device) for device in devices]
    return Pipeline.build(backends, PackedTinyModel(config, SCHEMES), num_blocks=24)


def logits_of(pipeline: Pipeline) -> list[Logits]:
    """Logits of two sequences and of a third that goes on from a snapshot of the first, in steps of all kinds."""
    first, second, third = (Placed(each, pipeline.blocks.take(40)) for each in range(3))
    third.runs = first.runs  # whose KV it reads; it computes no token that the first one computes differently

    def step(*work: tuple[Placed, int, int]) -> Logits:
        """Compute so many tokens of some sequences, with their states to slots."""
        rows: list[tuple[Track, Sequence[int]]] = []
        for sequence, count, slot in work:
            sequence.writes = slot
            rows.append((sequence, TOKENS[sequence.length : sequence.length + count]))
        return pipeline.step(rows)

    found = [step((first, 1, 0)), step((first, 9, 1)), step((second, 1, 2))]
    found += [step((first, 1, 3), (second, 1, 2)), step((first, 1, 3), (second, 1, 4))]
    third.slot, third.length = 3, first.length  # a snapshot that both read
    found.append(step((first, 1, 0), (second, 3, 4)))  # a row of several tokens: not recorded
    found += [step((first, 1, 1)), step((third, 1, 5)), step((third, 1, 6), (second, 1, 7), (first, 1, 0))]
    found += [step((first, 1, 0), (third, 1, 1)) for _ in range(3)]
    return found


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_recorded_step_gives_the_same_bits_wherever_states_lie(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []
    run = DecodeReplays.run
    monkeypatch.setattr(DecodeReplays, "run", lambda *given: (replayed.append(1), run(*given))[1])
    pipeline = pipeline_of(config)
    found = logits_of(pipeline)
    assert len(replayed) == 10 * len(pipeline.slices), "all but the steps with several tokens of a sequence"
    monkeypatch.setattr(cpu_device, "can_record", lambda *_: False)
    for logits, other in zip(found, logits_of(pipeline_of(config)), strict=True):
        assert np.array_equal(logits, other)
    assert len(replayed) == 10 * len(pipeline.slices)
    for logits, other in zip(found, logits_of(pipeline_of(config, KernelsUnavailable("for a test"))), strict=True):
        np.testing.assert_allclose(logits, other, rtol=0, atol=1e-5 * float(np.abs(other).max()))


@pytest.mark.parametrize("config", BY_KERNELS.values(), ids=BY_KERNELS)
def test_a_sequence_has_the_same_bits_alone_and_beside_others(config: ModelConfig) -> None:
    def decoded(beside: int) -> Logits:
        """Logits of a sequence's tokens, one by one, beside so many others."""
        pipeline = pipeline_of(config)
        own, *others = (pipeline.add(12) for _ in range(1 + beside))
        found: list[Logits] = []
        for at in range(12):
            work = [(own, TOKENS[at : at + 1]), *((other, TOKENS[20 + at : 21 + at]) for other in others)]
            found.append(pipeline.step(work)[0])
        return np.stack(found)

    assert np.array_equal(decoded(0), decoded(3))
