"""Pages and graphs on a CPU: planning, padding, the spare block, rounding, and inputs at recorded addresses."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.graphs import can_replay  # noqa: E402
from edgepipe_torch.layers.experts import EachExpert  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402

from edgepipe.backend.step_layout import StepLayout, lay_out_step  # noqa: E402
from edgepipe.backend.types import ActivationType, BackendOptions, LogitEdits, ScoreRows, StepRow  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import Experts, Latent, Router  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights  # noqa: E402
from tests.support.backends.crowd_events import CrowdEvent, crowd_events, play_crowd  # noqa: E402
from tests.support.backends.graph_recorder import CpuGraph, CpuRecorder  # noqa: E402
from tests.support.backends.steps import make_step, result_of, run_step, step_row, token_ids  # noqa: E402
from tests.support.backends.torch_paging import CopyingTransfer, CudaOnHost, cpu_paging  # noqa: E402
from tests.support.backends.torch_twins import TINY, UNGROUPED, WINDOW, Crowd, Twins  # noqa: E402

RANKS = Latent(query_rank=8, kv_rank=24, nope_dim=16, rope_dim=8, value_dim=16)
LATENT = replace(
    TINY,
    layers=tuple(
        spec.with_attention(num_heads=4, num_kv_heads=1, head_dim=32, rotary_dim=8, latent=RANKS)
        for spec in TINY.layers
    ),
)


@pytest.fixture(scope="module", autouse=True)
def every_shape_stays() -> Iterator[None]:
    """float32 products on a CPU, unlike CUDA's, keep their results in a workspace that drops old shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "_MAX_SHAPES", 10_000)
        yield


def singles(count: int, position: int, *, blocks: int = 1) -> list[StepRow]:
    """One token at ``position`` of each of ``count`` sequences with so many blocks, which lie in reverse order."""
    tables = [[(blocks * index + at, 1) for at in reversed(range(blocks))] for index in range(count)]
    return [step_row(position, 1, *table, sequence=index + 1) for index, table in enumerate(tables)]


