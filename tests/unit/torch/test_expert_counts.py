"""The experts that a backend's steps read, against the router's own choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.layers import mixture  # noqa: E402
from edgepipe_torch.layers.routing import RouterWeights  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.backend.types import BackendOptions, StepOutput  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import Experts  # noqa: E402
from edgepipe.weights.weights import open_weights  # noqa: E402
from tests.support.backends.steps import make_step, step_row, token_ids  # noqa: E402
from tests.support.models.experts import (  # noqa: E402
    expert_config,
    stored_tensors,
    whole_weights,
    write_expert_folder,
    write_expert_gguf,
)


def floats(folder: Path) -> Path:
    """Sixteen experts in float32, multiplied one after the other."""
    return write_expert_folder(folder, num_experts=16)


def packed(folder: Path) -> Path:
    """Four experts in blocks of Q8_0, which one compiled call multiplies where the CPU has the kernels."""
    config = expert_config()
    return write_expert_gguf(folder / "m.gguf", whole_weights(config, stored_tensors(config)), scheme="Q8_0")


def loaded(path: Path) -> TorchBackend:
    backend = TorchBackend(BackendOptions(device="cpu", threads=1))
    source = open_weights(path)
    backend.load(make_slices([LayerRange(0, 2)], 2), source, lambda _progress: None)
    backend.allocate_kv(num_blocks=8, block_size=16)
    return backend


def run(backend: TorchBackend, tokens: int, *, first: int = 0, logit_rows: Sequence[int] | None = None) -> StepOutput:
    step = make_step([step_row(0, tokens, (0, 4))], logit_rows=logit_rows)
    return backend.collect(backend.submit(backend.prepare(step), token_ids(range(first, first + tokens))))


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The experts [T, K] that each layer's router chose so far."""
    found: list[Tensor] = []
    route = mixture.route

    def noted(spec: Experts, router: RouterWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = route(spec, router, x)
        found.append(chosen.clone())
        return chosen, weights

    monkeypatch.setattr(mixture, "route", noted)
    return found


@pytest.mark.parametrize(("make", "count"), [(floats, 16), (packed, 4)], ids=["floats", "packed"])
@pytest.mark.parametrize("tokens", [2, 3, 9])
def test_a_step_tells_the_mean_share_of_the_experts_that_its_layers_chose(
    tmp_path: Path, choices: list[Tensor], make: Callable[[Path], Path], count: int, tokens: int
) -> None:
    output = run(loaded(make(tmp_path)), tokens)
    assert [each.shape for each in choices] == [(tokens, 2)] * 2
    assert output.expert_share == pytest.approx(np.mean([len(np.unique(each)) / count for each in choices]))


def test_of_each_size_the_first_step_counts_and_every_eighth_then(tmp_path: Path) -> None:
    backend = loaded(floats(tmp_path))
    assert run(backend, 1).expert_share == 0.0, "one token reads what it always does"
    counted = [bool(run(backend, 3, first=index).expert_share) for index in range(17)]
    assert [index for index, each in enumerate(counted) if each] == [0, 8, 16]
    assert run(backend, 4).expert_share > 0


@pytest.mark.parametrize("logit_rows", [[], [4], [0, 0, 1, 2, 3]], ids=["none", "one", "one of them twice"])
def test_a_last_layer_that_computes_few_rows_does_not_count(
    tmp_path: Path, choices: list[Tensor], logit_rows: list[int]
) -> None:
    backend = loaded(floats(tmp_path))
    run(backend, 9)  # leaves its count in the last layer
    choices.clear()
    output = run(backend, 5, logit_rows=logit_rows)
    assert output.expert_share == len(np.unique(choices[0])) / 16
