"""Counts of chosen experts: kept beside a model, they decide which experts a later load leaves on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.layers.expert_ram import ExpertsInRam  # noqa: E402
from edgepipe_torch.layers.expert_uses import FILE_NAME, ExpertUses  # noqa: E402
from edgepipe_torch.layers.mixture import Mixture  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.spec.expert_places import SETTING, numbers_in_ram  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.weights.repacked import RepackedPlace  # noqa: E402
from edgepipe.weights.weights import Weights, open_weights  # noqa: E402
from tests.support.backends.steps import make_step, step_row  # noqa: E402
from tests.support.models.experts import write_expert_folder  # noqa: E402

COUNT = 16


def place_in(folder: Path, source: str = "these files") -> RepackedPlace:
    return RepackedPlace(folder=folder / "repacked", source=source, model_bytes=1 << 30)


def note(place: RepackedPlace | None, uses: dict[int, list[int]]) -> ExpertUses:
    """Counts of one load, saved."""
    found = ExpertUses(place)
    for layer, counts in uses.items():
        counter = found.counter(layer, len(counts))
        counter += counts
    found.save()
    return found


def test_counts_add_up_over_loads_of_other_layers(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    assert ExpertUses(place).kept(0, 3) == ()
    note(place, {0: [1, 2, 3], 1: [0, 0, 5]})
    late = ExpertUses(place)
    note(place, {1: [1, 1, 1], 2: [7, 0, 0]})
    late.counter(0, 3)[:] += 1
    late.save()
    found = ExpertUses(place)
    assert [found.kept(layer, 3) for layer in range(4)] == [(2, 3, 4), (1, 1, 6), (7, 0, 0), ()]
    assert found.kept(0, 4) == (), "another number of experts"
    assert [path.name for path in place.folder.iterdir()] == [FILE_NAME]


def test_counts_of_other_files_do_not_count(tmp_path: Path) -> None:
    note(place_in(tmp_path, "before"), {0: [1, 2]})
    assert ExpertUses(place_in(tmp_path)).kept(0, 2) == ()
    note(place_in(tmp_path), {0: [5, 5]})
    assert ExpertUses(place_in(tmp_path)).kept(0, 2) == (5, 5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"source": "these files", "layers": {"0": [1, -2]}}',
        '{"source": "these files", "layers": {"x": [1, 2]}}',
        '{"source": "these files", "layers": {"0": [1, true]}}',
        '{"source": "these files", "layers": {"0": 3}}',
        '{"source": "these files", "layers": {"0": [1e300, 1]}}',
        "[" * 100_000,
        "\ud800",
    ],
)
def test_a_broken_file_is_replaced(tmp_path: Path, text: str) -> None:
    place = place_in(tmp_path)
    place.folder.mkdir()
    (place.folder / FILE_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert ExpertUses(place).kept(0, 2) == ()
    note(place, {0: [1, 2]})
    assert ExpertUses(place).kept(0, 2) == (1, 2)


def test_without_a_place_or_with_one_that_cannot_be_written_nothing_is_kept(tmp_path: Path) -> None:
    note(None, {0: [1, 2]})
    (tmp_path / "repacked").write_text("a file where the folder would be")
    note(place_in(tmp_path), {0: [1, 2]})
    assert ExpertUses(place_in(tmp_path)).kept(0, 2) == ()


def served(source: Weights, tokens: list[int]) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """The logits of a prompt with half of the experts in RAM, and each layer's experts there."""
    options = BackendOptions(device="cpu", settings={SETTING: "50%"})
    backend = TorchBackend(options)
    backend.load(make_slices([LayerRange(0, 2)], 2), source, lambda _progress: None)
    backend.allocate_kv(num_blocks=8, block_size=16)
    step = make_step([step_row(0, len(tokens), (0, 4))], logit_rows=[len(tokens) - 1])
    logits = backend.collect(backend.submit(backend.prepare(step), np.array(tokens, np.int32))).logits
    places: list[tuple[int, ...]] = []
    for layer in backend._weights[0].layers:
        mixture = layer.feed_forward
        assert isinstance(mixture, Mixture)
        assert mixture._in_ram is not None
        places.append(tuple(torch.nonzero(mixture._in_ram._here >= 0).flatten().tolist()))
    backend.close()
    assert logits is not None
    return logits, places


def test_a_later_load_keeps_the_experts_used_most_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_weights(write_expert_folder(tmp_path / "model", num_experts=COUNT))
    assert isinstance(opened, Weights)
    source = Weights(opened.config, opened._files, repacked=place_in(tmp_path))
    chosen: list[Tensor] = []
    send = ExpertsInRam.send

    def noted(self: ExpertsInRam, x: Tensor, numbers: Tensor, weights: Tensor) -> object:
        chosen.append(numbers.clone())
        return send(self, x, numbers, weights)

    monkeypatch.setattr(ExpertsInRam, "send", noted)
    tokens = [3, 3, 7, 9, 3, 11, 7, 2]
    logits, places = served(source, tokens)
    assert places == [numbers_in_ram(COUNT, 50)] * 2
    uses = [np.bincount(each.reshape(-1).numpy(), minlength=COUNT) for each in chosen]
    again, moved = served(source, tokens)
    assert moved == [numbers_in_ram(COUNT, 50, each.tolist()) for each in uses]
    assert moved != places
    for each, numbers in zip(uses, moved, strict=True):
        assert each[list(numbers)].max() <= np.delete(each, list(numbers)).min()
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-4 * float(np.abs(logits).max()))
