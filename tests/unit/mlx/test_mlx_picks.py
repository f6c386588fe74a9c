"""Candidates for sampling: the Metal kernels' own source against a sort of whole rows, run thread by thread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import mlx.core as mx
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx.picks.candidates import NUM_CANDIDATES, pick
from edgepipe_mlx.picks.checking import checked_picks, pick_error, pick_error_of_each, pick_errors
from edgepipe_mlx.picks.kernels import MetalPicks, PickKernels, ReferencePicks, serves

from edgepipe.backend.types import LogitEdits, SlowPath
from edgepipe.errors import ConfigInvalid
from tests.support.backends.host_compiler import COMPILER
from tests.support.backends.metal_kernels import HostKernels
from tests.support.backends.mlx_models import cpu_options

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

TWO_PARTS, THREE_PARTS = 5000, 9000  # tokens

BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
MUTANTS: dict[str, tuple[str, str]] = {
    "-0 below 0": ("if (size == 0) return ZERO;", ""),
    "no numbers by their bits": ("if (size > 0x7F800000u) return NO_NUMBER;", ""),
    "equal logits by descending id": ("other_id < id", "other_id > id"),
    "an equal logit too few": ("if (sums.count(own) <= COUNT)", "if (sums.count(own) < COUNT)"),
    "ids of few bits": ("HIGHEST_BIT_OF_IDS = 1 << 23", "HIGHEST_BIT_OF_IDS = 1 << 11"),
    "places from the simdgroup's begin": ("earlier = metal::simd_prefix_exclusive_sum(own)", "earlier = 0"),
    "the first simdgroup's count": (
        "uint all = 0;\n        for (int each = 0; each < THREADS / LANES; each++)",
        "uint all = 0;\n        for (int each = 0; each < 1; each++)",
    ),
    "the first simdgroup's total": ("all += as_type<float>(found[each])", "all += as_type<float>(found[0])"),
    "sums in one place": ("turn ^= 1;", ""),
    "sums that are not there yet": (f"= number;\n        {BARRIER}", "= number;"),
    "candidates that are not there yet": (
        f"{BARRIER}\nfor (int each = thread_index; each < COUNT",
        "for (int each = thread_index; each < COUNT",
    ),
    "tokens behind the last": ("if (id < tokens) {", "{"),
    "logits of the first row": ("first = size_t(row) * tokens;", "first = 0;"),
    "masks of the first row": ("masks[size_t(row) * masks_shape[1] + id / 32]", "masks[id / 32]"),
    "bits the wrong way round": (">> id % 32 & 1", ">> (31 - id % 32) & 1"),
    "exponentials of no token": ("if (keys[index] > FORBIDDEN)", ""),
    "the first row's temperature": (
        "exponentials<OWN>(own, best, temperatures[row])",
        "exponentials<OWN>(own, best, temperatures[0])",
    ),
    "logits as computed at a temperature": (
        "exponentials<OWN>(own, best, 1.0f)",
        "exponentials<OWN>(own, best, temperatures[row])",
    ),
    "changed logits for those as computed": ("if (CHANGED) {", "if (false) {"),
    "parts of one weight": (
        "as_type<float>(end[1]) * metal::exp((as_type<float>(end[0]) - value_of(best)) / temperatures[row])",
        "as_type<float>(end[1])",
    ),
    "the highest changed logit for the other": ("value_of(best_computed) + metal::log", "value_of(best) + metal::log"),
    "logits as computed of the first row": ("logits[size_t(row) * logits_shape[1] + id]", "logits[id]"),
}
"""A part of a source, and what a mistake would have there."""


@pytest.fixture(autouse=True)
def on_cpu() -> None:
    mlx_backend.configure(mx.Device(mx.cpu))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PickKernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", HostKernels(tmp_path_factory.mktemp("metal")).make)
        return MetalPicks()


@needs_compiler
@pytest.mark.parametrize("vocabulary", [TWO_PARTS, THREE_PARTS])
def test_the_kernels_pick_exactly(vocabulary: int, kernels: PickKernels) -> None:
    assert max(pick_error_of_each(kernels, vocabulary)) <= 1


@pytest.mark.parametrize("vocabulary", [9, 97, 256, 257, THREE_PARTS, 152_064])
def test_the_reference_picks_exactly(vocabulary: int) -> None:
    assert max(pick_error_of_each(ReferencePicks(), vocabulary)) <= 1


@st.composite
def steps(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], LogitEdits]:
    """Return logits with many equal ones, some that are no numbers or infinite, and edits."""
    rows, vocabulary = draw(st.integers(1, 9)), draw(st.sampled_from([256, 300, 4096, 4097, 8192, 8200]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (random.standard_normal((rows, vocabulary)) * draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))).astype(
        np.float32
    )
    if draw(st.booleans()):
        logits = np.round(logits)  # of both zeros
    for odd in draw(st.lists(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]), max_size=3)):
        number = draw(st.sampled_from([1, 20, 300]))
        logits[random.integers(0, rows, number), random.integers(0, vocabulary, number)] = odd
    places = random.permutation(rows * vocabulary)[: draw(st.sampled_from([0, 1, 500]))].astype(np.int32)
    edited = len(places)
    masks = random.integers(-(2**31), 2**31, (rows, -(-vocabulary // 32)), np.int32)
    masks &= np.where(random.random(masks.shape) < draw(st.sampled_from([0.0, 0.01, 1.0])), -1, 0).astype(np.int32)
    return logits, LogitEdits(
        rows=places // np.int32(vocabulary),
        ids=places % np.int32(vocabulary),
        repetition=random.choice(np.array([1, 1.1, 1.5], np.float32), edited),
        add=random.choice(np.array([0, 1, -2.5, -np.inf], np.float32), edited),
        masks=masks if draw(st.booleans()) else None,
        temperatures=random.choice(np.array([1e-5, 0.3, 1, 2], np.float32), rows),
        num_top=draw(st.sampled_from([0, 1, 20])),
    )


@needs_compiler
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=steps())
def test_any_logits_are_picked_exactly(kernels: PickKernels, step: tuple[npt.NDArray[np.float32], LogitEdits]) -> None:
    assert pick_error(kernels, *step) <= 1


@settings(max_examples=30, deadline=None)
@given(step=steps())
def test_the_reference_picks_any_logits_exactly(step: tuple[npt.NDArray[np.float32], LogitEdits]) -> None:
    assert pick_error(ReferencePicks(), *step) <= 1


@needs_compiler
def test_a_row_does_not_depend_on_others(kernels: PickKernels) -> None:
    random = np.random.default_rng(4)
    logits = mx.array(random.standard_normal((5, TWO_PARTS), np.float32))
    heat = mx.array(random.uniform(0.5, 2, 8).astype(np.float32))
    together = kernels.pick(logits, logits, None, heat, NUM_CANDIDATES)
    for row in range(5):
        own, alone = logits[row : row + 1], mx.concatenate([heat[row:], heat])
        assert mx.array_equal(kernels.pick(own, own, None, alone, NUM_CANDIDATES)[0], together[row])


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_kernels_fail_the_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = MUTANTS[name]
    changed: list[int] = []

    def change(text: str) -> str:
        changed.append(text.count(whole))
        return text.replace(whole, broken)

    monkeypatch.setattr(mx.fast, "metal_kernel", HostKernels(tmp_path, change).make)
    found = checked_picks(TWO_PARTS)
    assert sum(changed)
    assert isinstance(found, SlowPath)


@needs_compiler
def test_kernels_that_pass_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostKernels(tmp_path)
    monkeypatch.setattr(mx.fast, "metal_kernel", host.make)
    assert isinstance(checked_picks(TWO_PARTS), MetalPicks)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_kernels_that_do_not_compile_are_told(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(**_given: Any) -> Any:
        raise error("[metal::Device] Unable to build metal library from source\nerror: no such function")

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **_given: refused)
    found = checked_picks(TWO_PARTS)
    assert all("Unable to build" in each.reason for each in pick_errors())
    assert isinstance(found, SlowPath)
    assert "Unable to build" in found.reason
    assert "pick candidates are not used: [metal::Device] Unable to build" in caplog.text


def test_vocabularies_beyond_the_kernels_are_told() -> None:
    assert serves(262_208, NUM_CANDIDATES)
    found = checked_picks(1_000_000)
    assert isinstance(found, SlowPath)
    assert "1000000 tokens" in found.reason


def test_people_who_measure_see_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgepipe_mlx.picks.checking.MetalPicks", ReferencePicks)
    monkeypatch.setattr("edgepipe_mlx.picks.checking._VOCABULARY", THREE_PARTS)
    (found,) = pick_errors()
    assert 0 < found.error <= 1


@pytest.mark.parametrize("num_top", [0, 20])
def test_a_row_leaves_three_kilobytes(num_top: int) -> None:
    """Bytes that ``collect`` copies of each row, with edits. The row itself has 608,256."""
    rows, vocabulary = 4, 152_064
    edits = LogitEdits(
        rows=np.zeros(1, np.int32),
        ids=np.zeros(1, np.int32),
        repetition=np.ones(1, np.float32),
        add=np.ones(1, np.float32),
        masks=None,
        temperatures=np.ones(rows, np.float32),
        num_top=num_top,
    )
    logits = mx.zeros((rows, vocabulary), mx.float32)
    found = pick(ReferencePicks(), logits, edits)
    assert {each.nbytes for each in (found.packed, found.tops)} == {rows * (3 * NUM_CANDIDATES + 2) * 4}
    assert (found.tops is found.packed) == (num_top == 0)
    plain = pick(ReferencePicks(), logits, replace(edits, ids=np.zeros(0, np.int32)))
    assert plain.tops is plain.packed
    assert plain.changed is logits


def test_an_unknown_place_of_sampling_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no sampling 'moon'"):
        mlx_backend.MlxBackend(cpu_options(sampling="moon"))
