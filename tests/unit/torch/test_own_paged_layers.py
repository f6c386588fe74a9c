"""Layers that torch's kernel over pages excludes: in graphs, beside other layers, with prompts, by the CUDA source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.kernels.paged_decode import PagedDecode, PagedForm, paged_form  # noqa: E402
from edgepipe_torch.cuda.kernels.place_heads import PlaceHeads  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices  # noqa: E402
from edgepipe.spec.kv_forms import pages_fit  # noqa: E402
from edgepipe.spec.layer_spec import Latent  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.crowd_events import CrowdEvent, crowd_events, play_crowd  # noqa: E402
from tests.support.backends.host_compiler import COMPILER  # noqa: E402
from tests.support.backends.host_kernels import PLACE, HostModule, compile_for_host, paged_part  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402
from tests.support.backends.torch_twins import Crowd, Twins  # noqa: E402
from tests.support.numerics.decode_reference import reference_decode  # noqa: E402

if TYPE_CHECKING:
    from edgepipe_torch.layers.head_shape import LayerHeads

PLAIN = tiny_config(num_layers=2, hidden_size=16, vocab_size=31)


def with_attention(*each: dict[str, Any]) -> ModelConfig:
    layers = zip(PLAIN.layers, each, strict=True)
    return replace(PLAIN, layers=tuple(spec.with_attention(**own) for spec, own in layers))


LARGE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 264}
WINDOWED = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "window": 6}
RANKS = Latent(query_rank=0, kv_rank=24, nope_dim=16, rope_dim=8, value_dim=16)
LATENT = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32, "rotary_dim": 8, "latent": RANKS}
CAPPED = {"softcap": 2.0, "sinks": True}
CASES = {
    "Gemma 4": with_attention(WINDOWED, LARGE),
    "latent": with_attention(LATENT, LATENT),
    "capped logits": with_attention(CAPPED | {"window": 6}, CAPPED),
    "all of them": with_attention(LATENT, LARGE | {"softcap": 3.0}),
}
events = crowd_events(prompt=20, chunk=14)


ORDINARY = with_attention({"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}, WINDOWED)


class Calls:
    """Kernels that note rows and lengths of their calls; a graph's replay makes none."""

    def __init__(self) -> None:
        self.made: list[tuple[list[int], list[int]]] = []

    def kernel(self, heads: LayerHeads) -> Any:
        computed = reference_decode(heads)

        def attend(heads: LayerHeads, *given: Any, rows: Any, lengths: Any, tables: Any) -> None:
            self.made.append((rows.tolist(), lengths.tolist()))
            computed(heads, *given, rows=rows, lengths=lengths, tables=tables)

        return attend


