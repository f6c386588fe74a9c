"""Attention over pages by the own CUDA kernel: its source run on a CPU against float64, and compiled without a GPU."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import PAGED_FILES, PAGED_FUNCTIONS, kernel_source, options  # noqa: E402
from edgepipe_torch.cuda.kernels.paged_checking import (  # noqa: E402
    decode_error,
    parted,
    random_heads,
    worst_decode_error,
)
from edgepipe_torch.cuda.kernels.paged_decode import (  # noqa: E402
    TILE_KEYS,
    PagedDecode,
    PagedForm,
    paged_form,
    part_count,
)
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.kv_codes import NO_SCALE, Codes, FourBits  # noqa: E402

from tests.support.backends.host_compiler import COMPILER  # noqa: E402
from tests.support.backends.host_kernels import SOURCES, HostModule, Part, compile_for_host, paged_part  # noqa: E402
from tests.support.backends.nvrtc import nvrtc_for  # noqa: E402
from tests.support.numerics.four_bits import group_and_block, turned, values_of, whole_values_of  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
GEMMA_4 = PagedForm(head_dim=512, value_dim=512, head_tiles=1)
GLM = PagedForm(head_dim=576, value_dim=512, head_tiles=2)
DEEPSEEK = PagedForm(head_dim=576, value_dim=512, head_tiles=4)
MINICPM = PagedForm(head_dim=288, value_dim=256, head_tiles=2)
SMALL = PagedForm(head_dim=128, value_dim=128, head_tiles=1)
NARROW = PagedForm(head_dim=64, value_dim=64, head_tiles=1)
LATENT = PagedForm(head_dim=160, value_dim=128, head_tiles=2)
WIDE = (GEMMA_4, DEEPSEEK, MINICPM, SMALL, NARROW, LATENT)
FORMS = (*WIDE, *(replace(form, kv=kv) for kv in ("8bit", "4bit") for form in WIDE))
CODES = replace(SMALL, kv="8bit")
FOUR_BITS = replace(SMALL, kv="4bit")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

Modules = dict[PagedForm, HostModule]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Modules:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    found = compile_for_host([paged_part(form) for form in FORMS], tmp_path_factory.mktemp("kernels"))
    return dict(zip(FORMS, found, strict=True))


def kernel_of(modules: Modules, form: PagedForm, multiprocessors: int = 3) -> PagedDecode:
    return PagedDecode(modules[form], form, multiprocessors=multiprocessors)


class TestValues:
    @pytest.mark.parametrize("multiprocessors", [1, 20, 1000])
    @pytest.mark.parametrize("form", [SMALL, NARROW, LATENT], ids=["small", "narrow", "latent"])
    def test_the_check_at_load_passes(self, form: PagedForm, multiprocessors: int, modules: Modules) -> None:
        """With one part, some, and as many as there may be."""
        assert worst_decode_error(kernel_of(modules, form, multiprocessors), form, CPU) <= 1

    @pytest.mark.parametrize("kv", ["8bit", "4bit"])
    @pytest.mark.parametrize("form", [SMALL, NARROW, LATENT], ids=["small", "narrow", "latent"])
    def test_the_check_of_codes_at_load_passes(self, form: PagedForm, kv: str, modules: Modules) -> None:
        form = replace(form, kv=kv)
        assert worst_decode_error(kernel_of(modules, form, 20), form, CPU) <= 1

    @pytest.mark.parametrize("kv", ["", "8bit", "4bit"])
    @pytest.mark.parametrize("form", [GEMMA_4, DEEPSEEK, MINICPM], ids=["Gemma 4", "DeepSeek", "MiniCPM"])
    def test_of_large_heads(self, form: PagedForm, kv: str, modules: Modules) -> None:
        form = replace(form, kv=kv)
        heads = random_heads(form, device=CPU, kv_heads=1)
        assert decode_error(kernel_of(modules, form, 20), heads, (70, 129), page_tokens=128, device=CPU) <= 1

    @settings(max_examples=50, deadline=None)
    @given(
        form=st.sampled_from([SMALL, NARROW, LATENT]),
        kv=st.sampled_from(["", "8bit", "4bit"]),
        lengths=st.lists(st.one_of(st.integers(0, 300), st.sampled_from([64, 65, 128, 192])), min_size=1, max_size=4),
        group=st.integers(1, 40),
        kv_heads=st.integers(1, 3),
        window=st.one_of(st.none(), st.integers(1, 310)),
        softcap=st.sampled_from([0.0, 0.5, 30.0]),
        sinks=st.booleans(),
        steepness=st.sampled_from([0.1, 1.5, 40.0]),
        page_tokens=st.sampled_from([64, 128, 192, 256]),
        multiprocessors=st.integers(1, 100),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_of_any_rows(
        self,
        modules: Modules,
        form: PagedForm,
        kv: str,
        lengths: list[int],
        page_tokens: int,
        multiprocessors: int,
        seed: int,
        **heads: Any,
    ) -> None:
        """Rows and pages lie in random order among others that hold no numbers; rows of length 0 stay as they are."""
        kernel = kernel_of(modules, replace(form, kv=kv), multiprocessors)
        described = random_heads(form, device=CPU, **heads)
        assert decode_error(kernel, described, lengths, page_tokens=page_tokens, device=CPU, seed=seed) <= 1

    @pytest.mark.parametrize("entry", [1, 3])  # a key and a value of the second kv head
    @pytest.mark.parametrize("token", [40, 65])  # read with 4 bits, and with 8
    def test_a_group_of_four_bits_without_a_scale_is_no_number(self, token: int, entry: int, modules: Modules) -> None:
        """It spoils the heads that read it, and no others."""
        heads = random_heads(FOUR_BITS, device=CPU)
        vectors = torch.randn(2, 64, 4, 128, generator=torch.Generator().manual_seed(1))
        pool = FourBits(128).encode(vectors)
        pool.scales.view(128, 4, 4)[token, entry, 2] = NO_SCALE
        keys, values = (Codes(*parts) for parts in zip(*(part.split(2, dim=2) for part in pool), strict=True))
        out = torch.zeros(1, heads.num_heads, 128, dtype=torch.bfloat16)
        where = {"rows": torch.zeros(1, dtype=torch.int32), "lengths": torch.tensor([70], dtype=torch.int32)}
        tables = torch.tensor([[0, 1]], dtype=torch.int32)
        asked = torch.randn(1, heads.num_heads, 128).bfloat16()
        kernel_of(modules, FOUR_BITS)(heads, asked, keys, values, out, tables=tables, **where)
        group = heads.num_heads // 2
        assert out[:, :group].isfinite().all()
        assert out[:, group:].isnan().all()

    @settings(max_examples=20, deadline=None)
    @given(
        form=st.sampled_from([SMALL, NARROW, LATENT]),
        length=st.integers(1, 200),
        group=st.integers(1, 20),
        multiprocessors=st.sampled_from([1, 100]),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_four_bits_are_read_as_the_bytes_say(
        self, form: PagedForm, length: int, group: int, multiprocessors: int, seed: int, modules: Modules
    ) -> None:
        """In float64, by a reader of the bytes that the CPU's kernels are compared with, too."""
        form = replace(form, kv="4bit")
        heads = random_heads(form, device=CPU, group=group)
        draw = np.random.default_rng(seed)
        size, block = group_and_block(form.head_dim, form.value_width)
        pages = 5
        codes = draw.integers(0, 256, (pages, 64, heads.entries, form.head_dim // 2), np.uint8)
        scales = draw.integers(150, 170, (pages, 64, heads.entries, form.head_dim // size), np.uint8)
        table = draw.permutation(pages)
        queries = torch.from_numpy(draw.standard_normal((1, heads.num_heads, form.head_dim), np.float32)).bfloat16()
        placed = parted(Codes(torch.from_numpy(codes), torch.from_numpy(scales)), heads)
        out = torch.zeros(1, heads.num_heads, heads.out_dim, dtype=torch.bfloat16)
        where = {"rows": torch.zeros(1, dtype=torch.int32), "lengths": torch.tensor([length], dtype=torch.int32)}
        tables = torch.from_numpy(table[None].astype(np.int32))
        kernel_of(modules, form, multiprocessors)(heads, queries, *placed, out, tables=tables, **where)

        own_codes, own_scales = (each[table].reshape(-1, *each.shape[2:]) for each in (codes, scales))
        span = (length - 1) // 32 * 32
        newest = own_codes[span:length], own_scales[span:length], own_codes[span + 48 : length + 48]
        seen = np.concatenate([values_of(own_codes[:span], own_scales[:span], size), whole_values_of(*newest, size)])
        first = 0 if heads.value_width else heads.num_kv_heads
        keys = np.repeat(seen[:, : heads.num_kv_heads], group, axis=1)
        values = np.repeat(turned(seen, block)[:, first:, : heads.out_dim], group, axis=1)
        asked = torch.from_numpy(turned(queries.double().numpy()[0], block)).bfloat16().double().numpy()
        logits = heads.scale * np.einsum("hd,lhd->hl", asked, keys)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        expected = np.einsum("hl,lhv->hv", weights, values)
        spread = np.einsum("hl,lhv->hv", weights, np.abs(values))
        allowed = 2.0**-7 * spread + 2.0**-20 * spread.max(axis=1, keepdims=True)
        assert (np.abs(out[0].double().numpy() - expected) <= allowed).all()

    @pytest.mark.parametrize("sink", [-200.0, 200.0])
    def test_of_sinks_out_of_range(self, sink: float, modules: Modules) -> None:
        """Of their exponentials, one is 0 and the other infinite."""
        heads = random_heads(SMALL, device=CPU, sinks=True)
        assert heads.sinks is not None
        heads.sinks.fill_(sink)
        for multiprocessors in (1, 100):
            kernel = kernel_of(modules, SMALL, multiprocessors)
            assert decode_error(kernel, heads, (90, 200), page_tokens=64, device=CPU) <= 1


class Call:
    """Three rows over pages of 64 tokens that nothing else shares, for heads of ``SMALL``."""

    def __init__(self, seed: int = 1) -> None:
        made = torch.Generator().manual_seed(seed)
        self.heads = random_heads(SMALL, device=CPU)
        self.queries = torch.randn(3, self.heads.num_heads, 128, generator=made).bfloat16()
        self.pages = torch.randn(15, 64, self.heads.entries, 128, generator=made).bfloat16()
        self.lengths = [300, 70, 130]
        self.tables = torch.arange(15, dtype=torch.int32).view(3, 5)

    def run(self, kernel: PagedDecode, queries: Tensor | None = None) -> Tensor:
        keys, values = self.pages.split(self.heads.num_kv_heads, dim=2)
        out = torch.zeros(3, self.heads.num_heads, 128, dtype=torch.bfloat16)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        rows = torch.arange(3, dtype=torch.int32)
        asked = self.queries if queries is None else queries
        kernel(self.heads, asked, keys, values, out, rows=rows, lengths=lengths, tables=self.tables)
        return out


class TestCalls:
    @pytest.mark.parametrize("multiprocessors", [1, 100])
    def test_a_row_does_not_depend_on_its_neighbours(self, multiprocessors: int, modules: Modules) -> None:
        kernel, call = kernel_of(modules, SMALL, multiprocessors), Call()
        before = call.run(kernel)
        call.queries[[0, 2]], call.pages[:5], call.pages[10:] = torch.nan, torch.nan, torch.nan
        call.lengths = [17, 70, 0]
        after = call.run(kernel)
        assert torch.equal(after[1], before[1])
        assert after[0].isnan().all()
        assert not after[2].any()

    def test_a_row_may_read_pages_of_others(self, modules: Modules) -> None:
        """Sequences share the pages of a common beginning."""
        kernel, call = kernel_of(modules, SMALL, 100), Call()
        before = call.run(kernel)
        call.pages[10:12] = call.pages[:2]
        call.lengths[2] = 128
        apart = call.run(kernel)
        call.tables[2, :2] = call.tables[0, :2]
        assert torch.equal(call.run(kernel), apart)
        assert torch.equal(apart[:2], before[:2])

    def test_queries_with_gaps_or_at_odd_addresses(self, modules: Modules) -> None:
        call, kernel = Call(), kernel_of(modules, SMALL, 20)
        heads = call.heads.num_heads
        wanted = call.run(kernel)
        for shape, place in (
            ((3, heads + 2, 128), (slice(None), slice(1, -1))),  # beside keys and values, as in a step
            ((3, heads, 136), (slice(None), slice(None), slice(8))),
            ((3, heads, 256), (slice(None), slice(None), slice(None, None, 2))),
        ):
            spaced = torch.full(shape, torch.nan, dtype=torch.bfloat16)
            view = spaced[place] if shape != (3, heads, 136) else spaced[:, :, 8:]
            view.copy_(call.queries)
            assert torch.equal(call.run(kernel, view), wanted)
        odd = torch.empty(call.queries.numel() + 1, dtype=torch.bfloat16)[1:].view_as(call.queries)
        odd.copy_(call.queries)
        module = Launches()
        call.run(PagedDecode(module, SMALL, multiprocessors=20), odd)
        assert [name for name, _ in module.calls] == list(PAGED_FUNCTIONS)
        assert all(given[0].queries % 16 == 0 for _, given in module.calls)
        assert torch.equal(call.run(kernel, odd), wanted)

    def test_pages_that_reads_would_miss_are_refused(self) -> None:
        kernel = PagedDecode(Launches(), SMALL, multiprocessors=20)
        for pages in (
            torch.zeros(15, 64, 4, 128, dtype=torch.int8),  # codes, which have another form
            torch.zeros(15, 96, 4, 128),  # a tile of keys would cross pages
            torch.zeros(15, 128, 4, 128)[:, :64],
            torch.zeros(15, 64, 4, 132)[..., :128],
            torch.zeros(15 * 64 * 4 * 128 + 1)[1:].view(15, 64, 4, 128),
        ):
            call = Call()
            call.pages = pages.bfloat16() if pages.is_contiguous() and pages.is_floating_point() else pages
            if pages.storage_offset():
                call.pages = torch.zeros(pages.numel() + 1, dtype=torch.bfloat16)[1:].view_as(pages)
            with pytest.raises(AssertionError):
                call.run(kernel)


class Launches:
    """A module that only notes what it is asked to launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Any) -> None:
        assert blocks > 0
        assert shared_bytes <= SHARED_BYTES
        self.calls.append((function, tuple(arguments)))


class TestForms:
    @pytest.mark.parametrize(
        ("like", "group", "form"),
        [
            (GEMMA_4, 8, GEMMA_4),
            (GEMMA_4, 16, GEMMA_4),
            (LATENT, 17, LATENT),
            (GLM, 20, GLM),
            (DEEPSEEK, 128, DEEPSEEK),
            (PagedForm(head_dim=1024, value_dim=1024, head_tiles=1), 64, "two"),
        ],
        ids=str,
    )
    def test_a_block_has_the_heads_that_fit(self, like: PagedForm, group: int, form: PagedForm | str) -> None:
        found = paged_form(random_heads(like, device=CPU, group=group))
        expected = PagedForm(head_dim=1024, value_dim=1024, head_tiles=2) if form == "two" else form
        assert found == expected

    @pytest.mark.parametrize(
        ("head_dim", "value_dim", "reason"),
        [
            (80, 80, "not 80 and 80"),
            (192, 192, "not 192 and 192"),
            (576, 448, "not 576 and 448"),
            (520, 512, "not 520 and 512"),
            (4096, 4096, "not of 4096 numbers"),
        ],
    )
    def test_others_are_refused_by_name(self, head_dim: int, value_dim: int, reason: str) -> None:
        heads = random_heads(PagedForm(head_dim=head_dim, value_dim=value_dim, head_tiles=1), device=CPU)
        with pytest.raises(KernelsUnavailable, match=reason):
            paged_form(heads)

    def test_four_bits_need_values_of_which_a_lane_has_one_group(self) -> None:
        heads = random_heads(PagedForm(head_dim=384, value_dim=384, head_tiles=1), device=CPU)
        assert paged_form(heads, "8bit").value_dim == 384
        with pytest.raises(KernelsUnavailable, match="64 or powers of two from 128 on, not 384 and 384"):
            paged_form(heads, "4bit")

    @given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 200))
    def test_every_form_fits_shared_memory(self, keys: int, values: int, group: int) -> None:
        like = PagedForm(head_dim=32 * keys, value_dim=128 * values, head_tiles=1)
        assert paged_form(random_heads(like, device=CPU, group=group)).shared_bytes <= SHARED_BYTES


class TestParts:
    @given(st.sampled_from([GEMMA_4, GLM, DEEPSEEK]), st.integers(1, 9000), st.integers(1, 2**20), st.integers(1, 200))
    def test_fill_the_device_with_work_worth_a_part(
        self, form: PagedForm, blocks: int, most_keys: int, multiprocessors: int
    ) -> None:
        parts = part_count(form, blocks, most_keys, multiprocessors)
        each = TILE_KEYS * form.head_tiles
        assert 1 <= parts <= 256
        assert parts == 1 or (parts - 1) * each < most_keys
        assert parts == 1 or (parts - 1) * blocks < 2 * multiprocessors
        full = parts * blocks >= multiprocessors
        assert full or parts == 256 or parts * each >= most_keys

    def test_a_window_has_no_parts_beyond_it(self) -> None:
        module, call = Launches(), Call()
        call.heads = random_heads(SMALL, device=CPU, window=100)
        call.run(PagedDecode(module, SMALL, multiprocessors=1000))
        assert [given[0].parts for _, given in module.calls] == [3, 3]


MUTANTS = (
    ("high = greater(high, other_lane(high, 2));", ""),
    ("total[tile][half] * kept + left", "total[tile][half] + left"),
    ("given.sinks ? expf(given.sinks[head] - high) : 0.0f", "0.0f"),
    ("if (own.first >= own.end) return;", ""),
    ("= high;\n            }\n        synchronise();", "= high;\n            }"),
    ("<< 16;\n            }\n        synchronise();", "<< 16;\n            }"),
    ("factors[part] = factor;\n    }\n    synchronise();", "factors[part] = factor;\n    }"),
)


CODE_MUTANTS = (
    (" * given.scale * key_scales[side]", " * given.scale"),
    ("left * value_scales[0]", "left"),
    ("right * value_scales[1]", "right * value_scales[0]"),
    ("seen ? widen_half(scales.values[place]) : 0.0f", "widen_half(scales.values[place])"),
    ("scales.stride + kv_head", "scales.stride"),
    ("masked_or(bytes, 0x00800080u, 0xC300C300u)", "0xC300C300u"),
    ("two_bytes(codes.y, 2, codes.y, 3)", "two_bytes(codes.y, 3, codes.y, 2)"),
    ("two_bytes(a[n / 4], n % 4, b[n / 4], n % 4)", "two_bytes(a[n / 4], n % 4, a[n / 4], n % 4)"),
)


FOUR_BIT_MUTANTS = (
    ("0x3F803F80u, 0xC1BCC1BCu", "0x3F803F80u, 0xC1B8C1B8u"),
    ("lane & apart ? other - own[place]", "lane & apart ? own[place] - other"),
    ("own[place + apart] = one - other;", "own[place + apart] = other - one;"),
    ("n < bytes ? codes << 3 : codes >> 1", "n < bytes ? codes >> 1 : codes << 3"),
    ("scaled_codes(codes >> 5, scales)", "scaled_codes(codes >> 9, scales)"),
    ("number / 16 * 2 + (number % 4 >> 1)", "number / 16 + 2 * (number % 4 >> 1)"),
    ("span < TILE_KEYS ? 2 : 1", "1"),
    ("(own.high - 1) / SPAN * SPAN", "own.high / SPAN * SPAN"),
    ("key >= span && at + key < own.high", "at + key < own.high"),
    ("at + key + REST_KEYS;", "at + key + SPAN;"),
    ("given.tables[row * given.table_width + place / given.page_tokens];", "page;"),
    (
        "is_rest == pass ? scale_pair(of_key[group], pass * SIXTEENTH) : 0",
        "scale_pair(of_key[group], pass * SIXTEENTH)",
    ),
    ("of_key[group]", "of_key[0]"),
    ("pass && span > own.low - at ? span", "span > own.low - at ? span"),
    ("kv_head * (HEAD_DIM / GROUP) + code / 16", "kv_head * (HEAD_DIM / GROUP)"),
    ("(scales[1] & 0xFFFF0000u)", "(scales[0] & 0xFFFF0000u)"),
    ("pass * SIXTEENTH);\n                });", "0);\n                });"),
    ("code / 16 * 32 + code % 16", "code % 16 * 2 + code / 16"),
    ("        synchronise();\n        for (int head = warp;", "        for (int head = warp;"),
    ("    synchronise();\n    if (threadIdx.x < 32) write_turned", "    if (threadIdx.x < 32) write_turned"),
)


@needs_compiler
@pytest.mark.parametrize(
    ("form", "mutants"),
    [
        pytest.param(SMALL, MUTANTS, id="bf16"),
        pytest.param(CODES, CODE_MUTANTS, id="8bit"),
        pytest.param(FOUR_BITS, FOUR_BIT_MUTANTS, id="4bit", marks=pytest.mark.long),
    ],
)
def test_the_check_at_load_refuses_broken_kernels(
    form: PagedForm, mutants: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """Sources with one change each; a missing barrier shows, since blocks run their warps in either order."""
    source = (SOURCES / PAGED_FILES[-1]).read_text(encoding="utf-8")
    folder = tmp_path / "sources"
    folder.mkdir()
    shutil.copy(SOURCES / PAGED_FILES[0], folder)
    parts: list[Part] = []
    for index, (whole, broken) in enumerate((("", ""), *mutants)):
        assert whole in source, whole
        (folder / f"{index}.cu").write_text(source.replace(whole, broken, 1), encoding="utf-8")
        files = (PAGED_FILES[0], f"{index}.cu")
        parts.append(Part(files=files, macros=form.macros, functions=PAGED_FUNCTIONS))
    errors = [_error(module, form) for module in compile_for_host(parts, tmp_path, folder)]
    assert errors[0] <= 1
    assert [names[0] for names, error in zip(mutants, errors[1:], strict=True) if error <= 1] == []


def _error(module: HostModule, form: PagedForm) -> float:
    try:
        return worst_decode_error(PagedDecode(module, form, multiprocessors=100), form, CPU)
    except RuntimeError:  # threads diverge
        return np.inf


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *((80, GEMMA_4), (90, DEEPSEEK), (120, GLM)),
        *((architecture, form) for form in (CODES, FOUR_BITS) for architecture in (80, 89, 90, 120)),
    ],
    ids=str,
)
def test_compile_without_a_gpu(architecture: int, form: PagedForm) -> None:
    nvrtc = nvrtc_for(architecture)
    source = kernel_source(PAGED_FILES)
    cubin = nvrtc.compile(source, architecture=architecture, options=options(form.macros))
    assert cubin.startswith(b"\x7fELF")
    assert all(re.search(name.encode(), cubin) for name in PAGED_FUNCTIONS)
    with pytest.raises(KernelsUnavailable, match="HEAD_DIM"):
        nvrtc.compile(source, architecture=architecture, options=[])
