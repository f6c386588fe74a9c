"""Attention over pages: the Metal kernels' own source against float64, run on a CPU thread by thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import mlx.core as mx
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx.kv import Paged
from edgepipe_mlx.pages.checking import case_error, checked_pages, form_errors, page_errors, scattered_rows
from edgepipe_mlx.pages.kernels import MetalPages, PageKernels, ReferencePages
from edgepipe_mlx.pages.rows import FEWEST_SHARES, MOST_SHARES, MOST_TOKENS, PageForm, page_arrays, page_form, share_of

from edgepipe.backend.step_layout import RowLayout
from edgepipe.backend.types import BackendOptions, SlowPath
from edgepipe.errors import ConfigInvalid
from tests.support.backends.host_compiler import COMPILER
from tests.support.backends.metal_kernels import HostKernels
from tests.support.backends.mlx_models import tiny_config

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

LLAMA = PageForm(
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    value_width=64,
    window=0,
    capped=False,
    sinks=False,
    block_size=16,
    dtype=mx.bfloat16,
    kv="",
)
FORMS = {
    "Llama": LLAMA,
    "windows, sinks and caps": replace(
        LLAMA, num_heads=10, head_dim=80, value_width=80, window=40, sinks=True, capped=True
    ),
    "wide heads": replace(LLAMA, num_heads=6, num_kv_heads=1, head_dim=256, value_width=256, dtype=mx.float32),
    "latents": replace(LLAMA, num_heads=8, num_kv_heads=1, head_dim=320, value_width=288),
    "8 bits": replace(LLAMA, num_heads=16, kv="8bit", window=150, sinks=True, block_size=32),
    "latents in 8 bits": replace(LLAMA, num_kv_heads=1, head_dim=96, value_width=64, kv="8bit"),
    "4 bits": replace(LLAMA, num_heads=10, kv="4bit", block_size=32),
    "latents in 4 bits": replace(
        LLAMA, num_kv_heads=1, head_dim=96, value_width=64, kv="4bit", window=30, block_size=48
    ),
    "16-bit floats": replace(LLAMA, num_heads=5, num_kv_heads=1, dtype=mx.float16),
}

BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
MUTANTS: dict[str, tuple[str, str, str]] = {
    "keys behind the last": ("Llama", "batch + lane < end && key <= position", "key <= position"),
    "tokens behind the query": ("Llama", "&& key <= position &&", "&&"),
    "a key too many in a window": ("windows, sinks and caps", "key > position - WINDOW", "key >= position - WINDOW"),
    "all keys in a window": ("windows, sinks and caps", "WINDOW == 0 ||", "true ||"),
    "logits without a cap": ("windows, sinks and caps", "if (CAPPED)", "if (false)"),
    "no sinks": ("windows, sinks and caps", "if (SINKS) all +=", "if (false) all +="),
    "the first head's sink": ("windows, sinks and caps", "float(sinks[head]) - best", "float(sinks[0]) - best"),
    "blocks in one run": ("Llama", "table[key / BLOCK] * BLOCK", "(table[0] + key / BLOCK) * BLOCK"),
    "the first sequence's blocks": ("Llama", "tables + size_t(sequence) * tables_shape[1]", "tables"),
    "the first sequence's queries": ("Llama", "row = size_t(own[FIRST_ROW] + place / group)", "row = size_t(0)"),
    "rows that adjoin": ("Llama", "row * x_strides[0]", "row * (HEADS * DIM)"),
    "values that adjoin": ("Llama", "index % DIM * x_strides[3]", "index % DIM"),
    "keys of the first head": ("Llama", "size_t(head) * slots", "size_t(0) * slots"),
    "scales of the keys for values": ("8 bits", "value_scales + first_slot", "key_scales + first_slot"),
    "codes without a sign": (
        "8 bits",
        "float(int(words.y << (24 - 8 * index)) >> 24)",
        "float((words.y << (24 - 8 * index)) >> 24)",
    ),
    "sums that keep their weights": (
        "Llama",
        "sums[query][piece][index] *= before",
        "sums[query][piece][index] *= 1.0f",
    ),
    "a simdgroup's sums": ("Llama", "adds ? *place + value : value", "value"),
    "shares of one weight": ("Llama", "metal::exp(highest - best)", "1.0f"),
    "sums of a lane": ("Llama", "apart >= VALUE_LANES", "apart > VALUE_LANES"),
    "logits of half a key": ("Llama", "dot += metal::simd_shuffle_xor(dot, ushort(2));", ""),
    "a missing barrier": (
        "Llama",
        f"turn > 0, lane);\n    {BARRIER}",
        "turn > 0, lane);",
    ),
    "whole codes without their lower bits": ("4 bits", "logits[query] += rests[query]", "logits[query] += 0.0f"),
    "values without their lower bits": ("4 bits", "batches.add(rests, value_rests, key, count, lane);", ""),
    "lower bits of tokens before the span": (
        "4 bits",
        "rests[query] = key >= position / (SPAN + !SPAN) * SPAN ?",
        "rests[query] = true ?",
    ),
    "lower bits a slot too far": ("4 bits", "int(token) + REST", "int(token) + REST + 1"),
    "lower bits as upper ones": ("4 bits", "chunk, STEPS, values", "chunk, 1.0f, values"),
    "the other half of a byte": ("4 bits", "within < half_group ? 0 : 4", "0"),
    "queries that are not there yet": ("Llama", f"asked[index] = value;\n}}\n{BARRIER}", "asked[index] = value;\n}"),
    "highest logits that are not there yet": ("Llama", f"{BARRIER}\nfloat highest", "float highest"),
    "queries of the first tile": (
        "latents",
        "place = tile * QUERIES + query;\n    float value",
        "place = query;\n    float value",
    ),
    "the first chunks of wide values": ("latents", "chunk = piece * VALUE_LANES + part", "chunk = part"),
}
"""A form, a part of a source, and what a mistake would have there."""


@pytest.fixture(autouse=True)
def on_cpu() -> None:
    mlx_backend.configure(mx.Device(mx.cpu))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PageKernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", HostKernels(tmp_path_factory.mktemp("metal")).make)
        return MetalPages()


@needs_compiler
@pytest.mark.parametrize("name", FORMS)
def test_the_kernels_round_once(name: str, kernels: PageKernels) -> None:
    assert max(form_errors(kernels, FORMS[name])) <= 1


SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 300), st.sampled_from([15, 16, 17, 31, 32, 127, 128, 129, 255, 256])),
        st.integers(1, MOST_TOKENS),
        st.sampled_from([0, 0, 3]),
    ),
    min_size=1,
    max_size=4,
)


@needs_compiler
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=SEQUENCES, name=st.sampled_from(["Llama", "windows, sinks and caps", "8 bits", "4 bits"]))
def test_any_rows_round_once(kernels: PageKernels, counts: list[tuple[int, int, int]], name: str) -> None:
    assert case_error(kernels, FORMS[name], scattered_rows(counts, FORMS[name])) <= 1


@settings(max_examples=40)
@given(counts=SEQUENCES, name=st.sampled_from(list(FORMS)))
def test_any_rows_of_the_reference_round_once(counts: list[tuple[int, int, int]], name: str) -> None:
    assert case_error(ReferencePages(), FORMS[name], scattered_rows(counts, FORMS[name])) <= 1


@given(num_keys=st.integers(1, 1_000_000), tokens=st.integers(1, MOST_TOKENS), name=st.sampled_from(list(FORMS)))
def test_shares_cover_all_keys_and_are_few(num_keys: int, tokens: int, name: str) -> None:
    most = FORMS[name].most_shares(tokens)
    assert FEWEST_SHARES <= most <= MOST_SHARES
    assert share_of(num_keys, most) * most >= num_keys
    assert share_of(num_keys, most) % 32 == 0


def test_sums_of_shares_are_small_beside_the_keys() -> None:
    """An 8B's heads at 8,192 tokens: the bytes of shares' sums over those of keys and values."""
    form = replace(LLAMA, num_heads=32, num_kv_heads=8, head_dim=128, value_width=128)
    for tokens in (1, 4, 8):
        arrays = page_arrays(scattered_rows([(8192 - tokens, tokens, 0)], form), form, scale=1, cap=0)
        sums = tokens * form.num_heads * arrays.shares * (form.value_width + 2) * 4
        assert sums <= 0.04 * 8192 * form.num_kv_heads * 2 * form.head_dim * 2


@needs_compiler
@pytest.mark.parametrize("name", ["Llama", "8 bits"])
def test_a_sequence_does_not_depend_on_others(name: str, kernels: PageKernels) -> None:
    form = FORMS[name]
    rows = scattered_rows([(40, 1, 0), (200, 2, 0), (16, 8, 0)], form)
    random = np.random.default_rng(2)
    slots = form.block_size * (1 + max(int(each.blocks.max()) for each in rows))
    shape = (form.num_kv_heads, slots, form.head_dim)
    pool = mx.array(random.integers(-100, 100, shape)).astype(mx.int8 if form.kv else form.dtype)
    scales = mx.array(random.uniform(0.01, 0.02, (*shape[:2], 1)).astype(np.float16))
    paged = Paged(pool, pool, (scales, scales) if form.kv else None)
    queries = mx.array(random.standard_normal((11, form.num_heads, 1, form.head_dim), np.float32)).astype(form.dtype)
    sinks = mx.zeros(form.num_heads, form.dtype) if form.sinks else None

    def attend(part: Sequence[RowLayout]) -> mx.array:
        return kernels.attend(queries, paged, page_arrays(part, form, scale=0.1, cap=0), form, sinks)

    together = attend(rows)
    for each in rows:
        assert mx.array_equal(attend([each]), together[each.first_row : each.end_row])


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_kernels_fail_the_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, whole, broken = MUTANTS[name]
    changed: list[int] = []

    def change(text: str) -> str:
        changed.append(text.count(whole))
        return text.replace(whole, broken)

    monkeypatch.setattr(mx.fast, "metal_kernel", HostKernels(tmp_path, change).make)
    found = checked_pages([FORMS[form]])
    assert sum(changed)
    assert isinstance(found, SlowPath)


@needs_compiler
def test_kernels_that_pass_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", HostKernels(tmp_path).make)
    assert isinstance(checked_pages([LLAMA]), MetalPages)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_kernels_that_do_not_compile_are_told(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(**_given: Any) -> Any:
        raise error("[metal::Device] Unable to build metal library from source\nerror: no such function")

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **_given: refused)
    found = checked_pages([LLAMA])
    assert all("Unable to build" in each.reason for each in page_errors(mx.bfloat16))
    assert isinstance(found, SlowPath)
    assert "Unable to build" in found.reason
    assert "attention over pages are not used: [metal::Device] Unable to build" in caplog.text


@pytest.mark.parametrize(
    ("head_dim", "kv", "served"), [(8, "", True), (12, "", False), (16, "4bit", True), (8, "4bit", False)]
)
def test_heads_are_served_by_their_size(head_dim: int, kv: str, served: bool) -> None:
    spec = tiny_config(head_dim=head_dim).layers[0].attention
    assert spec is not None
    assert (page_form(spec, block_size=16, dtype=mx.float32, kv=kv) is not None) == served


def test_people_who_measure_see_each_form_of_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgepipe_mlx.pages.checking.MetalPages", ReferencePages)
    found = list(page_errors(mx.bfloat16))
    assert len({each.kernel for each in found}) == 3
    assert all(0 < each.error <= 1 and not each.reason for each in found), found


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no attention 'fast'"):
        mlx_backend.MlxBackend(BackendOptions(device="cpu", settings={"attention": "fast"}))