def decoded(twins: Twins, counts: list[int]) -> None:
    """Decode steps of the first ``counts`` sequences, each of which goes on where it stopped."""
    blocks = -(-len(counts) // twins.page_tokens)
    lengths = [0] * max(counts)
    for count in counts:
        rows = [singles(index + 1, lengths[index], blocks=blocks)[index] for index in range(count)]
        twins.step(rows, np.arange(count) % twins.config.vocab_size)
        lengths[:count] = [length + 1 for length in lengths[:count]]
    twins.finish()


events = crowd_events(prompt=9, chunk=6, arrivals=5, decoding=14, repeats=(1, 4), most=10)


class TestProperties:
    @settings(max_examples=20)
    @given(events=events, seed=st.integers(0, 2**32 - 1), config=st.sampled_from([TINY, WINDOW, UNGROUPED]))
    def test_sequences_that_come_and_go(self, events: list[CrowdEvent], seed: int, config: Any) -> None:
        play_crowd(Twins(config), events, seed)

    @settings(max_examples=10)
    @given(events=events, seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(ActivationType))
    def test_over_two_slices(self, events: list[CrowdEvent], seed: int, kind: ActivationType) -> None:
        play_crowd(Twins(cuts=[1], kind=kind), events, seed)

    @pytest.mark.long
    @settings(max_examples=300)
    @given(
        events=st.lists(events, min_size=1, max_size=5).map(lambda lists: [event for part in lists for event in part]),
        seed=st.integers(0, 2**32 - 1),
        cuts=st.sampled_from([[], [1]]),
        kind=st.sampled_from(ActivationType),
        config=st.sampled_from([TINY, WINDOW, UNGROUPED]),
    )
    def test_many_more(self, events: Any, seed: int, cuts: list[int], kind: ActivationType, config: Any) -> None:
        play_crowd(Twins(config, cuts=cuts, kind=kind), events, seed)


class TestRounding:
    @pytest.mark.parametrize(
        ("counts", "sizes"),
        [
            ([1, 1], [1]),
            ([3, 4, 3], [4]),
            ([1, 2, 1, 2], [1, 2]),
            ([5, 8, 9, 12, 13, 16], [8, 12, 16]),
            ([17, 24, 25, 32, 33, 48, 49, 64], [24, 32, 48, 64]),
            ([65, 65, 65], []),
        ],
        ids=str,
    )
    def test_of_rows(self, counts: list[int], sizes: list[int]) -> None:
        """Steps of a size share a graph, recorded at the second of them. More than 64 rows run without one."""
        twins = Twins(num_blocks=3 * max(counts))
        decoded(twins, counts)
        assert [graph.result.shape[0] for graph in twins.graphs] == sizes

    def test_of_pages(self) -> None:
        """One sequence over one-token pages: 4, 16, 64 ... of them share a graph; over 1024 run without one."""
        twins = Twins(page_tokens=1, num_blocks=1100)
        table = [(block, 1) for block in np.random.default_rng(1).permutation(1100)]
        expected = [(1, 0), (2, 1), (4, 1), (5, 1), (16, 2), (17, 2), (18, 3), (64, 3), (65, 3), (256, 4), (257, 4)]
        at = 0
        for length, num_graphs in [*expected, (1024, 5), (1025, 5), (1026, 5)]:
            if length - 1 > at:
                twins.step([step_row(at, length - 1 - at, *table)], np.arange(length - 1 - at) % 31)
            twins.step([step_row(length - 1, 1, *table)], [length % 31])
            assert len(twins.graphs) == num_graphs, length
            at = length
        twins.finish()

    def test_sizes_in_turns(self) -> None:
        """Each graph keeps its own inputs and result while others run."""
        decoded(Twins(num_blocks=350), [1, 3, 16, 70, 2, 3, 15, 16, 1, 64, 33, 1, 60, 4, 4, 4, 70, 33])


class TestWindowsOfDrafts:
    @pytest.mark.parametrize("config", [TINY, WINDOW, UNGROUPED], ids=["tiny", "window", "ungrouped"])
    def test_each_token_sees_those_before_it(self, config: Any) -> None:
        """Windows of a lone sequence and beside another; the next one begins behind some of its tokens."""
        twins, random = Twins(config, num_blocks=80), np.random.default_rng(5)
        first, second = [(0, 1), (7, 3), (20, 20)], [(2, 2), (45, 30)]
        for table in (first, second):
            twins.step([step_row(0, 9, *table)], random.integers(0, 31, 9))
        at = other = 9
        for turn, count in enumerate([2, 8, 2, 5, 8, 3, 8, 5, 8, 7]):
            rows = [step_row(at, count, *first)]
            if turn % 2:
                rows.append(step_row(other, 1 + turn % 3, *second))
                other += 1
            twins.step(rows, random.integers(0, 31, sum(row.num_tokens for row in rows)))
            at += int(random.integers(1, count + 1))
        twins.finish()
        assert sum(graph.num_replays for graph in twins.graphs) >= 5


class TestWhichStepsReplay:
    @pytest.mark.parametrize("head", [False, True])
    def test_single_tokens(self, head: bool) -> None:
        assert can_replay(layout(singles(3, 0)), head=head)
        assert not can_replay(layout(singles(65, 0)), head=head)
        assert can_replay(layout([*singles(2, 0), step_row(0, 2, (9, 1))]), head=head)
        assert not can_replay(layout([*singles(2, 0), step_row(0, 9, (9, 3))]), head=head)
        assert not can_replay(layout([]), head=head)

    def test_only_if_every_row_is_sampled_from_in_its_order(self) -> None:
        for wanted in ([0, 1], [1, 0, 2], [], [0, 1, 2, 2]):
            assert not can_replay(layout(singles(3, 0), logit_rows=wanted), head=True)
            assert can_replay(layout(singles(3, 0), logit_rows=wanted), head=False)

    def test_not_if_rows_are_scored(self) -> None:
        scores = ScoreRows(rows=np.array([0], np.int32), targets=np.array([1], np.int32), num_top=1)
        assert not can_replay(layout(singles(3, 0), scores=scores), head=True)

    def test_rows_in_another_order_are_right_without_a_graph(self) -> None:
        twins = Twins()
        for position in range(3):
            twins.step(singles(3, position), [1, 2, 3], logit_rows=[2, 0])
        twins.finish()
        assert not twins.graphs


def layout(rows: list[StepRow], *, logit_rows: list[int] | None = None, scores: ScoreRows | None = None) -> StepLayout:
    step = replace(make_step(rows, logit_rows=logit_rows), scores=scores)
    return lay_out_step(step, block_size=4, num_blocks=100, dtype=np.int64)


class TestSurplusRows:
    def test_read_the_spare_block_alone_after_longer_sequences_left(self) -> None:
        """The twins check that surplus results are finite: the blocks of sequences that left are NaN."""
        twins = Twins()
        crowd = Crowd(twins, 1)
        crowd.arrive([11, 10, 9, 12])
        for count in (4, 4, 3):
            crowd.decode(count)
        for _ in range(3):
            crowd.leave(1)
            crowd.decode(3)
            crowd.decode(3)
        twins.finish()
        assert max(graph.num_replays for graph in twins.graphs) > 2

    @pytest.mark.parametrize("cut", [False, True], ids=["from ids", "from activations"])
    def test_with_experts_they_choose_those_of_the_first_row(self, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three sequences take a graph of four rows, whose first run is not recorded."""
        chosen: list[Any] = []
        original = EachExpert.add

        def add(self: EachExpert, x: Any, own: Any, weights: Any, total: Any) -> None:
            chosen.append(own.clone())
            original(self, x, own, weights, total)

        monkeypatch.setattr(EachExpert, "waits", False)  # as those of CUDA do not
        monkeypatch.setattr(EachExpert, "add", add)
        mixed = Experts(count=16, used=3, inner=16, router=Router())
        config = replace(TINY, layers=tuple(replace(spec, dense=None, experts=mixed) for spec in TINY.layers))
        whole = [LayerRange(0, 1), LayerRange(1, 2)] if cut else [LayerRange(0, 2)]
        stages: list[TorchBackend] = []
        for part in make_slices(whole, 2):
            options = BackendOptions(device="cpu", activation_type=ActivationType.FLOAT32, threads=1)
            stages.append(TorchBackend(options, device=CudaOnHost(paging=cpu_paging(page_tokens=4))))
            stages[-1].load([part], TinyWeights(config), lambda _progress: None)
            stages[-1].allocate_kv(num_blocks=12, block_size=4)
        ids: Any = np.arange(27, dtype=np.int32)
        for at, count in ((0, 9), (9, 1)):
            rows = [step_row(at, count, (3 * index, 3), sequence=index + 1) for index in range(3)]
            chosen.clear()
            data: Any = ids[: 3 * count]
            for index, stage in enumerate(stages):
                data = run_step(stage, make_step(rows, slice_index=index), data)
        assert [tuple(each.shape) for each in chosen] == [(4, 3), (4, 3)]
        for each in chosen:
            assert each[3].tolist() == each[0].tolist()
            assert len({tuple(row) for row in each[:3].tolist()}) > 1

    def test_a_row_that_is_no_number_spoils_no_later_step(self) -> None:
        """Activations of a row with NaN stay in the buffer of arrivals behind the next step's rows."""
        stages = [middle_slice(None), middle_slice(CpuRecorder)]
        draw = np.random.default_rng(2)
        for position, count in enumerate([4, 4, 4, 3, 3]):
            sent = draw.standard_normal((count, TINY.hidden_size)).astype(np.float32)
            if position < 3:
                sent[3] = np.nan
            plain, paged = (run_step(stage, make_step(singles(count, position, blocks=2)), sent) for stage in stages)
            np.testing.assert_allclose(paged[:3], plain[:3], rtol=0, atol=1e-4)
            assert np.isfinite(paged[:3]).all()


def middle_slice(new_recorder: Callable[[], Any] | None) -> TorchBackend:
    """A slice without embedding and head, over pages if it has a recorder."""
    config = replace(TINY, layers=TINY.layers[:1] * 4)
    part = replace(make_slices([LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)], 4)[1], index=0)
    options = BackendOptions(device="cpu", activation_type=ActivationType.FLOAT32, threads=1)
    paging = None if new_recorder is None else cpu_paging(page_tokens=4, new_recorder=new_recorder)
    backend = TorchBackend(options, device=None if paging is None else CudaOnHost(paging=paging))
    backend.load([part], TinyWeights(config), lambda _progress: None)
    backend.allocate_kv(num_blocks=16, block_size=4)
    return backend


class FullAtFirst(CopyingTransfer):
    """A device whose memory is full at the first upload."""

    def __init__(self) -> None:
        self.is_full = True

    def upload_to(self, array: np.ndarray, target: Any) -> None:
        """Overwrite the start of ``target``."""
        if self.is_full:
            self.is_full = False
            raise torch.OutOfMemoryError("no memory for a graph")
        super().upload_to(array, target)


class TestRecordedAhead:
    @pytest.mark.parametrize("config", [TINY, WINDOW], ids=["plain", "windows"])
    @pytest.mark.parametrize("cuts", [[], [1]], ids=["a slice", "two slices"])
    def test_steps_of_common_sizes_wait_for_no_recording(self, config: ModelConfig, cuts: list[int]) -> None:
        twins = Twins(config, cuts=cuts, recorded_ahead=((1, 4), (4, 4)))
        assert [graph.num_replays for graph in twins.graphs] == [1, 1] * (len(cuts) + 1)
        decoded(twins, [1, 3, 4, 1, 4])
        assert [graph.num_replays for graph in twins.graphs] == [3, 4] * (len(cuts) + 1)

    def test_other_sizes_are_recorded_at_their_second_step(self) -> None:
        twins = Twins(recorded_ahead=((1, 4),))
        decoded(twins, [1, 4, 4])
        assert [graph.result.shape[0] for graph in twins.graphs] == [1, 4]

    def test_without_memory_a_load_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        recorder = CpuRecorder()
        paging = cpu_paging(page_tokens=4, new_recorder=lambda: recorder)
        paging = replace(paging, transfer=FullAtFirst(), recorded_ahead=((1, 4), (2, 4)))
        backend = TorchBackend(
            BackendOptions(device="cpu", dtype="float32", threads=1), device=CudaOnHost(paging=paging)
        )
        backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(TINY), lambda _progress: None)
        with caplog.at_level(logging.WARNING):
            backend.allocate_kv(num_blocks=8, block_size=4)
        assert "not recorded ahead" in caplog.text
        assert not recorder.graphs
        for position in range(3):
            run_step(backend, make_step(singles(1, position)), token_ids([1]))
        assert len(recorder.graphs) == 1


