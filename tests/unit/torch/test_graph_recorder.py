"""The CPU's graphs have the properties of CUDA graphs that make mistakes visible."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from tests.support.backends.graph_recorder import CpuRecorder  # noqa: E402


def test_recording_changes_nothing_and_a_replay_everything() -> None:
    source, target = torch.ones(3), torch.zeros(3)
    result, graph = CpuRecorder().record(lambda: target.add_(source).mul(2.0))
    assert target.tolist() == [0, 0, 0]
    assert result.isnan().all()
    for count in (1, 2):
        graph.replay()
        assert target.tolist() == [count] * 3
        assert result.tolist() == [2 * count] * 3


def test_a_replay_reads_the_addresses_that_were_recorded() -> None:
    held = {"input": torch.ones(2)}
    first = held["input"]
    result, graph = CpuRecorder().record(lambda: held["input"] * 3)
    first.fill_(5.0)
    held["input"] = torch.zeros(2)
    graph.replay()
    assert result.tolist() == [15, 15]


def test_a_replay_fails_if_memory_that_it_uses_was_freed() -> None:
    held = {"input": torch.ones(2)}
    _result, graph = CpuRecorder().record(lambda: held["input"] * 3)
    held["input"] = torch.ones(2)
    with pytest.raises(AssertionError, match="freed"):
        graph.replay()


def test_values_that_python_read_stay() -> None:
    scale, source = [2.0], torch.ones(2)
    result, graph = CpuRecorder().record(lambda: source * scale[0])
    scale[0] = 7.0
    graph.replay()
    assert result.tolist() == [2, 2]


def test_a_replay_overwrites_results_of_the_recorders_other_graphs() -> None:
    recorder, source = CpuRecorder(), torch.ones(2)
    (first, graph), (second, later) = (recorder.record(lambda: source + 1) for _ in range(2))
    graph.replay()
    assert first.tolist() == [2, 2]
    later.replay()
    assert first.isnan().all()
    assert second.tolist() == [2, 2]


def test_waiting_for_a_value_fails_and_changes_nothing() -> None:
    total = torch.zeros(1)

    def compute() -> Tensor:
        total.add_(1.0)
        return total * total.item()

    with pytest.raises(AssertionError, match="wait"):
        CpuRecorder().record(compute)
    assert total.item() == 0
