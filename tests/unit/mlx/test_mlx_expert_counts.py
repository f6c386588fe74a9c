"""The experts that a step on MLX reads, against the router's own choices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx import MlxBackend
from edgepipe_mlx import experts as mlx_experts
from edgepipe_mlx.experts import RouterWeights

from edgepipe.backend.types import StepOutput
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layer_spec import Experts
from edgepipe.weights.weights import open_weights
from tests.support.backends.mlx_models import cpu_options
from tests.support.backends.steps import make_step, step_row, token_ids
from tests.support.models.experts import write_expert_folder


def loaded(folder: Path, *, num_experts: int = 16) -> MlxBackend:
    source = open_weights(write_expert_folder(folder, num_experts=num_experts))
    backend = MlxBackend(cpu_options())
    backend.load(make_slices([LayerRange(0, 2)], 2), source, lambda _progress: None)
    backend.allocate_kv(num_blocks=8, block_size=16)
    return backend


def run(backend: MlxBackend, tokens: int, *, first: int = 0, logit_rows: Sequence[int] | None = None) -> StepOutput:
    step = make_step([step_row(0, tokens, (0, 4))], logit_rows=logit_rows)
    return backend.collect(backend.submit(backend.prepare(step), token_ids(range(first, first + tokens))))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Of each layer [T, K], in the order of their calls."""
    found: list[mx.array] = []
    route = mlx_experts.route

    def noted(spec: Experts, router: RouterWeights, x: mx.array) -> tuple[mx.array, mx.array]:
        routed = route(spec, router, x)
        found.append(routed[0])
        return routed

    monkeypatch.setattr(mlx_experts, "route", noted)
    return found


@pytest.mark.parametrize("tokens", [2, 3, 40], ids=["two", "three", "sorted by expert"])
def test_a_step_tells_the_mean_share_of_the_experts_that_its_layers_chose(
    tmp_path: Path, chosen: list[mx.array], tokens: int
) -> None:
    output = run(loaded(tmp_path), tokens)
    assert [each.shape for each in chosen] == [(tokens, 2)] * 2
    shares = [len(np.unique(np.array(each))) / 16 for each in chosen]
    assert output.expert_share == pytest.approx(np.mean(shares))


def test_the_last_layer_asks_experts_for_the_rows_with_logits_only_and_does_not_count_then(
    tmp_path: Path, chosen: list[mx.array]
) -> None:
    backend = loaded(tmp_path)
    expected = run(backend, 40).logits
    chosen.clear()
    output = run(backend, 40, logit_rows=[39, 7])
    assert [each.shape for each in chosen] == [(40, 2), (2, 2)]
    assert expected is not None
    assert output.logits is not None
    np.testing.assert_allclose(output.logits, expected[[39, 7]], rtol=1e-4, atol=1e-4)
    backend = loaded(tmp_path)
    share = run(backend, 40, logit_rows=[39]).expert_share
    assert share == pytest.approx(len(np.unique(np.array(chosen[-2]))) / 16)


def test_of_each_size_the_first_step_counts_and_every_eighth_then(tmp_path: Path) -> None:
    backend = loaded(tmp_path)
    assert run(backend, 1).expert_share == 0.0, "one token reads what it always does"
    counted = [bool(run(backend, 3, first=index).expert_share) for index in range(17)]
    assert [index for index, each in enumerate(counted) if each] == [0, 8, 16]


def test_a_prompt_without_logits_keeps_no_memory(tmp_path: Path) -> None:
    """The last layer computes no choices then."""
    backend = loaded(tmp_path)
    before = mx.get_active_memory()
    backend.allocate_kv(num_blocks=2048, block_size=16)
    step = make_step([step_row(0, 20, (0, 4))], logit_rows=[])
    backend.collect(backend.submit(backend.prepare(step), token_ids(range(20))))
    backend.allocate_kv(num_blocks=8, block_size=16)
    assert mx.get_active_memory() <= before + 20_000