@settings(max_examples=8, deadline=None)
@given(events=events, cut=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_with_a_torch_that_reads_no_pages_own_kernels_serve_every_head(
    events: list[CrowdEvent], cut: bool, seed: int
) -> None:
    play_crowd(Twins(ORDINARY, cuts=[1] if cut else [], has_varlen=False), events, seed, prompts=[3, 1, 12])


def test_with_a_torch_that_reads_no_pages_decode_steps_replay() -> None:
    calls = Calls()
    twins = Twins(ORDINARY, decode=calls.kernel, has_varlen=False)
    crowd = Crowd(twins, 1)
    crowd.arrive([9, 11, 10])
    for _ in range(4):
        crowd.decode(3)
    twins.finish()
    assert calls.made
    assert [graph.num_replays for graph in twins.graphs] == [3]


def test_with_a_torch_that_reads_no_pages_and_without_kernels_layers_attend_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_heads: LayerHeads) -> Any:
        raise KernelsUnavailable("NVRTC was not found")

    with caplog.at_level(logging.WARNING):
        twins = Twins(ORDINARY, decode=refuse, has_varlen=False)
        crowd = Crowd(twins, 2)
        crowd.arrive([3, 12])
        for _ in range(3):
            crowd.decode(2)
        twins.finish()
    assert not twins.graphs
    assert "without pages and graphs: NVRTC was not found" in caplog.text


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    events=events,
    cut=st.booleans(),
    kv=st.sampled_from(["", "8bit", "4bit"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sequences_that_come_and_go(case: str, events: list[CrowdEvent], cut: bool, kv: str, seed: int) -> None:
    """Single rows, windows of speculation and long prompts in turns and together, as without pages."""
    play_crowd(Twins(CASES[case], cuts=[1] if cut else [], kv=kv), events, seed, prompts=[3, 1, 12])


@pytest.mark.parametrize("kv", ["", "8bit", "4bit"])
@pytest.mark.parametrize("case", CASES)
def test_decode_steps_replay_with_surplus_rows(case: str, kv: str) -> None:
    """The second step of a size is recorded. Surplus rows see one key of the spare block."""
    calls = Calls()
    twins = Twins(CASES[case], decode=calls.kernel, kv=kv)
    crowd = Crowd(twins, 1)
    crowd.arrive([9, 11, 10])
    calls.made.clear()
    for _ in range(4):
        crowd.decode(3)
    twins.finish()
    assert [graph.num_replays for graph in twins.graphs] == [3]
    own_layers = 1 if case == "Gemma 4" and not kv else 2  # torch's kernel reads no codes
    assert len(calls.made) == 2 * own_layers
    for rows, lengths in calls.made[:own_layers]:
        assert rows == [0, 1, 2, 3]
        assert sorted(lengths[:3]) == [10, 11, 12]
        assert lengths[3] == 1


@pytest.mark.parametrize("case", CASES)
def test_windows_of_speculation_are_single_rows(case: str) -> None:
    """Up to eight rows of a sequence: each sees one key more. With more, the sequence attends by itself."""
    calls = Calls()
    twins = Twins(CASES[case], decode=calls.kernel)
    table, at = [(block, 1) for block in (7, 3, 9, 1, 8, 0, 5, 2, 6, 4, 11, 10)], 0
    for count in range(1, 10):
        calls.made.clear()
        twins.step([step_row(at, count, *table)], np.arange(count))
        at += count
        if count > 8:
            assert not calls.made
            continue
        if not calls.made:
            assert count > 6, "the third step of eight rows is a replay, which calls nothing anew"
            continue
        rows, lengths = calls.made[0]
        assert rows[:count] == list(range(count))
        assert lengths[:count] == list(range(at - count + 1, at + 1))
        assert set(lengths[count:]) <= {1}, "graphs have surplus rows"
    twins.finish()


def test_a_step_of_single_rows_and_a_long_prompt() -> None:
    calls = Calls()
    twins = Twins(CASES["all of them"], decode=calls.kernel)
    first, second, third = ([(4 * index + place, 1) for place in (2, 0, 3, 1)] for index in range(3))
    twins.step([step_row(0, 5, *first), step_row(0, 3, *third, sequence=3)], np.arange(8))
    calls.made.clear()
    rows = [step_row(5, 2, *first), step_row(0, 12, *second, sequence=2), step_row(3, 1, *third, sequence=3)]
    twins.step(rows, np.arange(15))
    twins.finish()
    assert calls.made == [([0, 1, 14], [6, 7, 4])] * 2
    assert not twins.graphs


@pytest.mark.parametrize("kv", ["", "8bit", "4bit"])
def test_without_a_kernel_the_layer_attends_beside_pages(kv: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(heads: LayerHeads) -> Any:
        if heads.head_dim == 264:
            raise KernelsUnavailable("NVRTC was not found")
        return reference_decode(heads)

    with caplog.at_level(logging.WARNING):
        twins = Twins(CASES["Gemma 4"], decode=refuse, kv=kv)
        crowd = Crowd(twins, 2)
        crowd.arrive([3, 12])
        for _ in range(3):
            crowd.decode(2)
        twins.finish()
    assert not twins.graphs
    (said,) = [record.getMessage() for record in caplog.records if "without pages" in record.getMessage()]
    assert "heads of 264" in said
    assert "NVRTC was not found" in said


PAGE = 128  # two tiles of keys
KERNEL_CASES = {
    "large": with_attention(WINDOWED | {"head_dim": 64}, LARGE | {"head_dim": 384}),
    "latent": with_attention(
        *[
            LATENT
            | {"num_heads": 20, "head_dim": 160, "rotary_dim": 32}
            | {"latent": replace(RANKS, kv_rank=128, nope_dim=32, rope_dim=32)}
        ]
        * 2
    ),
    "capped": with_attention(*[CAPPED | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "window": 150}] * 2),
    "windows in small heads": with_attention(
        WINDOWED | {"head_dim": 64, "window": 150}, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
    ),
    "gpt-oss": with_attention(*[CAPPED | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}] * 2),
}


class NoMemory:
    """A recorder that never records: steps of graphs run with their fields, padding and spare block all the same."""

    def record(self, compute: Callable[[], Any]) -> Any:
        raise torch.OutOfMemoryError("no memory for graphs")


class HostKernels:
    """The CUDA sources of attention and of placing heads."""

    def __init__(self, place: HostModule, modules: dict[PagedForm, HostModule]) -> None:
        self._place = place
        self._modules = modules
        self.placed: list[str] = []  # forms of KV

    def decode(self, heads: LayerHeads, kv: str) -> PagedDecode:
        """Return the kernel of a layer."""
        form = paged_form(heads, kv)
        return PagedDecode(self._modules[form], form, multiprocessors=6)

    def place_heads(self, kv: str = "") -> PlaceHeads:
        """Return the kernel."""
        self.placed.append(kv)
        return PlaceHeads(self._place)


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    sizes = ((384, 384, 1), (160, 128, 2), (128, 128, 1), (64, 64, 1))
    forms = [
        PagedForm(head_dim=key, value_dim=value, head_tiles=tiles, kv=kv)
        for kv in ("", "8bit", "4bit")
        for key, value, tiles in sizes
        if pages_fit(key, value, kv)
    ]
    place, *found = compile_for_host([PLACE, *map(paged_part, forms)], tmp_path_factory.mktemp("kernels"))
    return HostKernels(place, dict(zip(forms, found, strict=True)))


@pytest.mark.parametrize(
    ("name", "kv"),
    [each for each in product(KERNEL_CASES, ("", "8bit", "4bit")) if each != ("large", "4bit")],  # has no kernel
)
def test_a_backend_computes_by_the_cuda_source(name: str, kv: str, host_kernels: HostKernels) -> None:
    """The kernels read queries and pages, and write keys and values, where decoder and pool have them."""
    options = BackendOptions(device="cpu", dtype="bfloat16", threads=1, kv=kv)
    decode = partial(host_kernels.decode, kv=kv)
    paging = cpu_paging(page_tokens=PAGE, new_recorder=NoMemory, decode=decode)
    config = KERNEL_CASES[name]
    device = CudaOnHost("bfloat16", paging=paging, kernels=cast("Any", host_kernels), kv=kv)
    paged = TorchBackend(options, device=device)
    backends = [paged, TorchBackend(replace(options, dtype="float32"))]
    for backend in backends:
        backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(config), lambda _progress: None)
        backend.allocate_kv(num_blocks=8, block_size=PAGE)
    assert host_kernels.placed[-1] == kv
    assert list(paged.slow_paths(PAGE)) == []
    tables = [[(3, 1), (1, 1)], [(6, 1)], [(5, 1)]]
    steps = [[(0, 200), (0, 1), (0, 70)], [(200, 1), (1, 1), (70, 1)], [(201, 3), (2, 1), (71, 8)]]
    steps += [[(204, 1), (3, 1), (79, 1)]]
    draw = np.random.default_rng(3)
    allowed = {"": 0.06, "8bit": 0.12, "4bit": 0.3}[kv]  # a CPU's backend in bf16 is as far from float32
    for step in steps:
        rows = [step_row(at, count, *tables[index], sequence=index + 1) for index, (at, count) in enumerate(step)]
        ids = draw.integers(0, 31, sum(count for _, count in step)).astype(np.int32)
        found, exact = (run_step(backend, make_step(rows), ids) for backend in backends)
        np.testing.assert_allclose(found, exact, rtol=0, atol=allowed * float(np.abs(exact).max()))