class TestStaleness:
    def test_a_new_pool_and_new_weights_get_new_graphs(self) -> None:
        twins = Twins()
        decoded(twins, [3] * 4)
        twins.allocate()
        decoded(twins, [3] * 4)
        twins.load(seed=1)
        twins.allocate()
        decoded(twins, [3] * 4)
        assert [graph.num_replays for graph in twins.graphs] == [3]

    def test_old_pools_and_weights_are_freed_at_once(self) -> None:
        """A card has no room for a new pool beside the old one, and Python's next collection may be far."""
        gc.disable()
        try:
            backend = middle_slice(CpuRecorder)
            sent = np.ones((2, TINY.hidden_size), np.float32)
            held: list[weakref.ref[Any]] = [weakref.ref(backend._weights[0].layers[0].linears[0])]
            for _ in range(2):
                for position in range(3):
                    run_step(backend, make_step(singles(2, position)), sent)
                held.append(weakref.ref(backend._pools[0]))
                backend.allocate_kv(num_blocks=8, block_size=4)
                assert [each() is not None for each in held] == [True] + [False] * (len(held) - 1)
            backend.close()
            assert held[0]() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("config", [TINY, LATENT], ids=["plain", "latent"])
    def test_prompts_of_many_lengths_leave_a_graphs_memory_alone(
        self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The workspace of prompts drops old shapes, which a graph must not have recorded."""
        monkeypatch.setattr(Workspace, "_MAX_SHAPES", 4)  # few prompts fill it
        options = BackendOptions(device="cpu", dtype="bfloat16", threads=1)  # products without a workspace
        backend = TorchBackend(options, device=CudaOnHost("bfloat16", paging=cpu_paging(page_tokens=4)))
        backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(config), lambda _progress: None)
        backend.allocate_kv(num_blocks=16, block_size=4)
        prompt = np.arange(20, dtype=np.int32)
        expected = run_step(backend, make_step([step_row(0, 20, (0, 5))]), prompt)
        run_step(backend, make_step([step_row(0, 9, (0, 5))]), prompt[:9])
        for length in range(9, 16):
            found = run_step(backend, make_step([step_row(length, 1, (0, 5))]), prompt[length : length + 1])
            np.testing.assert_allclose(found[0], expected[length], rtol=0, atol=0.2 * np.abs(expected).max())
            for other in range(9, 15) if length > 9 else ():  # the second step records
                run_step(backend, make_step([step_row(0, other, (8, 4))]), prompt[:other])

    def test_candidates_outlive_later_steps(self) -> None:
        options = BackendOptions(device="cpu", dtype="float32", threads=1, settings={"sampling": "device"})
        backend = TorchBackend(options, device=CudaOnHost(paging=cpu_paging(page_tokens=4)))
        backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(TINY), lambda _progress: None)
        backend.allocate_kv(num_blocks=16, block_size=4)
        edits = LogitEdits(
            rows=np.array([1], np.int32),
            ids=np.array([7], np.int32),
            repetition=np.ones(1, np.float32),
            add=np.full(1, 100.0, np.float32),
            masks=None,
            temperatures=np.ones(3, np.float32),
            num_top=2,
        )
        for position in range(5):
            step, ids = make_step(singles(3, position, blocks=2)), token_ids([position, 1, 2])
            plain = result_of(backend.collect(backend.submit(backend.prepare(step), ids)))
            picked = backend.collect(backend.submit(backend.prepare(step), ids, edits)).candidates
            run_step(backend, make_step(singles(4, position, blocks=2)), token_ids([3, 4, 5, 6]))
            assert picked is not None
            assert picked.ids[1, 0] == 7
            np.testing.assert_allclose(picked.top_logits[:, 0], plain.max(1), atol=1e-5)
            np.testing.assert_allclose(picked.fetch(0), plain[0], atol=1e-5)


class FullMemory:
    """A recorder without memory."""

    def __init__(self) -> None:
        self.attempts = 0

    def record(self, compute: Callable[[], Any]) -> tuple[Any, CpuGraph]:
        """Fail half-way, as a recording does."""
        self.attempts += 1
        compute()
        raise torch.OutOfMemoryError("no memory for graphs")


def test_without_memory_for_a_graph_steps_run_without_it(caplog: pytest.LogCaptureFixture) -> None:
    recorder = FullMemory()
    stages = [middle_slice(None), middle_slice(lambda: recorder)]
    draw = np.random.default_rng(4)
    with caplog.at_level(logging.WARNING):
        for position in range(6):
            sent = draw.standard_normal((3, TINY.hidden_size)).astype(np.float32)
            plain, paged = (run_step(stage, make_step(singles(3, position, blocks=2)), sent) for stage in stages)
            np.testing.assert_allclose(paged, plain, rtol=0, atol=1e-4)
    assert recorder.attempts == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_blocks_that_are_no_whole_pages_are_attended_sequence_by_sequence() -> None:
    recorder = CpuRecorder()
    options = BackendOptions(device="cpu", dtype="float32", threads=1)
    paging = replace(cpu_paging(page_tokens=16, new_recorder=lambda: recorder), attend=refuse)
    backend = TorchBackend(options, device=CudaOnHost(paging=paging))
    backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(TINY), lambda _progress: None)
    backend.allocate_kv(num_blocks=8, block_size=8)
    for position in range(3):
        run_step(backend, make_step(singles(2, position)), token_ids([1, 2]))
    assert not recorder.graphs


def refuse(*_arguments: Any, **_named: Any) -> Any:
    raise AssertionError("the kernel reads whole pages only")
